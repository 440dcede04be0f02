"""Refusals and warnings before a cast to 16 bits damages numbers, and before target networks stop changing.

Every number loses lower bits in a cast, and training tolerates that. Three kinds of numbers are exceptions, because
computations with them enlarge the error:

- Whole numbers above the largest up to which the dtype has every whole number (2,048 in float16, 256 in bfloat16), such
  as position ids and counters. They become other whole numbers.
- Large constants, such as reference energies in eV, whose rounding is not small in their own unit: -2,042.4 becomes
  -2,048 in bfloat16, and what a model learns beside it is lost.
- Tables that rise or fall by more than a factor of 16, such as noise schedules and the inverse frequencies of rotary
  embeddings. Frequencies are multiplied by positions: 0.4 % of an angle of 1,000 is more than half a turn.

Running statistics, embeddings of positions, masks and normalising constants are not among them.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Adam, AdamW, Optimizer

from ..basics.dtypes import dtype_name, is_lower_precision, may_overflow
from ..basics.logs import warn_user
from ..basics.modules import ModelIndex, Names, dotted
from ..distributed.sharding import local
from ..masters.masters import Masters
from ..torch_internals.parameter_data import TENSOR_DETACH

# float32 has every whole number up to here; a larger number is no id, no counter, and no constant in a unit.
COUNTED_BY_FLOAT32: Final = 2**24
_FEWEST_IN_TABLE: Final = 8
_LEAST_SPAN: Final = 16.0
# Constants beyond the first, whose rounding changes them by the second or more: not means in bytes, which are divided.
_LARGE: Final = 256.0
_ERROR_IN_UNITS: Final = 0.25
# How many numbers a tensor of several dimensions may have to be read.
_FEW: Final = 1024
# The smallest number of float16 above 0.
_SMALLEST: Final = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
_EPS_NAMES: Final = ("eps", "epsilon", "variance_epsilon", "norm_eps")
# Modules that add to a state step by step -> the keyword with which the state is float32. A cell's caller holds the
# state, and keep_fp32 would give it back in 16 bits.
_STATES: Final = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), "keep_fp32"),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), "compute_fp32"),
}


def check_values(
    index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype], mastered: Collection[int]
) -> set[torch.Tensor]:
    """Refuse casts of ``targets`` that would make a weight with a master infinite; warn of others that damage numbers.

    Returns the tensors without a master whose finite values overflow: they are clamped.
    """
    beyond = out_of_range(targets)
    refused = [tensor for tensor in beyond if id(tensor) in mastered]
    if refused:
        names, name = Names(index.models).of_all(refused), dtype_name(targets[refused[0]])
        raise ValueError(
            f"{', '.join(names)} would be infinite in {name}, which has no numbers as large: add "
            f"keep_fp32=[{', '.join(map(repr, names))}], or the modules that have them"
            + (', or use opt_level="O5", whose bfloat16 has float32\'s range' if name == "float16" else "")
        )
    if beyond:
        names = Names(index.models).of_all(beyond)
        warn_user(
            f"finite values of {', '.join(names)} are beyond the largest of the narrower type they are cast to: they "
            "become that largest instead of infinite. Masters and buffers keep the full numbers for mpinit.undo. Where "
            f"the full numbers are needed, add keep_fp32=[{', '.join(map(repr, names))}], or their modules"
        )
    _warn_about_precision_loss(index, targets, {*mastered, *map(id, beyond)})
    return set(beyond)


@torch.no_grad()
def out_of_range(targets: Mapping[torch.Tensor, torch.dtype]) -> list[torch.Tensor]:
    """Find the tensors whose finite values overflow in the dtype that they are cast to."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[torch.Tensor]] = {}
    for tensor, dtype in targets.items():
        kinds.setdefault((tensor.dtype, dtype), []).append(tensor)
    found = []
    for (source, dtype), tensors in kinds.items():
        if not may_overflow(source, dtype):
            continue
        limit = torch.finfo(dtype).max
        parts = [(t, t if type(t) is nn.Parameter else local(TENSOR_DETACH(t))) for t in tensors]
        parts = [(t, p) for t, p in parts if p.numel() and not p.is_meta and p.layout is torch.strided]
        for device in dict.fromkeys(part.device for _, part in parts):
            members = [(tensor, part) for tensor, part in parts if part.device == device]
            # One call and one device sync for many tensors. If a norm is inf or nan, the tensor is examined itself.
            norms = torch._foreach_norm([part for _, part in members], float("inf"))
            for (tensor, part), norm in zip(members, torch.stack(norms).tolist(), strict=True):
                if not norm <= limit and bool((part.isfinite() & (part.abs() > limit)).any()):
                    found.append(tensor)
    return found


