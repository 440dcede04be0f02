"""What users and models write: to masters, to entries of state dicts, to 16-bit buffers; looked at before each use.

Masters that were written to are rounded into their weights. A write to an entry, which is a copy, reaches nothing. A
16-bit buffer that a model writes to while it trains, such as a counter or a running mean, changes a little at a time,
and 16 bits round small changes away: in bfloat16 a counter stops at 256. Of both there is one warning.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..basics.dtypes import is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import dotted
from ..distributed.ddp import note_running_wrapper
from ..distributed.sharding import is_distributed, is_sharded
from ..masters.masters import Masters
from ..torch_internals.parameter_data import versions_of

_WRITTEN: Final = (
    "{} of a state dict that model.state_dict() returned {} written to, and not loaded. Entries are float32 copies, so "
    "the model does not have these numbers: call model.load_state_dict() with them, or write inside `with "
    "mpinit.float32_weights(model)`"
)
# How many entries the warning names.
_NAMED: Final = 5
# Writes of the first two steps are looked for. A model writes to its state in every step, or after every step.
_STEPS: Final = 2


class Writes:
    """What is done about writes before a forward of a session's models, called by user code, and before a step."""

    def __init__(self, masters: Masters) -> None:
        self.entries = WrittenEntries()
        self.buffers = WrittenBuffers()
        self._masters = masters
        # While one thread applies pending writes, forwards of other threads wait.
        self._lock = threading.RLock()

    def before_forward(self) -> None:
        """Apply pending writes, and warn of those that reach nothing.

        Raises:
            RuntimeError: see :meth:`.Masters.follow_writes`.
        """
        if is_distributed():
            note_running_wrapper()
        if torch.is_grad_enabled():
            self.buffers.begin()
        with self._lock:
            self._apply()

    def before_step(self) -> None:
        """Do the same before a step; the first two warn of buffers."""
        self._apply()
        self.buffers.before_step()

    def _apply(self) -> None:
        self._masters.follow_writes()
        self.entries.warn_of_writes()


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


class WrittenBuffers:
    """The 16-bit buffers of models as they were when training began, compared at the first two steps.

    What is loaded before the first forward that records a graph is no write.
    """

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, str]] = []
        # Each buffer, its version and its numbers.
        self._before: list[tuple[torch.Tensor, int, torch.Tensor]] | None = None
        self._steps = 0

    def list_buffers(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        """List the 16-bit buffers of modules, which are referred to weakly."""
        for path, module in named_modules:
            # keep_batchnorm_fp32 decides about BatchNorms. The vectors of spectral norms are computed in every forward.
            if not module._buffers or isinstance(module, (_BatchNorm, _SpectralNorm)):
                continue
            spectral = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
            for name, buffer in module._buffers.items():
                is_norms = any(name in (f"{own}_u", f"{own}_v") for own in spectral)
                if buffer is None or is_norms or buffer.is_meta or is_sharded(buffer):
                    continue
                if is_lower_precision(buffer.dtype):
                    self._places.append((weakref.ref(module), name, dotted(path, name)))

    def begin(self) -> None:
        """Note the buffers as they are, before the first forward that records a graph."""
        if self._before is None and self._places:
            buffers = [(place, self._present(*place[:2])) for place in self._places]
            present = [(place, buffer) for place, buffer in buffers if buffer is not None]
            self._places = [place for place, _ in present]
            self._before = [(buffer, versions_of([buffer])[0], buffer.detach().clone()) for _, buffer in present]

    def before_step(self) -> None:
        """Warn once, before the first two steps, of the buffers that were written to or replaced since the beginning.

        A forward may have done so, or a method such as the update of a normaliser of observations.
        """
        if not self._places:
            return
        self.begin()  # where no forward was seen, as of a compiled model: then the second step compares
        self._steps += 1
        written = [
            (module, name)
            for (module, own, name), before in zip(self._places, self._before or (), strict=True)
            if _was_written(self._present(module, own), *before)
        ]
        if written or self._steps == _STEPS:
            self._before, self._places = None, []
        if written:
            names = [name for _, name in written]
            entries = list(dict.fromkeys(_entry(module(), name) for module, name in written))
            warn_user(
                f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} written to while the model trains, in 16 "
                "bits: small changes of a number are rounded away, so counters and running averages stall. Append "
                f"keep_fp32={entries} to what you keep; where that is a buffer alone, cast what forward computes of it"
            )

    @staticmethod
    def _present(module: weakref.ref[nn.Module], name: str) -> torch.Tensor | None:
        found = module()
        return None if found is None else found._buffers.get(name)


def _entry(module: nn.Module | None, name: str) -> str:
    """Return the module's name where nothing in it is trained, because a whole module casts its inputs and outputs."""
    path = name.rpartition(".")[0]
    trains = module is None or any(parameter.requires_grad for parameter in module.parameters())
    return path if path and not trains else name


def _was_written(now: torch.Tensor | None, before: torch.Tensor, version: int, numbers: torch.Tensor) -> bool:
    if now is None or not is_lower_precision(now.dtype) or now.device != numbers.device:
        return False
    # DistributedDataParallel writes to all buffers in every forward: there only numbers show what the model writes.
    if (now is not before or versions_of([now])[0] != version) and not is_distributed():
        return True
    # Writes through .data move no version.
    return not torch.equal(now.nan_to_num(), numbers.nan_to_num())
