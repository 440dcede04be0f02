"""``mpinit.audit``: dtypes and bytes of a training run, and the weights that its updates are too small to change."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.modules import ModelIndex
from ..basics.tables import counted, plain_table
from ..basics.wrappers import iter_unwrapped
from ..distributed.sharding import local
from ..masters.codecs.encoded import encoded_part
from ..masters.states import EncodedStates
from ..model.selection import select
from ..optimizer.per_parameter import kept_states
from ..plan import MasterWeightsMode, make_plan
from ..session import Session
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.step_hooks import StepHooks
from .copies import copy_of_optimizer, refuse_lazy, same_random_numbers
from .numbers import stepped_values

KINDS: Final = ("weights", "masters", "gradients", "optimizer state")
# The configurations that the report compares with the present one.
_LEVELS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    **{level: (level, {}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "O5 split": ("O5", {"master_weights": "split"}),
}
_FUNCTIONS_ONLY: Final = ("O1", "O4")
# For a trained 16-bit weight: the kind of its master, and its gradient's dtype, None for the weight's.
_MASTERS: Final[Mapping[MasterWeightsMode, tuple[str, torch.dtype | None]]] = {
    MasterWeightsMode.FULL: ("float32", torch.float32),
    MasterWeightsMode.SPLIT: ("split", None),
}
_MASTER_BYTES: Final = {"": 0, "float32": 4, "split": 2}
# A part of each weight is stepped on random gradients with these root mean squares; the last _COUNTED of _STEPS steps
# are measured.
_LARGEST_SIDE: Final = 256
_STEPS, _COUNTED = 16, 8
_SIZES: Final = (1e-3, 1e-4)
# Keys of a group's learning rates: torch's schedulers store the rate at their beginning, and the largest of a cycle.
_RATES: Final = ("lr", "initial_lr", "max_lr")
# The share of stuck weights from which on the report has advice.
_MUCH: Final = 0.1
# The columns of numbers in the table of parameters.
PARAMETER_NUMBERS: Final = (1, 5, 6)
# Rows that are printed.
_SHOWN: Final = 20
_Table = tuple[list[str], list[list[str]]]


@final
@dataclass(frozen=True)
class AuditRow:
    """The row of one parameter in an audit.

    Attributes:
        name: its dotted name.
        elements: its number of elements; of a sharded parameter, those of this process.
        weight: the name of its dtype.
        master: "float32", "split" (a 16-bit remainder), or "" without a master.
        gradient: the name of its gradient's dtype in training; "" if it is frozen.
        rate: the largest learning rate that its group has, now or by its scheduler; None if no optimizer has it.
        state: bytes of optimizer state per element.
        stuck: share of its elements that a step does not change, 0 to 1; None if it is frozen, or that is not known.
    """

    name: str
    elements: int
    weight: str
    master: str
    gradient: str
    rate: float | None
    state: float
    stuck: float | None


@final
@dataclass(frozen=True)
class Audit:
    """The report of :func:`audit`; printed, it is two tables and the advice.

    Attributes:
        rows: every parameter, in the model's order.
        bytes_per_parameter: "now" and each level -> "weights", "masters", "gradients", "optimizer state" -> mean bytes
            per parameter in training. A level that refuses this model is missing. Weights at O1 and O4 have the dtype
            that they had before ``initialize``.
        advice: the configuration to use, as text; "" if every weight can change.
    """

    rows: tuple[AuditRow, ...]
    bytes_per_parameter: Mapping[str, Mapping[str, float]]
    advice: str

    @property
    def stuck(self) -> dict[str, float]:
        """Dotted name -> share of the parameter's elements that a step does not change, the largest first."""
        known = {row.name: row.stuck for row in self.rows if row.stuck is not None}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps(dataclasses.asdict(self) | {"stuck": self.stuck}, indent=1)

    def tables(self) -> tuple[_Table, _Table]:
        """Return head and rows of two tables: the parameters that change least, and the bytes per parameter."""
        head = ["parameter", "numbers", "weight", "master", "gradient", "rate", "stuck"]
        rows = sorted(self.rows, key=lambda row: -(row.stuck or 0.0))[:_SHOWN]
        shares = ["-" if row.stuck is None else f"{row.stuck:.1%}" for row in rows]
        rates = ["-" if row.rate is None else f"{row.rate:.3g}" for row in rows]
        cells = [
            [row.name, f"{row.elements:,}", row.weight, row.master or "-", row.gradient or "-", rate, share]
            for row, rate, share in zip(rows, rates, shares, strict=True)
        ]
        sizes = [
            [_label(level, kinds), *(f"{kinds[kind]:.2f}" for kind in KINDS), f"{sum(kinds.values()):.2f}"]
            for level, kinds in self.bytes_per_parameter.items()
        ]
        return (head, cells), (["bytes per parameter", *KINDS, "together"], sizes)

    def __str__(self) -> str:
        parameters, sizes = self.tables()
        more = [f"and {len(self.rows) - _SHOWN} more: see .rows"] if len(self.rows) > _SHOWN else []
        shown = [
            plain_table(*parameters, numbers=PARAMETER_NUMBERS),
            *more,
            "",
            plain_table(*sizes, numbers=range(1, 6)),
        ]
        return "\n".join([*shown, *(["", self.advice] if self.advice else [])])


