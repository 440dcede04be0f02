"""Steps of SGD, Adam and AdamW in one pass over memory, masters' rounding included, where that is faster than torch's.

Both give the same bits: native code steps nothing that it was not seen to step so on a sample, in this process. Which
is faster a clock says: the first steps of each kind and size take turns, on the numbers at hand, and the faster stays.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ..basics.logs import log
from ..masters.full import FullMasters
from ..masters.masters import MasterBatch
from ..masters.split import SplitMasters
from ..masters.states import SMALLEST, EncodedStates
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.one_pass import NATIVE
from ..torch_internals.running import computes_at_once, is_read_freely
from ..torch_internals.step_hooks import StepHooks
from .members import Members
from .per_parameter import stepped_as

_KINDS: Final = ("Adam", "AdamW", "SGD")
# Steps of each that are timed before the faster one stays.
_TURNS: Final = 2
_Options = tuple[tuple[bool, ...], tuple[float, ...]]


@dataclass
class Times:
    """Nanoseconds a number: what steps of one kind and size have taken, by torch's operations and by native code."""

    torch: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)

    def is_turn_of_native(self) -> bool:
        """Whether the next step is its; once both had their turns, whether it is the faster one."""
        if len(self.native) < _TURNS:
            return len(self.native) < len(self.torch)
        return len(self.torch) >= _TURNS and min(self.native) <= min(self.torch)


# By kind, form, store and size.
_times: Final[dict[Any, Times]] = {}
_proved: Final[dict[Any, bool]] = {}


class OnePass:
    """One optimizer's steps in one pass."""

    def __init__(self, members: Members, states: EncodedStates | None) -> None:
        self._members = members
        self._smallest = SMALLEST if states is not None else -1
        self._kind = kind_of(members.optimizer)
        self._last: Times | None = None
        # By the id of a list of weights: the times that their step by torch's operations is to be noted in.
        self._timed: dict[int, tuple[Times, int]] = {}
        self._generation = -1
        self._group_of: dict[int, int] = {}
        # By the id of a list of weights: it, and for each of the optimizer's groups those of its members, with masters.
        self._columns: dict[int, tuple[Any, dict[int, tuple[list[Any], list[Any]]]]] = {}

    def steps(self, weights: Sequence[nn.Parameter], masters: Sequence[MasterBatch]) -> bool:
        """Step those of some weights that have a gradient; False: nothing was done, and the optimizer has to."""
        state = self._members.optimizer.state
        if not is_read_freely(weights[0].device) or not isinstance(state, dict):
            return False
        if (native := NATIVE.get()) is None or not computes_at_once():
            return False
        groups = self._groups_of(native, weights)
        if groups is None:
            return False
        size = sum(map(nn.Parameter.numel, weights)).bit_length()
        times = _times.setdefault((self._form(), *(flags for *_, flags, _ in groups), self._smallest, size), Times())
        is_trial = not times.is_turn_of_native()
        if is_trial and len(times.torch) == _TURNS:
            return False
        begin = time.perf_counter()
        is_split = isinstance(self._members.table, SplitMasters)
        numbers = native.step(groups, state, is_split, self._smallest, is_trial)
        if numbers <= 0:
            return bool(numbers == 0)
        if not is_trial:
            for each in masters:
                each.stepped()
        spent = time.perf_counter() - begin
        self._last = times
        if is_trial:
            self._timed[id(weights)] = times, numbers
        elif len(times.native) < _TURNS:
            times.native.append(spent / numbers * 1e9)
        return not is_trial

    def note(self, weights: Sequence[nn.Parameter], seconds: float) -> None:
        """The optimizer has stepped some weights by itself, in this time."""
        NATIVE.miss(seconds)
        timed = self._timed.pop(id(weights), None)
        if timed is not None:
            timed[0].torch.append(seconds / timed[1] * 1e9)

    def told(self) -> str | None:
        """What has stepped it, and why; None where that was not asked."""
        if (times := self._last) is None or not (times.torch and times.native):
            return None
        native, by_torch = min(times.native), min(times.torch)
        what = "native code in one pass" if times.is_turn_of_native() else "torch's operations"
        return f"stepped by {what} ({native:.2f} ns a number natively, {by_torch:.2f} by torch's operations)"

    def _form(self) -> tuple[Any, ...]:
        return self._kind, type(self._members.table), bool(self._members.masters)

    def _groups_of(self, native: Any, weights: Sequence[nn.Parameter]) -> list[Any] | None:
        """For each of the optimizer's groups those of its members, their masters, and its options.

        None where an option is not among those that native code knows.
        """
        members, optimizer = self._members, self._members.optimizer
        is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        columns = self._columns_of(weights)
        if not columns or members.unsound or is_scaled:
            return None
        found: list[Any] = []
        for place, own in columns.items():
            group = optimizer.param_groups[place]
            options = _options(self._kind, group)
            if options is None or not _gives_same_bits(native, self._form(), group, options):
                return None
            found.append((*own, *options))
        return found

    def _columns_of(self, weights: Sequence[nn.Parameter]) -> dict[int, tuple[list[Any], list[Any]]]:
        members = self._members
        if self._generation != members.generation:
            groups = members.optimizer.param_groups
            ids = [(id(p), place) for place, group in enumerate(groups) for p in group["params"]]
            self._group_of, self._columns, self._generation = dict(ids), {}, members.generation
            if len(self._group_of) < len(ids):
                self._group_of = {}  # one that is there twice is stepped twice
        if self._group_of and id(weights) not in self._columns:
            found: dict[int, tuple[list[Any], list[Any]]] = {}
            self._columns[id(weights)] = weights, found
            for weight in weights:
                own, masters = found.setdefault(self._group_of[id(weight)], ([], []))
                own.append(weight)
                masters.append(members.table.of(weight))
        return self._columns[id(weights)][1] if self._group_of else {}


