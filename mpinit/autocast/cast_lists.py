"""The cast policy, as data: the dtype that each function runs in, its names, and the devices with native support.

The rows start from PyTorch's CUDA autocast lists. On the devices in a row's ``native``, torch's own autocast makes the
casts. On every other device the names in ``wraps`` are replaced by wrappers. The names in ``reaches`` need no wrapper:
their Python bodies call a wrapped name, or a kernel that autocast covers. To add a function, add a row here and one in
``tests/support/cast_samples.py``.
"""

import enum
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final


class Cast(enum.Enum):
    """A rule for a function's floating arguments while casts are on.

    Attributes:
        LOWER_PRECISION: cast to the 16-bit dtype.
        FP32: cast 16-bit arguments to float32.
        PROMOTE: cast to the widest dtype among them.
        BANNED: raise for float16 arguments; run in float32.
        REFUSED: an in-place function whose float32 result does not fit its 16-bit tensor; it raises.
    """

    LOWER_PRECISION = "lower_precision"
    FP32 = "fp32"
    PROMOTE = "promote"
    BANNED = "banned"
    REFUSED = "refused"


@dataclass(frozen=True)
class CastRow:
    """One function of the cast policy.

    Attributes:
        wraps: dotted names replaced by a wrapper on devices that are not in ``native``.
        reaches: dotted names that follow the row without a wrapper of their own.
        native: device types whose own autocast follows the row.
        arguments: number of leading arguments to cast; 0: all. Lists of an RNN's weights are not cast on devices where
            autocast casts them inside, because those casts are cached.
        casts_off: whether autocast is disabled while the function runs, because operations inside it are on autocast's
            own list.
    """

    name: str
    cast: Cast
    wraps: tuple[str, ...]
    reaches: tuple[str, ...] = ()
    native: frozenset[str] = frozenset()
    arguments: int = 0
    casts_off: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.wraps + self.reaches


# CUDA and XPU have the same autocast list; the CPU has its own.
_LISTED: Final = frozenset({"cuda", "xpu"})
_EVERYWHERE: Final = _LISTED | {"cpu"}
# Devices whose own autocast casts matrix products, also inside another function.
CASTS_INSIDE: Final = _EVERYWHERE
# Where torch's autocast runs recurrent networks in float16 whatever its dtype is.
_CUDNN: Final = frozenset({"cuda"})
_NOWHERE: Final = frozenset[str]()

_PREFIXES: Final = {
    "t": "torch.",
    "T": "torch.Tensor.",
    "F": "torch.nn.functional.",
    "L": "torch.linalg.",
    "S": "torch.special.",
    "V": "torch._VF.",
    "N": "torch._C._nn.",
    "P": "torch.sparse.",
}


def _names(short: str) -> tuple[str, ...]:
    """Spell out short names: "tTS:exp" is torch.exp, torch.Tensor.exp and torch.special.exp."""
    found = []
    for word in short.split():
        prefixes, name = word.split(":")
        found += [_PREFIXES[prefix] + name for prefix in prefixes]
    return tuple(found)


def _row(
    cast: Cast,
    name: str,
    wraps: str,
    reaches: str = "",
    native: frozenset[str] = _LISTED,
    *,
    arguments: int = 0,
    casts_off: bool = False,
) -> CastRow:
    return CastRow(name, cast, _names(wraps), _names(reaches), native, arguments, casts_off)


def _rows(cast: Cast, prefixes: str, names: str, native: frozenset[str] = _LISTED) -> Iterator[CastRow]:
    """Yield a row for each of some functions that differ only in name."""
    return (_row(cast, name, f"{prefixes}:{name}", native=native) for name in names.split())


def _losses(prefix: str, names: str) -> Iterator[CastRow]:
    """Yield rows of losses, wrapped at the kernel that their Python bodies call: users may bind a loss by any name."""
    return (_row(Cast.FP32, name, f"{prefix}:{name}", f"F:{name}", _EVERYWHERE) for name in names.split())


_lower: Final = functools.partial(_row, Cast.LOWER_PRECISION)
_fp32: Final = functools.partial(_row, Cast.FP32)
_promote: Final = functools.partial(_row, Cast.PROMOTE, native=_NOWHERE)

