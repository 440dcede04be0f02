"""apex's normalisations. They compute in float32 and return the input's dtype; Mixed ones return the weight's."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F


class _Norm(nn.Module):
    """The common base: apex's arguments for torch's class, which is the second base of each subclass."""

    _function: ClassVar[Callable[..., Tensor]]
    _is_mixed: ClassVar[bool] = False

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; the result has the input's dtype, or the weight's for a Mixed norm."""
        norm: Any = self
        affine = (norm.weight, norm.bias) if isinstance(norm, nn.LayerNorm) else (norm.weight,)
        # torch's RMSNorm accepts None, for which it has a default of its own.
        shape, eps = list(norm.normalized_shape), 1e-5 if norm.eps is None else norm.eps
        present = [tensor for tensor in affine if tensor is not None]
        if all(tensor.dtype == input.dtype for tensor in present):
            # torch's function accumulates in float32.
            return self._function(input, shape, *affine, eps=eps)
        wide = [None if tensor is None else tensor.float() for tensor in affine]
        found = self._function(input.float(), shape, *wide, eps=eps)
        return found.to(present[0].dtype if self._is_mixed else input.dtype)


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with apex's arguments; input and weight may differ in dtype.

    Args:
        normalized_shape, eps, elementwise_affine: as in ``torch.nn.LayerNorm``.
        memory_efficient: accepted; torch keeps what its backward needs.
    """

    _function = staticmethod(F.layer_norm)


class FusedRMSNorm(_Norm, nn.RMSNorm):
    """``torch.nn.RMSNorm`` with the arguments of :class:`FusedLayerNorm`; input and weight may differ in dtype."""

    _function = staticmethod(F.rms_norm)


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` whose result has the weight's dtype."""

    _is_mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` whose result has the weight's dtype."""

    _is_mixed = True
