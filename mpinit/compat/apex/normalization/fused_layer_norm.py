"""The normalisations: computed in float32 inside, returned in the input's dtype, or the weight's for the Mixed ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

Shape = int | Sequence[int]


def _as_shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _normalise(
    function: Callable[..., Tensor], input: Tensor, shape: Shape, affine: Sequence[Tensor | None], eps: float
) -> Tensor:
    """torch's function where all dtypes agree (it accumulates in float32 itself), float32 around it otherwise."""
    given = [tensor for tensor in affine if tensor is not None]
    if all(tensor.dtype == input.dtype for tensor in given):
        return function(input, _as_shape(shape), *affine, eps=eps)
    wide = [None if tensor is None else tensor.float() for tensor in affine]
    return function(input.float(), _as_shape(shape), *wide, eps=eps).to(input.dtype)


def _normalise_as_weights(
    function: Callable[..., Tensor], input: Tensor, shape: Shape, affine: Sequence[Tensor], eps: float
) -> Tensor:
    return _normalise(function, input.float(), shape, [tensor.float() for tensor in affine], eps).to(affine[0].dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer normalisation without weights.

    Example:
        >>> import torch
        >>> fused_layer_norm(torch.ones(2, 3), 3).shape
        torch.Size([2, 3])
    """
    return _normalise(F.layer_norm, input, normalized_shape, (), eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer normalisation, in the input's dtype.

    Example:
        >>> import torch
        >>> fused_layer_norm_affine(torch.ones(2, 3), torch.ones(3), torch.zeros(3), 3).shape
        torch.Size([2, 3])
    """
    return _normalise(F.layer_norm, input, normalized_shape, (weight, bias), eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer normalisation, in the weight's dtype.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 3, dtype=torch.float16)
        >>> mixed_dtype_fused_layer_norm_affine(x, torch.ones(3), torch.zeros(3), 3).dtype
        torch.float32
    """
    return _normalise_as_weights(F.layer_norm, input, normalized_shape, (weight, bias), eps)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS normalisation without weights.

    Example:
        >>> import torch
        >>> fused_rms_norm(torch.ones(2, 3), 3).shape
        torch.Size([2, 3])
    """
    return _normalise(F.rms_norm, input, normalized_shape, (), eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS normalisation, in the input's dtype.

    Example:
        >>> import torch
        >>> fused_rms_norm_affine(torch.ones(2, 3), torch.ones(3), 3).shape
        torch.Size([2, 3])
    """
    return _normalise(F.rms_norm, input, normalized_shape, (weight,), eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS normalisation, in the weight's dtype.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 3, dtype=torch.float16)
        >>> mixed_dtype_fused_rms_norm_affine(x, torch.ones(3), 3).dtype
        torch.float32
    """
    return _normalise_as_weights(F.rms_norm, input, normalized_shape, (weight,), eps)


class _Fused(nn.Module):
    """What the modules share; it stands before torch's class among the bases and calls one of the functions above."""

    _function: ClassVar[Callable[..., Tensor]]

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; the result has its dtype, a Mixed norm's has the weight's."""
        return self._function(input, *self._options())

    @abstractmethod
    def _options(self) -> tuple[Any, ...]:
        """What the function takes beside its input."""


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with apex's arguments; input and weight may differ in dtype.

    Args:
        normalized_shape, eps, elementwise_affine: as in ``torch.nn.LayerNorm``.
        memory_efficient: accepted; torch keeps what its backward needs.
    """

    _function = staticmethod(fused_layer_norm_affine)

    def _options(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.normalized_shape, self.eps


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """``torch.nn.RMSNorm`` with apex's arguments; input and weight may differ in dtype.

    Args:
        normalized_shape, eps, elementwise_affine: as in ``torch.nn.RMSNorm``.
        memory_efficient: accepted; torch keeps what its backward needs.
    """

    _function = staticmethod(fused_rms_norm_affine)

    def _options(self) -> tuple[Any, ...]:
        return self.weight, self.normalized_shape, self.eps or 1e-5


def _check_affine(kind: str, given: dict[str, Any]) -> None:
    if not given.pop("elementwise_affine", True):
        raise RuntimeError(
            f"{kind} has weights; without them use {kind.removeprefix('Mixed')}(elementwise_affine=False)"
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalisation whose result has the weight's dtype, whatever the input's.

    Args:
        normalized_shape: as in ``torch.nn.LayerNorm``.
        eps: added to the variance.
        **kwargs: ``memory_efficient``, accepted; ``elementwise_affine=False`` is refused.
    """

    _function = staticmethod(mixed_dtype_fused_layer_norm_affine)

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps=eps, elementwise_affine=True, **kwargs)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS normalisation whose result has the weight's dtype, whatever the input's.

    Args:
        normalized_shape: as in ``torch.nn.RMSNorm``.
        eps: added to the mean square.
        **kwargs: ``memory_efficient``, accepted; ``elementwise_affine=False`` is refused.
    """

    _function = staticmethod(mixed_dtype_fused_rms_norm_affine)

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps=eps, elementwise_affine=True, **kwargs)