_LOWER_PRECISION_ROWS: Final = (
    *_rows(Cast.LOWER_PRECISION, "tF", "conv1d conv2d conv3d conv_tbc", _EVERYWHERE),
    *_rows(Cast.LOWER_PRECISION, "tF", "conv_transpose1d conv_transpose2d conv_transpose3d", _EVERYWHERE),
    _lower("convolution", "t:convolution"),
    _lower("linear", "F:linear", native=_EVERYWHERE),
    _lower("matmul", "tT:matmul T:__matmul__ T:__rmatmul__ L:matmul", native=_EVERYWHERE),
    *_rows(Cast.LOWER_PRECISION, "tT", "mm bmm addmm baddbmm", _EVERYWHERE),
    *_rows(Cast.LOWER_PRECISION, "tT", "mv addmv addr"),
    _lower("vecdot", "L:vecdot", native=_EVERYWHERE),
    _lower("multi_dot", "L:multi_dot"),
    _lower("chain_matmul", "V:chain_matmul", "t:chain_matmul"),
    _lower("einsum", "V:einsum", "t:einsum"),
    _lower("prelu", "tTF:prelu", native=_EVERYWHERE),
    _lower(
        "scaled_dot_product_attention", "F:scaled_dot_product_attention", "F:multi_head_attention_forward", _EVERYWHERE
    ),
    _lower("lstm", "tV:lstm", native=_LISTED - _CUDNN, arguments=3),
    _lower("gru", "tV:gru", native=_LISTED - _CUDNN, arguments=3),
    _lower("lstm_cell", "tV:lstm_cell", arguments=2),
    _lower("gru_cell", "tV:gru_cell", arguments=2),
    *_rows(Cast.LOWER_PRECISION, "tV", "rnn_tanh rnn_relu", _EVERYWHERE - _CUDNN),
    *_rows(Cast.LOWER_PRECISION, "tV", "rnn_tanh_cell rnn_relu_cell", _EVERYWHERE),
)

_UPSAMPLE: Final = (
    "N:upsample_nearest1d N:upsample_nearest2d N:upsample_nearest3d N:_upsample_nearest_exact1d "
    "N:_upsample_nearest_exact2d N:_upsample_nearest_exact3d N:upsample_linear1d N:upsample_bilinear2d "
    "N:_upsample_bilinear2d_aa N:upsample_trilinear3d N:upsample_bicubic2d N:_upsample_bicubic2d_aa"
)

# Losses that are written in Python: there is no kernel to wrap.
COMPOSED_LOSS_ROWS: Final = tuple(
    _rows(Cast.FP32, "F", "gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss", _NOWHERE)
)

LOSS_ROWS: Final = (
    _fp32("cross_entropy", "N:cross_entropy_loss", "F:cross_entropy", _EVERYWHERE),
    _fp32("nll_loss", "N:nll_loss_nd", "F:nll_loss", _EVERYWHERE),
    # Their Python bodies compute by themselves where a weight is passed.
    _fp32("l1_loss", "N:l1_loss F:l1_loss", native=_EVERYWHERE),
    _fp32("mse_loss", "N:mse_loss F:mse_loss", native=_EVERYWHERE),
    *_losses("N", "smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss multilabel_margin_loss"),
    *_losses("t", "poisson_nll_loss triplet_margin_loss kl_div cosine_embedding_loss hinge_embedding_loss"),
    *_losses("t", "margin_ranking_loss binary_cross_entropy_with_logits"),
    *COMPOSED_LOSS_ROWS,
)

