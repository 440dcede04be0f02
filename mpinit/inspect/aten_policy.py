"""Which row of the cast policy an operation of torch's dispatcher carries out, as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..functions.cast_lists import APEX_POLICY, TORCH_POLICY, CastRow
from ..plan import CastPolicy

# Operations have the name of their row, but for these.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution"), "convolution"),
    **dict.fromkeys(("convolution_overrideable", "_slow_conv2d_forward"), "convolution"),
    **dict.fromkeys(("mkldnn_linear", "_addmm_activation"), "linear"),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), "lstm"),
    **dict.fromkeys(("_thnn_fused_lstm_cell",), "lstm_cell"),
    **dict.fromkeys(("_thnn_fused_gru_cell",), "gru_cell"),
    "linalg_vecdot": "vecdot",
    "_prelu_kernel": "prelu",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm",
    "linalg_vector_norm": "norm",
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), "cdist"),
    "_pdist_forward": "pdist",
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), "nll_loss"),
    "multilabel_margin_loss_forward": "multilabel_margin_loss",
    "linalg_cross": "cross",
    "_trilinear": "bilinear",
    "_ctc_loss": "ctc_loss",
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), "grid_sample"),
}
_PREFIXES: Final = (
    ("_scaled_dot_product_", "scaled_dot_product_attention"),
    ("upsample_", "interpolate"),
    ("_upsample_", "interpolate"),
)


class AtenPolicy:
    """The rows of a cast policy, by the names that the dispatcher knows.

    Args:
        policy: which table.

    Example:
        >>> AtenPolicy(CastPolicy.TORCH).row_of("_softmax").cast.value
        'fp32'
        >>> AtenPolicy(CastPolicy.TORCH).row_of("exp_") is None
        True
    """

    def __init__(self, policy: CastPolicy) -> None:
        rows: Iterable[CastRow] = APEX_POLICY if policy is CastPolicy.APEX else TORCH_POLICY
        self._rows = {row.name: row for row in rows}

    def row_of(self, operation: str) -> CastRow | None:
        """The row that an operation, without its overload's name, carries out; None for in-place ones and others."""
        row = self._rows.get(_OTHER_NAMES.get(operation, operation))
        if row is not None:
            return None if operation.endswith("_") else row
        named = next((name for prefix, name in _PREFIXES if operation.startswith(prefix)), "")
        return None if "backward" in operation else self._rows.get(named)