def _warn_about_precision_loss(
    index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype], but_for: set[int]
) -> None:
    """Warn once about all tensors that their casts would damage, with the ``keep_fp32`` entry for each."""
    found: list[str] = []
    entries: list[str] = []
    for module_name, module in index.named_modules:
        for name, tensor in index.own[module]:
            # Training corrects parameters that are not frozen. Running statistics are measured, not constants.
            if tensor.requires_grad or id(tensor) in but_for or isinstance(module, _NormBase):
                continue
            dtype = targets.get(tensor, tensor.dtype)
            reason = None if dtype is tensor.dtype else loss_of(tensor, dtype)
            if reason is not None:
                full_name = dotted(module_name, name)
                found.append(f"{full_name} {reason}")
                # The module, if nothing in it is trained, because its output is 16-bit then.
                trains = any(parameter.requires_grad for parameter in module.parameters())
                is_whole = module_name and not trains and not any(True for _ in module.children())
                entries.append(module_name if is_whole else full_name)
    if found:
        listed = ", ".join(map(repr, dict.fromkeys(entries)))
        warn_user(
            f"casts to 16 bits lose values for good: {'; '.join(found)}. To keep them, pass "
            f"keep_fp32=[{listed}], with the entries that you have"
        )


def loss_of(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Describe the harm of a cast; None if it only rounds. Only small tensors and those of one dimension are read."""
    part = local(TENSOR_DETACH(tensor))
    is_one_line = part.numel() == max(part.shape, default=1)
    if not is_lower_precision(dtype) or part.is_meta or part.layout is not torch.strided:
        return None
    if not part.numel() or not (is_one_line or part.numel() <= _FEW):
        return None
    values = part.flatten().cpu().double()
    if not bool(values.isfinite().all()) or torch.equal(values, values.to(dtype).double()):
        return None
    name = dtype_name(dtype)
    least, largest, steps = float(values.min()), float(values.max()), values.diff()
    if is_one_line and least >= 0 and largest <= COUNTED_BY_FLOAT32 and torch.equal(values, values.round()):
        # 0 and one large number are a mask.
        if bool(((values == 0) | (values == largest)).all()) and values.numel() > 1:
            return None
        exact = int(2 / torch.finfo(dtype).eps)
        return f"contains whole numbers up to {largest:,.0f}, of which {name} has every one only up to {exact:,}"
    is_monotonic = bool((steps > 0).all()) or bool((steps < 0).all())
    if is_one_line and is_monotonic and values.numel() >= _FEWEST_IN_TABLE and 0 < _LEAST_SPAN * least < largest:
        return f"is a table from {values[0]:.3g} to {values[-1]:.3g}, whose error grows with what it is multiplied by"
    errors = (values - values.to(dtype).double()).abs()
    worst = int(errors.argmax())
    value, error = float(values[worst]), float(errors[worst])
    # Constants of masks have one digit: -10,000, -1e9.
    if _LARGE < abs(value) <= COUNTED_BY_FLOAT32 and error >= _ERROR_IN_UNITS and float(f"{value:.0e}") != value:
        return f"contains {value:,.6g}, which is {float(values[worst].to(dtype)):,.6g} in {name}"
    return None


def warn_about_small_eps(index: ModelIndex, float32_modules: Container[nn.Module]) -> None:
    """Warn once of norms whose eps is 0 in float16, so that a row of zeros is divided by 0."""
    found = {
        name: eps
        for name, module in index.named_modules
        if (eps := _small_eps(module)) is not None and name and module not in float32_modules
    }
    if found:
        listed = ", ".join(f"{name} ({eps:g})" for name, eps in found.items())
        warn_user(
            f"the eps of {listed} is 0 in float16, and a norm that computes in it divides a row of zeros by 0. "
            f"Pass keep_fp32=[{', '.join(map(repr, found))}], with the entries that you have, or set a larger eps"
        )


def warn_about_states(index: ModelIndex, float32_modules: Container[nn.Module], has_16_bit_weights: bool) -> None:
    """Warn once of recurrent modules, which add to their state in bfloat16."""
    entries: dict[str, list[str]] = {}
    for kind, keyword in _STATES.items():
        if any(isinstance(module, kind) and module not in float32_modules for module in index.names):
            # At O4 weights are float32 already.
            entries.setdefault(keyword if has_16_bit_weights else "compute_fp32", []).append(
                f"torch.nn.{kind.__name__}"
            )
    if entries:
        kinds = ", ".join(name for names in entries.values() for name in names)
        keywords = " and ".join(f"{keyword}=[{', '.join(names)}]" for keyword, names in entries.items())
        needs_cast = has_16_bit_weights and "compute_fp32" in entries
        more = ", whose output is float32: cast it where 16-bit layers use it" if needs_cast else ""
        warn_user(
            f"the state of {kinds} is bfloat16, in which a sum of ones stops at 256 and a change of a number by less "
            "than 0.4 % is lost: after some hundred steps it may be wrong by tens of percent. To have it in float32, "
            f"add {keywords}, with the entries that you have{more}"
        )


def _small_eps(module: nn.Module) -> float | None:
    """Return the ``eps`` of a norm that is 0 in float16; None where there is none."""
    if type(module).__module__.startswith("torch."):
        return None  # norms of torch compute in float32 inside, with any eps
    values = [vars(module).get(name) for name in _EPS_NAMES]
    return next((eps for eps in values if isinstance(eps, float) and 0.0 < eps < _SMALLEST / 2), None)


def warn_about_optimizer_eps(optimizer: Optimizer, masters: Masters) -> None:
    """Warn of an optimizer's eps that is 0 in float16, where it steps float16 weights: 0 is divided by 0."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if group.get("fused") and isinstance(optimizer, (Adam, AdamW)):
            continue  # this kernel adds eps in float32
        if not isinstance(eps, float) or not 0.0 < eps < _SMALLEST / 2:
            continue
        if any(p.dtype is torch.float16 and p.requires_grad and masters.of(p) is None for p in group["params"]):
            warn_user(
                f"the eps={eps:g} of {type(optimizer).__name__} is 0 in float16, in which it steps weights without "
                "masters: where a gradient is small, the step divides by 0 and the weight is nan or inf. Pass an eps "
                "of 1e-6 or more, or use opt_level='O2', or O3 in bfloat16 (cast_model_type=torch.bfloat16)"
            )
            return


def warn_about_target_networks(index: ModelIndex, optimizers: Sequence[Optimizer]) -> None:
    """Warn once of models that no optimizer trains, but that have the class and shapes of one that is trained.

    Such a target network follows the other by small updates by hand, which 16-bit weights without masters round away.
    """
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    by_model = [list(model.parameters()) for model in index.models]
    kinds = [(type(model), [p.shape for p in own]) for model, own in zip(index.models, by_model, strict=True)]
    is_trained = [any(id(p) in trained for p in own) for own in by_model]
    for number, kind in enumerate(kinds):
        like = [other for other, same in enumerate(kinds) if same == kind and is_trained[other]]
        if like and kind[1] and not is_trained[number]:
            warn_user(
                f"models[{number}], a {kind[0].__name__}, is like models[{like[0]}], but no optimizer trains it. If it "
                "is a target network that follows the other, its 16-bit weights round small updates away: do not pass "
                f"it to mpinit.initialize (copy.deepcopy(models[{like[0]}]) is float32 after it), or use "
                'master_weights="model"'
            )
