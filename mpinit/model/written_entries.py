"""The warning of writes to entries of state dicts, which are copies: a write to one does not reach the model."""

import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..basics.logs import warn_user

_WRITTEN: Final = (
    "{} of a state dict that model.state_dict() returned {} written to, and not loaded. Entries are float32 copies, so "
    "the model does not have these numbers: call model.load_state_dict() with them, or write inside `with "
    "mpinit.float32_weights(model)`"
)
# How many entries the warning names.
_NAMED: Final = 5


class WrittenEntries:
    """The entries of state dicts that users have: a write to one that is not loaded is warned of, once."""

    def __init__(self) -> None:
        # The id of a weak reference to an entry -> that, the entry's version when it was made or last loaded, its name.
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        self._has_warned = False

    def add(self, entry: torch.Tensor, name: str) -> None:
        """Add an entry, until it is freed."""
        if not self._has_warned:
            entries = self._entries
            known = weakref.ref(entry, lambda freed: entries.pop(id(freed), None))
            entries[id(known)] = known, entry._version, name

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Record that a state dict is loaded: writes to its entries so far are wanted."""
        ids = set(map(id, state_dict.values())) if self._entries else set()
        for key, (known, _, name) in list(self._entries.items()):
            entry = known()
            if entry is not None and id(entry) in ids:
                self._entries[key] = known, entry._version, name

    def warn_of_writes(self) -> None:
        """Warn once of the entries that were written to and not loaded since; at a forward or a step."""
        if not self._entries:
            return
        present = [(known(), version, name) for known, version, name in list(self._entries.values())]
        names = [repr(name) for entry, version, name in present if entry is not None and entry._version != version]
        if names:
            self._has_warned = True
            self._entries.clear()
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            warn_user(_WRITTEN.format(", ".join(names[:_NAMED]) + more, "were" if len(names) > 1 else "was"))
