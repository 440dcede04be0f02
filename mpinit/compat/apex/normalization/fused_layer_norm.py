"""The normalisations: computed in float32 inside, returned in the input's dtype, or the weight's for the Mixed ones."""

from __future__ import annotations

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
    return _normalise(F.layer_norm, input.float(), normalized_shape, (weight.float(), bias.float()), eps).to(
        weight.dtype
    )


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
    return _normalise(F.rms_norm, input.float(), normalized_shape, (weight.float(),), eps).to(weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with apex's arguments; input and weight may differ in dtype.

    Args:
        normalized_shape, eps, elementwise_affine: as in ``torch.nn.LayerNorm``.
        memory_efficient: accepted; torch keeps what its backward needs.
    """

    _function: ClassVar[Callable[..., Tensor]] = staticmethod(fused_layer_norm_affine)

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; the result has its dtype, a Mixed norm's has the weight's."""
        return self._function(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with apex's arguments; input and weight may differ in dtype.

    Args:
        normalized_shape, eps, elementwise_affine: as in ``torch.nn.RMSNorm``.
        memory_efficient: accepted; torch keeps what its backward needs.
    """

    _function: ClassVar[Callable[..., Tensor]] = staticmethod(fused_rms_norm_affine)

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; the result has its dtype, a Mixed norm's has the weight's."""
        return self._function(input, self.weight, self.normalized_shape, self.eps or 1e-5)


def _check_affine(kind: str, given: dict[str, Any]) -> None:
    if not given.get("elementwise_affine", True):
        raise RuntimeError(
            f"{kind} has weights; without them use {kind.removeprefix('Mixed')}(elementwise_affine=False)"
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` whose result has the weight's dtype; ``elementwise_affine=False`` is refused."""

    _function = staticmethod(mixed_dtype_fused_layer_norm_affine)

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, **kwargs)


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` whose result has the weight's dtype; ``elementwise_affine=False`` is refused."""

    _function = staticmethod(mixed_dtype_fused_rms_norm_affine)

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, **kwargs)
