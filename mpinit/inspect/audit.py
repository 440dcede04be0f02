"""``mpinit.audit``: dtypes and bytes of a training run, and the weights that its updates are too small to change."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..autocast.thread_flags import CastsAs
from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.modules import ModelIndex
from ..basics.tables import counted, plain_table
from ..basics.wrappers import iter_unwrapped
from ..config.plan import make_plan
from ..config.reading import resolve
from ..distributed.sharding import local
from ..masters.codecs.encoded import encoded_part
from ..model.selection import select
from ..optimizer.hooks import inside_hooks
from ..session import Session
from .copies import copy_of_optimizer, same_random_numbers

KINDS: Final = ("weights", "masters", "gradients", "optimizer state")
# The configurations that the report compares with the present one.
_LEVELS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    **{level: (level, {}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "O5 split": ("O5", {"master_weights": "split"}),
}
# ``master_weights`` -> of a trained 16-bit weight: its master's name and bytes, its gradient's dtype (None: its own).
_MASTERS: Final[Mapping[Any, tuple[str, int, torch.dtype | None]]] = {
    True: ("float32", 4, torch.float32),
    "split": ("split", 2, None),
}
# Bytes of an encoded number of optimizer state; int8 has a float32 scale for each 128.
_ENCODED: Final = {"bfloat16": 2.0, "int8": 1 + 4 / 128}
# At most so many numbers of each side of a weight are stepped, on random gradients of these root mean squares; the last
# _COUNTED of _STEPS steps are measured.
_LARGEST_SIDE: Final = 256
_STEPS, _COUNTED = 16, 8
_SIZES: Final = (1e-3, 1e-4)
# The share of stuck weights from which on the report has advice.
_WORTH_ADVICE: Final = 0.1
_ROWS_SHOWN: Final = 20


@final
@dataclass(frozen=True)
class AuditRow:
    """The row of one parameter in an audit.

    Attributes:
        name: its dotted name.
        elements: its number of elements; of a sharded parameter, those of this process.
        weight: the name of its dtype.
        master: "float32", "split" (a 16-bit remainder), or "" without a master.
        gradient: the name of its gradient's dtype at a step; "" if it is frozen.
        rate: the largest learning rate that its group has, now or by its scheduler; None if no optimizer has it.
        state: bytes of optimizer state per element.
        stuck: share of its elements that a step does not change, 0 to 1; None if it is frozen, or not measured.
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
    """The report of :func:`audit`; printed, it is the advice and two tables.

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

    def __str__(self) -> str:
        cells, sizes = [], []
        for row in sorted(self.rows, key=lambda row: -(row.stuck or 0.0))[:_ROWS_SHOWN]:
            rate = "-" if row.rate is None else f"{row.rate:.3g}"
            share = "-" if row.stuck is None else f"{row.stuck:.1%}"
            kinds = (row.weight, row.master or "-", row.gradient or "-")
            cells.append([row.name, f"{row.elements:,}", *kinds, rate, share])
        for level, means in self.bytes_per_parameter.items():
            # O1 and O4 cast functions only: 16-bit weights stay as they were loaded, without masters.
            is_as_loaded = level in ("O1", "O4") and means["weights"] < torch.float32.itemsize
            label = f"{level} (weights as loaded)" if is_as_loaded else level
            sizes.append([label, *(f"{means[kind]:.2f}" for kind in KINDS), f"{sum(means.values()):.2f}"])
        head = ["parameter", "numbers", "weight", "master", "gradient", "rate", "stuck"]
        more = [f"and {len(self.rows) - _ROWS_SHOWN} more: see .rows"] if len(self.rows) > _ROWS_SHOWN else []
        return "\n".join(
            [
                *([self.advice, ""] if self.advice else []),
                plain_table(head, cells, numbers=(1, 5, 6)),
                *(*more, ""),
                plain_table(["bytes per parameter", *KINDS, "together"], sizes, numbers=range(1, 6)),
            ]
        )


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
        The report, with ``.rows``, ``.stuck``, ``.bytes_per_parameter``, ``.advice``.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: the model has a lazy module that has not run: torch's error.

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
    sessions = registry.all_sharing(model)
    passed = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    optimizers = [registry.unwrapped(each) for each in passed]
    for each, found in zip(passed, optimizers, strict=True):
        if not isinstance(found, Optimizer):
            raise TypeError(f"audit needs a torch.optim.Optimizer, or a list of them, not {type(each).__name__}")
    optimizers = optimizers or [each for session in sessions for each in session.optimizers]
    owners = {p: session for session in sessions for own in session.models for p in own.parameters()}
    updates: dict[Any, _Update] = {}
    for each in optimizers:
        updates |= _measured(each, owners)

    def row(name: str, p: Any, weight: torch.dtype, masters: Any, of_now: bool = False) -> AuditRow:
        update = updates.get(p, _Update())
        is_mastered = masters in _MASTERS and is_lower_precision(weight) and p.requires_grad
        master, _, gradient = _MASTERS[masters] if is_mastered else ("", 0, weight)
        state = update.elements * (torch.float32 if master else weight).itemsize
        if of_now and update.bytes_now is not None:
            state = update.bytes_now
        trained = dtype_name(gradient or weight) if p.requires_grad else ""
        return AuditRow(name, local(p).numel(), dtype_name(weight), master, trained, update.rate, state, update.stuck)

    mastered = {p: each.properties.master_weights for p, each in owners.items() if each.view.master_of(p) is not None}
    rows = tuple(row(name, p, p.dtype, mastered.get(p), of_now=True) for name, p in model.named_parameters())
    sizes, index = {"now": _bytes(rows)}, ModelIndex([model])
    loaded = {p: owners[p].view.original_dtype(p) if p in owners else p.dtype for p in model.parameters()}
    for level, (name, words) in _LEVELS.items():
        properties = resolve(name, words)[1]
        try:
            targets = select(index, make_plan(properties)).targets
        except ValueError:
            continue  # initialize would refuse it, too
        masters = properties.master_weights
        sizes[level] = _bytes([row("", p, targets.get(p, loaded[p]), masters) for p in loaded])
    advice = _advice(rows, updates, bool(sessions))
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in updates]
    if updates and missing:
        advice.append(
            f"{counted(len(missing), 'trainable parameter')} in no audited optimizer, such as {missing[0]!r}: pass a "
            "list of all optimizers, whose states count, too"
        )
    return Audit(rows, sizes, ". ".join(advice))


def _bytes(rows: Any) -> dict[str, float]:
    """Return the mean bytes per parameter of each kind."""
    sizes = {name: size for name, size, _ in _MASTERS.values()} | {"": 0}
    total = dict.fromkeys(KINDS, 0.0)
    for row in rows:
        parts = (_itemsize(row.weight), sizes[row.master], _itemsize(row.gradient), row.state)
        for kind, size in zip(KINDS, parts, strict=True):
            total[kind] += row.elements * size
    return {kind: value / max(1, sum(row.elements for row in rows)) for kind, value in total.items()}


def _itemsize(dtype: str) -> int:
    """Return the bytes of a number of any dtype of torch: a quantized model has frozen integers."""
    size: int = getattr(torch, dtype).itemsize if dtype else 0
    return size


class _Update(NamedTuple):
    """The updates of one parameter by its optimizer.

    Attributes:
        optimizer: the optimizer's class.
        rate: the largest learning rate.
        bytes_now: bytes of state per element; None before the first step.
        elements: elements of state per element.
        stuck: the share of elements that a step does not change; None if it is not measured.
        failure: the error with which measuring failed, or "".
    """

    optimizer: str = ""
    rate: float | None = None
    bytes_now: float | None = None
    elements: float = 0.0
    stuck: float | None = None
    failure: str = ""


@torch.no_grad()
def _measured(optimizer: Optimizer, owners: Mapping[Any, Session]) -> dict[Any, _Update]:
    """Measure an optimizer's updates on copies of parts of its parameters; frozen ones have none."""
    kind, found, parts = type(optimizer).__name__, dict[Any, _Update](), dict[Any, torch.Tensor]()
    for group in optimizer.param_groups:
        for p in group["params"]:
            states = [(value, encoded_part(value)) for value in _kept(optimizer.state.get(p))]
            size = sum(local(value).nbytes if codes is None else codes.code_bytes for value, codes in states)
            has_stepped = bool(optimizer.state.get(p))
            found[p] = _Update(kind, _rate(group), size / max(1, local(p).numel()) if has_stepped else None)
            values = local(owners[p].view.values_of(p) if p in owners else p.detach())
            parts[p] = values[tuple(slice(0, _LARGEST_SIDE) for _ in values.shape)].clone()
    trained = [p for p in parts if p.requires_grad]
    measured: dict[Any, tuple[float, float, float]] = {}
    try:
        with same_random_numbers():
            small, large = (_run(optimizer, parts, dict.fromkeys(trained, size)) for size in _SIZES)
            by_gradient = {p for p in trained if not 0 < 0.5 * small[p][0] <= large[p][0] <= 2 * small[p][0]}
            if by_gradient and all(p.grad is not None for p in trained):
                measured = _run(optimizer, parts, {p: _size_of(p.grad) for p in trained})
    except Exception as error:  # an optimizer may refuse to be copied, or to step without a closure, with any error
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
        return found | {p: found[p]._replace(failure=failure) for p in trained}
    for p in trained:
        elements, stuck = small[p][2], None
        if p not in by_gradient:
            stuck = (small[p][1] + large[p][1]) / 2
        elif measured:
            stuck = measured[p][1]
        found[p] = found[p]._replace(elements=elements, stuck=stuck)
        encoded = _ENCODED.get(owners[p].properties.optimizer_state) if p in owners else None
        if encoded is not None and found[p].bytes_now is None:
            found[p] = found[p]._replace(bytes_now=elements * encoded)
    return found