def kind_of(optimizer: Any) -> str:
    """Which of torch's optimizers native code would step it as; empty: none, or there is no such code."""
    kind = stepped_as(optimizer) if NATIVE.may_come else None
    return kind if kind in _KINDS else ""


def _options(kind: str, group: dict[str, Any]) -> _Options | None:
    """A group's options as flags and numbers, in the order in which native code takes them."""
    is_adam = kind != "SGD"
    betas = group["betas"] if is_adam else (0.0, 0.0)
    numbers = (
        *(group["lr"], group["weight_decay"], group.get("momentum", 0.0), group.get("dampening", 0.0)),
        *(*betas, group.get("eps", 0.0)),
    )
    nesterov, foreach = bool(group.get("nesterov")), bool(group["foreach"])
    # With foreach, the momentum is added to the gradients themselves.
    if any(map(group.get, ("amsgrad", "capturable", "differentiable"))) or (nesterov and foreach):
        return None
    if not all(type(number) in (int, float) for number in numbers):
        return None
    is_decoupled = bool(group.get("decoupled_weight_decay", kind == "AdamW"))
    return (is_adam, bool(group["fused"]), group["maximize"], is_decoupled, nesterov), numbers


def _gives_same_bits(native: Any, form: Sequence[Any], group: dict[str, Any], options: _Options) -> bool:
    """Whether native code steps a sample to the same bits as torch's optimizer, with options like these."""
    flags, (_, decay, momentum, dampening, beta1, *_) = options
    key = (form, flags, bool(group["foreach"]), decay != 0, momentum != 0, dampening != 0, abs(1 - beta1) < 0.5)
    if key not in _proved:
        kind, table, _ = form
        dtypes = (torch.bfloat16,) if table is SplitMasters else (torch.bfloat16, torch.float16, torch.float32)
        with CastsOff(), torch.no_grad():
            _proved[key] = all(_steps_alike(native, kind, table(), dtype, group, options) for dtype in dtypes)
        if not _proved[key]:
            log.info("%s is stepped by torch's operations: native code gives other bits", kind)
    return _proved[key]


def _steps_alike(
    native: Any,
    kind: str,
    table: FullMasters | SplitMasters,
    dtype: torch.dtype,
    group: dict[str, Any],
    options: _Options,
) -> bool:
    weights, masters = [], []
    for size in (*range(1, 18), 300):  # any number that does not fill a vector
        weight = nn.Parameter(torch.linspace(-2, 3, size, dtype=torch.float32, device="cpu").pow(3))
        weight.grad = weight.detach().flip(0).sin().mul(0.1)
        master = table.add(weight, dtype)
        if master is not None:
            table.cast(master, dtype, clamps=False)
        if isinstance(table, SplitMasters):
            weight.grad = weight.grad.to(dtype)
        weights.append(weight)
        masters.append(master)
    pairs = list(zip(weights, masters, strict=True))
    values = [weight.detach().clone() if master is None else table.values(master).clone() for weight, master in pairs]
    params = list(map(nn.Parameter, values))
    optimizer: Any = getattr(torch.optim, kind)(params, lr=0.1)
    optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
    states: list[dict[str, Any]] = []
    for _ in range(2):
        for p, (weight, master) in zip(params, pairs, strict=True):
            assert weight.grad is not None
            p.grad = weight.grad.to(torch.float32, copy=True)
            if master is None:
                weight.copy_(p)
            else:
                table.load(master, p.detach())
        states = [{k: v.clone() for k, v in optimizer.state[p].items() if v is not None} for p in params]
        with StepHooks(optimizer):
            optimizer.step()
    by_weight = dict(zip(weights, states, strict=True))
    if native.step([(weights, masters, *options)], by_weight, isinstance(table, SplitMasters), -1, False) <= 0:
        return False
    made: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for p, (weight, master), state in zip(params, pairs, states, strict=True):
        made += [weight.clone(), weight if master is None else table.values(master).clone(), *state.values()]
        if master is None:
            weight = p
        else:
            table.load(master, p.detach())
        expected += [weight, p, *(each for each in optimizer.state[p].values() if each is not None)]
    return all(map(torch.equal, made, expected))