def _label(level: str, kinds: Mapping[str, float]) -> str:
    """Mark the levels that cast functions only: 16-bit weights stay as they were loaded, without masters."""
    is_as_loaded = level in _FUNCTIONS_ONLY and kinds["weights"] < torch.float32.itemsize
    return f"{level} (weights as loaded)" if is_as_loaded else level


def audit(model: nn.Module, optimizer: Any = None) -> Audit:
    """Report dtypes and bytes of a training run, and the share of weights that its updates cannot change.

    It needs no step, and does not change the model, the optimizer or random numbers. A weight does not change if the
    update is smaller than half a unit in its last place. To measure updates, the optimizer's own code steps float32
    copies of parts of the weights (at most 256 x 256 elements each), on random gradients of two sizes. With Adam, both
    sizes lead to the same updates, so these are typical. With SGD they differ: the report then uses the size of the
    present gradients, and reports no share without gradients. The steps use the largest learning rate in a group: that
    of now (``lr``), or the one that a scheduler has stored (``initial_lr``, ``max_lr``) and warms up to.

    Args:
        model: a module, initialised or not, also in a wrapper such as DistributedDataParallel or a compiled module.
        optimizer: an optimizer, initialised or not, also in a framework's wrapper, or a list of all that train the
            model. Default None: the optimizers that the model was initialised with. Without any, only dtypes and bytes
            are reported, and no optimizer state.

    Returns:
        The report, with ``.rows``, ``.stuck``, ``.bytes_per_parameter``, ``.advice``, ``.to_json()``.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: the model has a lazy module that has not run.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
        >>> found = mpinit.audit(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        >>> found.stuck["weight"], sum(found.bytes_per_parameter["now"].values())
        (1.0, 8.0)
        >>> "opt_level='O5'" in found.advice
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit needs a module and an optimizer, not {type(model).__name__}")
    *_, model = iter_unwrapped(model)
    refuse_lazy(model)
    sessions = registry.all_sharing(model)
    owners = _owners(sessions)
    passed = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    inner = [registry.unwrapped(each) for each in passed]
    for each, found in zip(passed, inner, strict=True):
        if not isinstance(found, Optimizer):
            raise TypeError(f"audit needs a torch.optim.Optimizer, or a list of them, not {type(each).__name__}")
    optimizers = inner or [each for session in sessions for each in session.optimizers]
    updates: dict[Any, _Updates] = {}
    for each in optimizers:
        updates |= _measure(each, owners)
    rows = tuple(
        _row(
            name,
            p,
            p.dtype,
            _kind_of_master(p, owners.get(p)),
            updates.get(p, _UNKNOWN),
        )
        for name, p in model.named_parameters()
    )
    sizes, index = {"now": _bytes(rows)}, ModelIndex([model])
    for level, (name, words) in _LEVELS.items():
        plan = make_plan(resolve(name, words)[1])
        try:
            targets = select(index, plan).targets
        except ValueError:
            continue  # initialize would refuse it, too
        to = {p: targets.get(p, _loaded_dtype(p, owners.get(p))) for p in model.parameters()}
        # The present state's bytes do not apply to another level.
        after = {p: updates.get(p, _UNKNOWN)._replace(state=None) for p in to}
        sizes[level] = _bytes([_row("", p, to[p], plan.masters, after[p]) for p in to])
    advice = _advice(rows, updates, bool(sessions))
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in updates]
    if updates and missing:
        advice.append(
            f"{counted(len(missing), 'trainable parameter')} in no audited optimizer, such as {missing[0]!r}: pass a "
            "list of all optimizers, whose states count, too"
        )
    return Audit(rows, sizes, ". ".join(advice))


def _owners(sessions: Sequence[Session]) -> dict[Any, Session]:
    """Return the session of each parameter."""
    found: dict[Any, Session] = {}
    for session in sessions:
        found |= dict.fromkeys(session.managed.initialized.parameters(), session)
        found |= {master.weight: session for master in session.masters}
    return found


def _kind_of_master(parameter: Any, session: Session | None) -> MasterWeightsMode:
    has_master = session is not None and session.masters.of(parameter) is not None
    return session.plan.masters if session is not None and has_master else MasterWeightsMode.NONE


def _loaded_dtype(parameter: Any, session: Session | None) -> torch.dtype:
    """Return the dtype that a parameter had before ``initialize``, which O1 and O4 do not change."""
    if session is None:
        return parameter.dtype  # type: ignore[no-any-return]
    master = session.masters.of(parameter)
    return session.values.casts.original_dtype(parameter) if master is None else master.original_dtype


def _row(name: str, parameter: Any, weight: torch.dtype, kind: MasterWeightsMode, known: "_Updates") -> AuditRow:
    """Make the row of a parameter whose weight has a dtype, and a kind of master if that is a 16-bit dtype."""
    master, gradient = (_MASTERS.get(kind) if is_lower_precision(weight) else None) or ("", weight)
    state = (
        known.state_elements_per_element * (torch.float32 if master else weight).itemsize
        if known.state is None
        else known.state
    )
    trained = dtype_name(gradient or weight) if parameter.requires_grad else ""
    elements = local(parameter).numel()
    return AuditRow(name, elements, dtype_name(weight), master, trained, known.rate, state, known.stuck)


def _bytes(rows: Sequence[AuditRow]) -> dict[str, float]:
    total = dict.fromkeys(KINDS, 0.0)
    for row in rows:
        sizes = (_size(row.weight), _MASTER_BYTES[row.master] * bool(row.gradient), _size(row.gradient), row.state)
        for kind, size in zip(KINDS, sizes, strict=True):
            total[kind] += row.elements * size
    return {kind: value / max(1, sum(row.elements for row in rows)) for kind, value in total.items()}


def _size(dtype: str) -> int:
    """Return the bytes of a number of any dtype of torch: a quantized model has frozen integers."""
    itemsize: int = getattr(torch, dtype).itemsize if dtype else 0
    return itemsize


class _Updates(NamedTuple):
    """The values of a parameter's :class:`AuditRow` that depend on its optimizer.

    Attributes:
        kind: the optimizer's class.
        state_elements_per_element: the number of state elements per element.
        failure: the error with which a trial of the updates failed; "" if none did.
    """

    kind: str = ""
    rate: float | None = None
    state: float | None = None  # None before the first step
    state_elements_per_element: float = 0.0
    stuck: float | None = None
    failure: str = ""


_UNKNOWN: Final = _Updates()


class _Steps(NamedTuple):
    """Measured steps: their mean size, the share of elements they did not change, and state elements per element."""

    size: float
    stuck: float
    state_elements: Mapping[Any, float]


@torch.no_grad()
def _measure(optimizer: Optimizer, owners: Mapping[Any, Session]) -> dict[Any, _Updates]:
    """Measure an optimizer's updates on copies of parts of its parameters; frozen ones have none."""
    found = {
        p: _Updates(type(optimizer).__name__, _rate(group), _bytes_kept(optimizer.state.get(p), p))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    parts = {p: _part(p, owners.get(p)) for p in found}
    trained = [p for p in parts if p.requires_grad]
    measured: dict[Any, _Steps] = {}
    session = registry.of(optimizer)
    encoded = None if session is None else session.managed.shared.states
    with same_random_numbers():
        try:
            small, large = (_run(optimizer, parts, dict.fromkeys(trained, size)) for size in _SIZES)
            depends_on_gradient_size = {
                p for p in trained if not 0 < 0.5 * small[p].size <= large[p].size <= 2 * small[p].size
            }
            if depends_on_gradient_size and all(p.grad is not None for p in trained):
                measured = _run(optimizer, parts, {p: _size_of(p.grad) for p in trained})
        except Exception as error:  # an optimizer may refuse to be copied, or to step without a closure, with any error
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
            return found | {p: found[p]._replace(failure=failure) for p in trained}
    for p in trained:
        stuck: float | None = (small[p].stuck + large[p].stuck) / 2
        if p in depends_on_gradient_size:
            stuck = measured[p].stuck if measured else None
        states = small[p].state_elements
        found[p] = found[p]._replace(state_elements_per_element=sum(states.values()), stuck=stuck)
        if found[p].state is None and encoded is not None:
            found[p] = found[p]._replace(state=_bytes_encoded(states, p, encoded, kept_states(optimizer)))
    return found


def _rate(group: Mapping[str, Any]) -> float:
    """Return the largest learning rate of a group; a warm-up begins with a rate of 0, or nearly 0."""
    return max(float(group.get(name, 0.0)) for name in _RATES)


def _bytes_encoded(
    states: Mapping[Any, float], parameter: torch.Tensor, encoded: EncodedStates, kept: frozenset[str]
) -> float:
    """Return the bytes of optimizer state per element that the first step is going to encode."""
    numel = max(1, local(parameter).numel())
    size = encoded.size_of(numel) / numel
    # Only states of the parameter's shape are encoded.
    return sum(
        size if elements == 1.0 and key not in kept else elements * torch.float32.itemsize
        for key, elements in states.items()
    )


def _part(parameter: Any, session: Session | None) -> torch.Tensor:
    """Copy a part of the values that the optimizer steps, in their dtype."""
    values = local(stepped_values(parameter, session).detach())
    return values[tuple(slice(0, _LARGEST_SIDE) for _ in values.shape)].clone()


def _size_of(gradient: torch.Tensor) -> float:
    values = local(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return float(_wide(values).abs().square().mean().sqrt()) if values.numel() else 0.0


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return values in float32, or as they are if they are complex."""
    return values if values.is_complex() else values.float()


def _run(optimizer: Optimizer, parts: Mapping[Any, torch.Tensor], sizes: Mapping[Any, float]) -> dict[Any, _Steps]:
    """Step copies of the parts on random gradients with these root mean squares; parts without one are frozen."""
    copies = {p: nn.Parameter(_wide(part), requires_grad=p in sizes) for p, part in parts.items()}
    copied_optimizer = copy_of_optimizer(optimizer, copies)
    for group in copied_optimizer.param_groups:
        if "lr" in group:
            lr, rate = group["lr"], _rate(group)
            group["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
    generator = torch.Generator().manual_seed(0)
    totals = {p: [0.0, 0.0] for p in sizes}
    for number in range(_STEPS):
        for p, size in sizes.items():
            dtype, device = copies[p].dtype, copies[p].device
            random = torch.randn(copies[p].shape, generator=generator, dtype=dtype, device="cpu")
            copies[p].grad = size * random.to(device)
        before = {p: copies[p].clone() for p in sizes}
        # Neither a default device nor hooks of all optimizers, which the user has set for the originals, apply.
        with CastsOff(), torch.device("cpu"), StepHooks(copied_optimizer):
            copied_optimizer.step()
        for p in sizes if number >= _STEPS - _COUNTED else ():
            part = parts[p]
            if part.numel():
                step = copies[p] - before[p]
                totals[p][0] += float(step.abs().mean()) / _COUNTED
                totals[p][1] += float(((_wide(part) + step).to(part.dtype) == part).double().mean()) / _COUNTED
    elements = {
        p: {
            key: value.numel() / max(1, copies[p].numel())
            for key, value in _kept(copied_optimizer.state.get(copies[p]))
        }
        for p in sizes
    }
    return {p: _Steps(size, stuck, elements[p]) for p, (size, stuck) in totals.items()}


def _kept(state: Any) -> list[tuple[Any, torch.Tensor]]:
    """List the tensors of a parameter's state that have an entry per element, with their names."""
    entries = state.items() if isinstance(state, dict) else ()
    tensors = [(key, value) for key, value in entries if isinstance(value, torch.Tensor) and value.numel() > 1]
    return [(key, value) for key, value in tensors if value.is_floating_point() or value.is_complex()]


def _bytes_kept(state: Any, parameter: torch.Tensor) -> float | None:
    if not state:
        return None
    encoded = ((encoded_part(value), local(value)) for _, value in _kept(state))
    total = sum(value.nbytes if codes is None else codes.code_bytes for codes, value in encoded)
    return total / max(1, local(parameter).numel())


def _advice(rows: tuple[AuditRow, ...], updates: Mapping[Any, _Updates], is_initialised: bool) -> list[str]:
    known = [row for row in rows if row.stuck is not None]
    narrow = [row for row in known if _size(row.weight) < torch.float32.itemsize and not row.master]
    wide = [row for row in known if row not in narrow]
    lines = []
    share = _mean(narrow)
    if share >= _MUCH:
        way = "mpinit.initialize(model, optimizer, opt_level='O5')" if not is_initialised else "master_weights=True"
        worst = max(narrow, key=lambda row: row.stuck or 0.0)
        lines.append(
            f"{share:.0%} of the {worst.weight} weights do not change in a step, and {worst.stuck or 0.0:.0%} of "
            f"{worst.name!r}: "
            f"{way} adds float32 masters, in which small updates add up. No update is then lost to rounding: a "
            "learning rate that was tuned without masters may be too high with them"
        )
    if _mean(wide) >= _MUCH:
        lines.append(
            f"{_mean(wide):.0%} of the weights kept in float32 do not change in a step: raise the learning rate"
        )
    trained = [each for p, each in updates.items() if p.requires_grad and each.stuck is None]
    for kind, failure in sorted({(each.kind, each.failure) for each in trained if each.failure}):
        lines.append(
            f"Neither updates nor states of {kind} could be measured, and its states count as 0 bytes before the first "
            f"step ({failure})"
        )
    unknown = sorted({each.kind for each in trained if not each.failure})
    if unknown:
        lines.append(
            f"The size of updates by {', '.join(unknown)} depends on the gradients: audit again after a backward pass"
        )
    return lines


def _mean(rows: list[AuditRow]) -> float:
    return sum(row.elements * (row.stuck or 0.0) for row in rows) / max(1, sum(row.elements for row in rows))