def _rate(group: Mapping[str, Any]) -> float:
    """Return the largest rate of a group: its present one, the one before a warm-up, or the largest of a cycle."""
    return max(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr"))


def _kept(state: Any) -> list[torch.Tensor]:
    """List the tensors of a parameter's state that have an entry per element."""
    entries = state.values() if isinstance(state, dict) else ()
    tensors = [value for value in entries if isinstance(value, torch.Tensor) and value.numel() > 1]
    return [value for value in tensors if value.is_floating_point() or value.is_complex()]


def _size_of(gradient: torch.Tensor) -> float:
    values = local(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return float(_wide(values).abs().square().mean().sqrt()) if values.numel() else 0.0


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return values in float32, or as they are if they are complex."""
    return values if values.is_complex() else values.float()


def _run(
    optimizer: Optimizer, parts: Mapping[Any, torch.Tensor], sizes: Mapping[Any, float]
) -> dict[Any, tuple[float, float, float]]:
    """Step copies of the parts on random gradients with these root mean squares; parts without one are frozen.

    Returns:
        Of each part the mean size of a step, the share of elements that it does not change, and the elements of state
        per element.

    Raises:
        RuntimeError: the copy's step writes to no part.
    """
    copies = {p: nn.Parameter(_wide(part), requires_grad=p in sizes) for p, part in parts.items()}
    copied = copy_of_optimizer(optimizer, copies)
    for group in copied.param_groups:
        if "lr" in group:
            lr, rate = group["lr"], _rate(group)
            group["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
    generator = torch.Generator().manual_seed(0)
    totals = {p: [0.0, 0.0] for p in sizes}
    has_written = not sizes
    for number in range(_STEPS):
        for p, size in sizes.items():
            random = torch.randn(copies[p].shape, generator=generator, dtype=copies[p].dtype, device="cpu")
            copies[p].grad = size * random.to(copies[p].device)
        before = {p: (copies[p].clone(), copies[p]._version) for p in sizes}
        # Neither a default device nor hooks of all optimizers, which the user has set for the originals, apply.
        beneath = inside_hooks(copied.step)
        with CastsAs(), torch.device("cpu"):
            (copied.step if beneath is None else partial(beneath, copied))()
        # Fused kernels do not count their writes.
        for p, (values, version) in before.items():
            has_written = has_written or copies[p]._version != version or not torch.equal(copies[p], values)
        for p in sizes if number >= _STEPS - _COUNTED else ():
            part = parts[p]
            if part.numel():
                step = copies[p] - before[p][0]
                totals[p][0] += float(step.abs().mean()) / _COUNTED
                totals[p][1] += float(((_wide(part) + step).to(part.dtype) == part).double().mean()) / _COUNTED
    if not has_written:
        raise RuntimeError("the step of a copy of it does nothing")
    kept = {p: sum(value.numel() for value in _kept(copied.state.get(copies[p]))) for p in sizes}
    return {p: (size, stuck, kept[p] / max(1, copies[p].numel())) for p, (size, stuck) in totals.items()}


def _advice(rows: tuple[AuditRow, ...], updates: Mapping[Any, _Update], is_initialised: bool) -> list[str]:
    known = [row for row in rows if row.stuck is not None]
    narrow = [row for row in known if _itemsize(row.weight) < torch.float32.itemsize and not row.master]
    wide = [row for row in known if row not in narrow]
    lines = []
    if (share := _mean_stuck(narrow)) >= _WORTH_ADVICE:
        way = "master_weights=True" if is_initialised else "mpinit.initialize(model, optimizer, opt_level='O5')"
        worst = max(narrow, key=lambda row: row.stuck or 0.0)
        lines.append(
            f"{share:.0%} of the {worst.weight} weights do not change in a step, and {worst.stuck or 0.0:.0%} of "
            f"{worst.name!r}: {way} adds float32 masters, in which small updates add up. No update is then lost to "
            "rounding: a learning rate that was tuned without masters may be too high with them"
        )
    if (share := _mean_stuck(wide)) >= _WORTH_ADVICE:
        lines.append(f"{share:.0%} of the weights kept in float32 do not change in a step: raise the learning rate")
    unknown = [each for p, each in updates.items() if p.requires_grad and each.stuck is None]
    for kind, failure in sorted({(each.optimizer, each.failure) for each in unknown if each.failure}):
        lines.append(
            f"Not measured: updates and states of {kind} ({failure}); its states count as 0 bytes before the first step"
        )
    if kinds := sorted({each.optimizer for each in unknown if not each.failure}):
        lines.append(f"The size of updates by {', '.join(kinds)} depends on the gradients: audit after a backward pass")
    return lines


def _mean_stuck(rows: list[AuditRow]) -> float:
    return sum(row.elements * (row.stuck or 0.0) for row in rows) / max(1, sum(row.elements for row in rows))
