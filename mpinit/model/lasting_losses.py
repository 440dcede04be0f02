"""Tables and counters that a cast to 16 bits spoils for good, found before it happens.

Every number loses lower bits in a cast, and a network is used to that. Three kinds of buffer are not, because what is
computed from them makes the error larger than the type's:

- whole numbers beyond those the type counts without gaps (2,048 in float16, 256 in bfloat16), which become their
  neighbours: position ids, counters;
- frequencies (a geometric progression, such as the inverse frequencies of rotary embeddings), which are multiplied by
  positions: 0.4 % of an angle of 1,000 is half a turn;
- tables that rise or fall over more than a factor of 16, such as noise schedules, where neighbours become the same
  number or values the type's subnormal ones.

Running statistics, embeddings of positions, masks and constants that normalise are none of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.modules import dotted, named_modules_of
from ..basics.user_warnings import warn_user
from ..distributed.sharding import local
from ..torch_internals.parameter_data import TENSOR_DETACH

# Of whole numbers, float32 counts without gaps up to here: what is larger is no id and no counter.
_FLOAT32_COUNTS: Final = 2**24
_LARGEST_LOOKED_AT: Final = 2**24
_FEWEST_FREQUENCIES: Final = 4
_FEWEST_IN_TABLE: Final = 8
_LEAST_SPAN: Final = 16.0
_SAME_RATIO: Final = 1e-3


def warn_of_lasting_losses(
    models: Sequence[nn.Module], targets: Mapping[torch.Tensor, torch.dtype], but_for: Collection[torch.Tensor] = ()
) -> None:
    """One warning that names every tensor that its cast would spoil, why, and the ``keep_fp32`` entry that keeps it.

    Args:
        models: whose tensors they are.
        targets: tensor -> the dtype it is about to have.
        but_for: tensors that another warning names already.
    """
    found, entries = [], []
    for model in models:
        for module_name, module in named_modules_of(model):
            if isinstance(module, _NormBase):
                continue
            for name, tensor in _candidates(module):
                dtype = targets.get(tensor)
                reason = None if dtype is None or tensor in but_for else loss_of(tensor, dtype)
                if reason is not None:
                    full_name = dotted(module_name, name)
                    found.append(f"{full_name} {reason}")
                    entries.append(_entry_for(module_name, module, full_name))
    if found:
        listed = ", ".join(map(repr, dict.fromkeys(entries)))
        warn_user(
            f"casts to 16 bits lose what cannot come back: {'; '.join(found)}. To keep them, give "
            f"keep_fp32=[{listed}] beside what you keep already"
        )


def loss_of(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What a cast spoils, in words; None where it takes no more than lower bits.

    Args:
        tensor: any floating tensor; looked at on the host.
        dtype: what it is to be cast to.

    Example:
        >>> loss_of(torch.arange(300.0), torch.bfloat16)
        'holds whole numbers up to 299, of which bfloat16 has every one only up to 256'
        >>> loss_of(torch.linspace(-1, 1, 300), torch.bfloat16) is None
        True
    """
    if not is_lower_precision(dtype) or tensor.element_size() <= 2 or tensor.is_meta:
        return None
    part = local(TENSOR_DETACH(tensor))
    if part.layout is not torch.strided or not 0 < part.numel() <= _LARGEST_LOOKED_AT:
        return None
    values = part.reshape(-1).double()
    narrow = part.reshape(-1).to(dtype).double()
    if not bool(values.isfinite().all()) or torch.equal(values, narrow):
        return None
    return _of_whole_numbers(values, narrow, dtype) or _of_tables(part, values, narrow, dtype)


def _of_whole_numbers(values: torch.Tensor, narrow: torch.Tensor, dtype: torch.dtype) -> str | None:
    largest = float(values.max())
    if float(values.min()) < 0 or largest > _FLOAT32_COUNTS or bool((values != values.round()).any()):
        return None
    # 0 and one large number are a mask.
    if values.numel() > 1 and bool(((values == 0) | (values == largest)).all()):
        return None
    exact = int(2 / torch.finfo(dtype).eps)
    return f"holds whole numbers up to {largest:,.0f}, of which {dtype_name(dtype)} has every one only up to {exact:,}"


def _of_tables(part: torch.Tensor, values: torch.Tensor, narrow: torch.Tensor, dtype: torch.dtype) -> str | None:
    count = values.numel()
    if count < _FEWEST_FREQUENCIES or not _is_one_line(part) or not bool((values > 0).all()):
        return None
    steps = values.log().diff()
    if not (bool((steps > 0).all()) or bool((steps < 0).all())) or float(values.max() / values.min()) < _LEAST_SPAN:
        return None
    middle = steps.median()
    if float(((steps - middle).abs() <= _SAME_RATIO * middle.abs()).double().mean()) >= 0.5:
        return "holds frequencies, whose error grows with what they are multiplied by"
    if count < _FEWEST_IN_TABLE:
        return None
    if bool((narrow.diff() == 0).any()):
        return f"is a table whose neighbours become the same number in {dtype_name(dtype)}"
    if bool(((narrow - values).abs() > torch.finfo(dtype).eps * values).any()):
        return f"is a table with values below the smallest that {dtype_name(dtype)} holds in full"
    return None


def _candidates(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers, and frozen parameters of one long dimension: what is learned corrects itself."""
    found = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.requires_grad and _is_one_line(parameter):
            found.append((name, parameter))
    return [(name, tensor) for name, tensor in found if tensor.is_floating_point()]


def _is_one_line(tensor: torch.Tensor) -> bool:
    return max(tensor.shape, default=1) == tensor.numel()


def _entry_for(module_name: str, module: nn.Module, dotted: str) -> str:
    """The module where it holds nothing that is trained, for it then returns 16 bits; elsewhere the tensor itself."""
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return dotted if trains or not module_name or any(True for _ in module.children()) else module_name


def warn_of_target_networks(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """One warning that names the models that no optimizer trains, of the class and shapes of one that is trained.

    Such a target network follows the other by small updates by hand, which 16-bit weights without masters round away.
    """
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    looks = [(type(model), tuple([p.shape for p in model.parameters()])) for model in models]
    is_trained = [any(id(p) in trained for p in model.parameters()) for model in models]
    for index, look in enumerate(looks):
        like = [other for other, same in enumerate(looks) if same == look and is_trained[other]]
        if like and look[1] and not is_trained[index]:
            warn_user(
                f"models[{index}], a {look[0].__name__}, is like models[{like[0]}], but no optimizer trains it. If it "
                "is a target network that follows the other, its 16-bit weights round small updates away: leave it out "
                f"of mpinit.initialize (copy.deepcopy(models[{like[0]}]) is float32 after it), or give "
                'master_weights="model"'
            )
