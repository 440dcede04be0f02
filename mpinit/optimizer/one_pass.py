"""Steps of SGD, Adam and AdamW in native code: one pass over memory, which also rounds the masters.

The results have the bits of torch's operations. Native code is used for a combination of options only after it has
stepped a sample to the same bits in this process.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.logs import log
from ..masters.full import FullMasters
from ..masters.masters import MasterBatch
from ..masters.split import SplitMasters
from ..masters.states import SMALLEST, EncodedStates
from ..torch_internals.bulk import have_grads
from ..torch_internals.native import describe_native, native
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.running import is_eager, reads_without_sync
from ..torch_internals.step_hooks import StepHooks
from .members import Members
from .per_parameter import stepped_as

KINDS: Final = ("Adam", "AdamW", "SGD")
_Options = tuple[tuple[bool, ...], tuple[float, ...]]
# (kind, store, options) -> whether a sample had torch's bits.
_has_same_bits: Final[dict[Any, bool]] = {}


class NativeSteps:
    """The steps of one optimizer in native code."""

    def __init__(self, members: Members, states: EncodedStates | None) -> None:
        self._members = members
        self._smallest = SMALLEST if states is not None else -1
        self._kind = native_kind(members.optimizer)
        # True if native code did the last step; None before the first step.
        self._did_last: bool | None = None
        self._generation = -1
        self._group_of: dict[int, int] = {}
        # The id of a list of weights -> the list, and for each of the optimizer's groups the weights and masters in it.
        self._columns: dict[int, tuple[Any, dict[int, tuple[list[Any], list[Any]]]]] = {}

    def step(self, weights: Sequence[nn.Parameter], masters: Sequence[MasterBatch]) -> bool:
        """Step the weights that have a gradient; return False if native code cannot, and nothing was changed."""
        self._did_last = self._step(weights, masters)
        return self._did_last

    def _step(self, weights: Sequence[nn.Parameter], masters: Sequence[MasterBatch]) -> bool:
        state = self._members.optimizer.state
        if not reads_without_sync(weights[0].device) or not isinstance(state, dict):
            return False
        if (code := native()) is None or not is_eager():
            return False
        groups = self._groups_of(code, weights)
        if groups is None:
            return False
        if isinstance(self._members.table, SplitMasters) and have_grads(weights):
            for each in masters:
                each.follow_writes()
        numbers = code.step(groups, state, isinstance(self._members.table, SplitMasters), self._smallest)
        if numbers > 0:
            for each in masters:
                each.stepped()
        return bool(numbers >= 0)

    def describe(self) -> str:
        """Return in one line whether native code is built, and whether the last step was done by it."""
        was = {None: "", True: ", used", False: ", not used: the last step was one that torch's operations do"}
        return describe_native() + (was[self._did_last] if native() is not None else "")

    def _groups_of(self, code: Any, weights: Sequence[nn.Parameter]) -> list[Any] | None:
        """Return the weights, masters and options of each of the optimizer's groups.

        None if native code does not support an option.
        """
        members, optimizer = self._members, self._members.optimizer
        is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        columns = self._columns_of(weights)
        if not columns or members.groups_without_fused or is_scaled:
            return None
        is_split = isinstance(members.table, SplitMasters)
        found: list[Any] = []
        for place, own in columns.items():
            group = optimizer.param_groups[place]
            options = _options(self._kind, group)
            if options is None or not _steps_to_same_bits(code, self._kind, is_split, group, options):
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
                self._group_of = {}  # a parameter is in the groups twice, and torch steps it twice: native code cannot
        if self._group_of and id(weights) not in self._columns:
            found: dict[int, tuple[list[Any], list[Any]]] = {}
            self._columns[id(weights)] = weights, found
            for weight in weights:
                own, masters = found.setdefault(self._group_of[id(weight)], ([], []))
                own.append(weight)
                masters.append(members.table.of(weight))
        return self._columns[id(weights)][1] if self._group_of else {}


def native_kind(optimizer: Any) -> str:
    """Return the name of the torch optimizer whose step native code can do for this optimizer; "" if there is none."""
    kind = stepped_as(optimizer)
    return kind if kind in KINDS else ""


def steps_with_other_bits(code: Any) -> list[str]:
    """List the kinds, forms and masters for which native code steps a sample to other bits than torch."""
    found = []
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    for kind in KINDS:
        for form in ("for-loop", "foreach", "fused"):
            settings: dict[str, Any] = {"foreach": form == "foreach", "fused": form == "fused"}
            if kind == "SGD":
                settings["momentum"] = 0.9
            optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **settings)
            (group,) = optimizer.param_groups
            options = _options(kind, group)
            assert options is not None
            for is_split in (False, True):
                if not _steps_to_same_bits(code, kind, is_split, group, options):
                    found.append(f"{kind} ({form}, {'split' if is_split else 'full'} masters)")
    return found


def _options(kind: str, group: dict[str, Any]) -> _Options | None:
    """Return a group's options as flags and numbers, in native code's order; None if it does not support one."""
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


def _steps_to_same_bits(code: Any, kind: str, is_split: bool, group: dict[str, Any], options: _Options) -> bool:
    """Return whether native code steps a sample to the same bits as torch's optimizer, with options like these."""
    flags, (_, decay, momentum, dampening, beta1, *_) = options
    key = (
        kind,
        is_split,
        flags,
        bool(group["foreach"]),
        decay != 0,
        momentum != 0,
        dampening != 0,
        abs(1 - beta1) < 0.5,
    )
    if key not in _has_same_bits:
        dtypes = (torch.bfloat16,) if is_split else (torch.bfloat16, torch.float16, torch.float32)
        with CastsOff(), torch.no_grad():
            _has_same_bits[key] = all(_steps_alike(code, kind, is_split, dtype, group, options) for dtype in dtypes)
        if not _has_same_bits[key]:
            log.info("%s is stepped by torch's operations: native code has other bits", kind)
    return _has_same_bits[key]


def _steps_alike(
    code: Any,
    kind: str,
    is_split: bool,
    dtype: torch.dtype,
    group: dict[str, Any],
    options: _Options,
) -> bool:
    table: FullMasters | SplitMasters = SplitMasters() if is_split else FullMasters()
    weights, masters = [], []
    for size in (*range(1, 18), 300):  # any number that does not fill a vector
        weight = nn.Parameter(torch.linspace(-2, 3, size, dtype=torch.float32, device="cpu").pow(3))
        weight.grad = weight.detach().flip(0).sin().mul(0.1)
        master = table.add(weight, dtype)
        if master is not None:
            table.cast(master, dtype, clamps=False)
        if is_split and size % 2:  # gradients of one backward pass; those of several are float32
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
    if code.step([(weights, masters, *options)], by_weight, is_split, -1) <= 0:
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