_FP32_ROWS: Final = (
    _fp32("acos", "tT:acos tT:arccos"),
    _fp32("asin", "tT:asin tT:arcsin"),
    *_rows(Cast.FP32, "tTS", "erfinv expm1 log1p logsumexp"),
    *_rows(Cast.FP32, "tT", "cosh exp log log10 log2"),
    _fp32("reciprocal", "tT:reciprocal", "T:__rtruediv__ T:__rdiv__"),
    *_rows(Cast.FP32, "tT", "rsqrt sinh tan"),
    _fp32("pow", "tT:pow T:__pow__ T:__rpow__ tT:square tT:ldexp"),
    _fp32("softplus", "F:softplus"),
    _fp32("softmax", "tTS:softmax", "F:softmax F:softmin F:gumbel_softmax"),
    _fp32("log_softmax", "tTS:log_softmax", "F:log_softmax"),
    _fp32("sum", "tT:sum T:sum_to_size t:trapezoid t:trapz t:cumulative_trapezoid tT:mvlgamma S:multigammaln"),
    _fp32("prod", "tT:prod", native=_EVERYWHERE),
    *_rows(Cast.FP32, "tT", "cumsum cumprod renorm dist"),
    # A CPU computes 16-bit inputs in float32 too, but adds the gradients of its weights in 16 bits.
    _fp32("layer_norm", "t:layer_norm t:native_layer_norm", "F:layer_norm"),
    _fp32("group_norm", "t:group_norm", "F:group_norm"),
    # Not on the list of torch 2.11.
    _fp32("rms_norm", "t:rms_norm", "F:rms_norm", _NOWHERE),
    _fp32(
        "norm", "L:vector_norm L:matrix_norm L:norm t:nuclear_norm t:frobenius_norm F:normalize", "tT:norm", _NOWHERE
    ),
    _fp32("pdist", "tF:pdist"),
    _fp32("cdist", "V:cdist", "t:cdist", _EVERYWHERE),
    # The wrapper for the CPU switches the casts of all devices off, so every device needs one.
    _fp32("cosine_similarity", "tF:cosine_similarity", native=_NOWHERE, casts_off=True),
    _fp32("interpolate", _UPSAMPLE, "F:interpolate F:upsample F:upsample_nearest F:upsample_bilinear"),
    *LOSS_ROWS,
    # Sums over many rows, which a CPU adds in 16 bits: ones stop at 256 in bfloat16. On torch's lists for CUDA
    # addbmm runs in 16 bits, and index_put in the widest dtype of its arguments.
    *_rows(Cast.FP32, "tT", "index_add index_put index_reduce", _NOWHERE),
    *_rows(Cast.FP32, "t", "segment_reduce", _NOWHERE),
    _fp32("addbmm", "tT:addbmm", native=_NOWHERE, casts_off=True),
    # Their gradient is computed without casts, of a sparse argument that torch has not cast.
    _fp32("sparse_mm", "P:mm", native=_NOWHERE, casts_off=True),
    _fp32("sparse_addmm", "P:addmm", native=_NOWHERE, casts_off=True),
    # In 16 bits a CPU computes inf or nan; autocast casts inside of pinv, which then fails.
    _fp32("matrix_exp", "tTL:matrix_exp", native=_NOWHERE, casts_off=True),
    _fp32("pinv", "L:pinv tT:pinverse", native=_NOWHERE, casts_off=True),
    _fp32("fold", "N:col2im", "F:fold", _NOWHERE),
    _fp32("unfold", "N:im2col", "F:unfold", _NOWHERE),
)

_STACKS: Final = "t:concat t:concatenate t:hstack t:vstack t:row_stack t:dstack t:column_stack"

# Wrapped because torch's own promotion raises for tensors of the other 16-bit dtype. cat and stack promote without it.
_PROMOTE_ROWS: Final = (
    *_rows(Cast.PROMOTE, "tT", "addcdiv addcmul dot vdot index_copy scatter_add", _NOWHERE),
    _promote("atan2", "tT:atan2 tT:arctan2"),
    _promote("bilinear", "tF:bilinear", casts_off=True),
    _promote("cross", "tT:cross L:cross"),
    _promote("inner", "tT:inner", casts_off=True),
    _promote("tensordot", "V:tensordot", "t:tensordot", casts_off=True),
    _promote("grid_sample", "t:grid_sampler", "F:grid_sample", casts_off=True),
    _promote("cat", "t:cat", _STACKS, native=_EVERYWHERE),
    _promote("stack", "t:stack", native=_EVERYWHERE),
)

BANNED_ROW: Final = _row(
    Cast.BANNED, "binary_cross_entropy", "N:binary_cross_entropy", "F:binary_cross_entropy", _NOWHERE, casts_off=True
)

_IN_PLACE: Final = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ log1p_ reciprocal_ rsqrt_ sinh_ tan_ square_"
# In-place functions that exist as methods only.
_IN_PLACE_METHODS: Final = "erfinv_ pow_ __ipow__ cumsum_ cumprod_ renorm_"

_APEX_ROWS: Final = (
    _fp32("grid_sample", "t:grid_sampler", "F:grid_sample", frozenset({"cpu"})),
    *_rows(Cast.FP32, "F", "gelu local_response_norm", _NOWHERE),
    _fp32("std", "tT:std t:std_mean", native=_NOWHERE),
    _fp32("var", "tT:var t:var_mean", native=_NOWHERE),
    _fp32("ctc_loss", "t:ctc_loss", "F:ctc_loss", frozenset({"cpu"})),
    _fp32("cpu", "T:cpu", native=_NOWHERE),
    *_rows(Cast.REFUSED, "tT", _IN_PLACE, _NOWHERE),
    *_rows(Cast.REFUSED, "T", _IN_PLACE_METHODS, _NOWHERE),
)


TORCH_POLICY: Final = (*_LOWER_PRECISION_ROWS, *_FP32_ROWS, *_PROMOTE_ROWS, BANNED_ROW)
APEX_POLICY: Final = tuple({row.name: row for row in (*TORCH_POLICY, *_APEX_ROWS)}.values())


def wrapped_on(row: CastRow, device_types: Iterable[str]) -> tuple[str, ...]:
    """Return the device types among these that need the row's wrapper."""
    return tuple(device for device in device_types if device not in row.native)
