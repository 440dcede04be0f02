"""Float32 for state that forwards write to, such as counters and running means.

When forwards are seen to write to a 16-bit buffer or frozen parameter, its module computes in float32 from the next
step on. The module's inputs are cast to float32 and its outputs back, as for modules that ``keep_fp32`` names. Trained
weights in it stay 16-bit, with their masters, and are cast to float32 while its forward runs.

A module with a large share of the trained numbers is not kept in float32. If a write to its state was so small that 16
bits round such writes away, a warning names the tensor.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.logs import log
from ..basics.modules import modules_of, own_tensors
from ..basics.weak_references import WeakIdSet
from ..distributed.sharding import is_sharded, set_data
from .boundary import Boundary, ForwardGuard
from .float32_values import Float32Values
from .forward import patched_forward
from .forward_weights import ForwardWeights
from .selection import reads_part
from .written_state import Place, WrittenState, is_watched, warn_of_writes

# A module is kept in float32 if at most one in this many of the models' trained numbers is in it.
_SHARE: Final = 16


# The entry in a state dict's metadata of a module that is kept in float32.
KEPT: Final = "mpinit_float32"


@dataclass(eq=False)
class KeptState:
    """The state of a session's models that forwards write to, and the modules that are kept in float32 for it.

    Attributes:
        models: the models.
        values: the float32 values of their tensors.
        written: the record of writes by forwards; None when forwards are no longer watched.
        names: the names of the modules that are kept in float32.
        modules: these modules.
    """

    models: Sequence[nn.Module]
    values: Float32Values
    written: WrittenState | None = None
    names: list[str] = field(default_factory=list)
    modules: WeakIdSet[nn.Module] = field(default_factory=WeakIdSet)
    _step: int = 0
    _warned: set[str] = field(default_factory=set)
    _boundaries: tuple[Boundary, Boundary] | None = None
    _guard: ForwardGuard | None = None
    _log: Callable[[str], None] | None = None

    def begin(
        self, written: WrittenState, cast: Boundary, kept: Boundary, guard: ForwardGuard, is_logged: bool
    ) -> None:
        """Watch the models' forwards from now on.

        Args:
            written: the state to watch.
            cast, kept: the boundaries of modules that are cast, and of those that stay float32.
            guard: the checks before every forward of the models.
            is_logged: whether to log the names of modules that are kept in float32.
        """
        self.written = guard.written = written
        self._boundaries, self._guard = (cast, kept), guard
        self._log = log.info if is_logged else None

    def end(self) -> None:
        """Stop watching forwards."""
        self.written = None
        if self._guard is not None:
            self._guard.written = None

    def before_step(self, united: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Count a step, and keep modules in float32 to whose state the forwards before it wrote.

        Modules are kept at the first step, and at the last of several steps in a row whose forwards are watched.

        Args:
            united: a collective of the ranks that train the same model: returns the names that any of them passes.
        """
        written, guard = self.written, self._guard
        if written is None or guard is None:
            return
        self._step += 1
        is_next_watched, was_watched = is_watched(self._step + 1), is_watched(self._step)
        if is_next_watched or was_watched:
            written.end_of_iteration(guard.eager_forwards)
        if was_watched and (not is_next_watched or self._step == 1):
            names = set(united(sorted(written.written - self._warned)))
            self._keep([place for place in written.places if place.name in names], written)
        written.is_watching = is_next_watched
        if self._step > 1 << 13:
            self.end()

    @torch.no_grad()
    def keep_modules(self, tops: Sequence[nn.Module]) -> None:
        """Keep modules in float32 from now on, with all of their submodules."""
        if not tops or self._boundaries is None:
            return
        inside = {part for top in tops for part in modules_of(top)}
        for top in tops:
            self._keep_module(top, *self._boundaries)
            self.modules.add(top)
        for part in (each for model in self.models for each in modules_of(model)):
            for forward in filter(None, map(patched_forward, vars(part).values())):
                if forward.weights is not None and forward.weights.dtype is not torch.float32:
                    forward.weights.exclude(inside)

    def named_modules(self) -> list[str]:
        """Return the names of the modules that are kept, for a checkpoint; with the model's index if there are several.

        A run that is resumed has to keep them from its first forward on, as the saved run would have.
        """
        return [name for name, module in self._all_names() if module in self.modules] if self.names else []

    def keep_named(self, names: Collection[str]) -> None:
        """Keep the modules that :meth:`named_modules` has returned where a state was saved."""
        if names and self._boundaries is not None:
            self.keep_again([module for name, module in self._all_names() if name in names])

    def keep_again(self, modules: Iterable[nn.Module]) -> None:
        """Keep modules that were kept where a state was saved, unless they cannot be kept here."""
        modules = list(modules)
        if not modules or self._boundaries is None or self.values.masters.are_in_model:
            return
        tree = _Tree(self.models, self._boundaries[0])
        tops = [module for module in modules if module in tree.names and tree.can_be_kept(module)]
        self.keep_modules(tops)
        self.names += [tree.names[top] for top in tops]
        if self.written is not None:
            inside = {part for top in tops for part in modules_of(top)}
            self.written.places[:] = [place for place in self.written.places if place.module not in inside]

    def marked(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of a model, whose metadata marks the modules that are kept, as torch's has it.

        torch's functions for distributed checkpoints return state dicts without metadata.
        """
        marks = {
            name: {"version": module._version, KEPT: True}
            for name, module in (model.named_modules() if self.names else ())
            if module in self.modules
        }
        if not marks:
            return state
        found = OrderedDict(state)
        found._metadata = OrderedDict(marks)  # type: ignore[attr-defined]
        return found

    def _all_names(self) -> list[tuple[str, nn.Module]]:
        several = len(self.models) > 1
        return [
            (f"models[{index}].{name}" if several else name, module)
            for index, model in enumerate(self.models)
            for name, module in model.named_modules()
        ]

    @torch.no_grad()
    def _keep(self, places: Sequence[Place], written: WrittenState) -> None:
        if not places or self._boundaries is None:
            return
        tree = _Tree(self.models, self._boundaries[0])
        owners = dict.fromkeys(module for place in places if (module := place.module) is not None)
        tops = tree.topmost([module for module in owners if tree.can_be_kept(module)])
        inside = {part for top in tops for part in modules_of(top)}
        if tops:
            self.keep_modules(tops)
            names = [tree.names[top] for top in tops]
            self.names += names
            written.places[:] = [place for place in written.places if place.module not in inside]
            if self._log is not None:
                self._log(
                    f"{', '.join(names)}: in float32 from this step on, because forward writes to "
                    f"{', '.join(sorted(place.name for place in places if place.module in inside))}. Add "
                    f"keep_fp32={names} for float32 from the first step on"
                )
        unkept = [place.name for place in places if place.module not in inside and place.name in written.changed_little]
        warn_of_writes(unkept)
        self._warned.update(unkept)

    def _keep_module(self, top: nn.Module, cast: Boundary, kept: Boundary) -> None:
        parts = modules_of(top)
        wide: dict[torch.Tensor, torch.Tensor] = {}
        for part in parts:
            for _, tensor in own_tensors(part):
                if is_lower_precision(tensor.dtype) and not tensor.requires_grad and tensor not in wide:
                    wide[tensor] = self.values.keep(tensor)
        for tensor, values in wide.items():
            # The same tensors, because callbacks keep references to them, such as the biases of routers.
            tensor.grad = None
            set_data(tensor, values)
        for part in parts:
            for forward in filter(None, map(patched_forward, vars(part).values())):
                if forward.boundary is cast:
                    forward.boundary = kept
                    narrow = any(is_lower_precision(parameter.dtype) for parameter in part.parameters())
                    forward.weights = ForwardWeights(part, torch.float32, ()) if narrow else None
        for tensor in wide:
            kept.targets[id(tensor)] = torch.float32


def marked_names(state: Any) -> list[str]:
    """Return the names of the modules that a state dict marks as kept in float32."""
    return [name for name, each in getattr(state, "_metadata", {}).items() if each.get(KEPT)]


class _Tree:
    """The modules of models, their parents, and the modules that have each tensor."""

    def __init__(self, models: Sequence[nn.Module], cast: Boundary) -> None:
        self.names: dict[nn.Module, str] = {}
        self._parents: dict[nn.Module, list[nn.Module]] = {}
        self._own_names: dict[nn.Module, list[str]] = {}
        self._owners: dict[torch.Tensor, list[nn.Module]] = {}
        for model in models:
            for name, module in model.named_modules():
                self.names.setdefault(module, name)
        for module in self.names:
            for child_name, child in module.named_children():
                self._parents.setdefault(child, []).append(module)
                self._own_names.setdefault(child, []).append(child_name)
            for _, tensor in own_tensors(module):
                self._owners.setdefault(tensor, []).append(module)
        self._models = set(models)
        self._cast = cast
        self._trained = sum(tensor.numel() for tensor in self._owners if tensor.requires_grad)

    def can_be_kept(self, module: nn.Module) -> bool:
        """Return whether a module can compute in float32 by itself.

        Its forward has casts, it shares no tensor with modules outside of it, no module outside reads its tensors, no
        tensor of it is sharded, and few of the trained numbers are in it.
        """
        forward = patched_forward(vars(module).get("forward"))
        if module in self._models or forward is None or forward.boundary is not self._cast:
            return False
        parts = set(modules_of(module))
        tensors = {tensor for part in parts for _, tensor in own_tensors(part)}
        if any(owner not in parts for tensor in tensors for owner in self._owners[tensor]):
            return False
        trained = sum(tensor.numel() for tensor in tensors if tensor.requires_grad)
        if any(map(is_sharded, tensors)) or _SHARE * trained > self._trained:
            return False
        return not any(self._is_read_outside(part, parts) for part in parts)

    def _is_read_outside(self, part: nn.Module, parts: Container[nn.Module]) -> bool:
        """Return whether the forward of a module above a part, outside of ``parts``, reads the part's tensors."""
        above = self._above(part)
        while above:
            parent, name = above.pop()
            is_in_list = name.isdigit()
            if parent not in parts and not is_in_list and reads_part(parent, name, part):
                return True
            # A list has no forward. A module further above may read through it, or through its parent.
            above += [(each, own if is_in_list else name) for each, own in self._above(parent)]
        return False

    def _above(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        return list(zip(self._parents.get(module, ()), self._own_names.get(module, ()), strict=True))

    def topmost(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Replace modules by parents without other floating tensors, so that fewer calls between modules are cast."""
        found = dict.fromkeys(modules)
        for module in list(found):
            top, above = module, self._parents.get(module, [])
            while len(above) == 1 and self._has_nothing_beside(above[0], found) and self.can_be_kept(above[0]):
                top = above[0]
                above = self._parents.get(top, [])
            found[top] = None
        return [module for module in found if not any(module in modules_of(other)[1:] for other in found)]

    def _has_nothing_beside(self, module: nn.Module, kept: Iterable[nn.Module]) -> bool:
        known = {part for each in kept for part in modules_of(each)}
        parts = modules_of(module)
        return all(part in known or not any(t.is_floating_point() for _, t in own_tensors(part)) for part in parts)
