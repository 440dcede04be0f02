"""One row of arguments for each row of the cast policy: what every name of the row is called with.

A sample is a function of ``make``, which makes a floating tensor of a shape, in the dtype under test, with values in
(0.2, 0.8) and requires_grad. A dotted name has a sample of its own where its signature differs from its row's.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpinit.autocast.cast_lists import TORCH_POLICY

ROWS = {name: row for row in TORCH_POLICY for name in row.names}


class Make:
    """Makes the tensors of one call, in ``dtypes`` in turn, and remembers them so that gradients can be looked at."""

    def __init__(self, device: str, *dtypes: torch.dtype) -> None:
        self.device = device
        self.made: list[torch.Tensor] = []
        self._dtypes = dtypes

    def __call__(self, *shape: int) -> torch.Tensor:
        dtype = self._dtypes[len(self.made) % len(self._dtypes)]
        tensor = (torch.rand(*shape) * 0.6 + 0.2).to(self.device, dtype).requires_grad_()
        self.made.append(tensor)
        return tensor


Sample = Callable[[Make], tuple[Any, ...]]


def _indices(make: Make, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=make.device)


def _rnn(gates: int, *, lstm: bool = False) -> Sample:
    def sample(make: Make) -> tuple[Any, ...]:
        weights = [make(gates * 4, 3), make(gates * 4, 4), make(gates * 4), make(gates * 4)]
        hidden = (make(1, 2, 4), make(1, 2, 4)) if lstm else make(1, 2, 4)
        return (make(5, 2, 3), hidden, weights, True, 1, 0.0, True, False, False)

    return sample


def _cell(gates: int, *, lstm: bool = False) -> Sample:
    def sample(make: Make) -> tuple[Any, ...]:
        hidden = (make(2, 4), make(2, 4)) if lstm else make(2, 4)
        return (make(2, 3), hidden, make(gates * 4, 3), make(gates * 4, 4), make(gates * 4), make(gates * 4))

    return sample


def _unary(make: Make) -> tuple[Any, ...]:
    return (make(2, 3),)


def _binary(make: Make) -> tuple[Any, ...]:
    return make(2, 3), make(2, 3)


def _along(make: Make) -> tuple[Any, ...]:
    return make(2, 3), 1


def _triplet(make: Make) -> tuple[Any, ...]:
    return make(2, 3), make(2, 3), make(2, 3)


def _classes(make: Make) -> tuple[Any, ...]:
    return make(2, 3), _indices(make, 0, 2)


def _vectors(make: Make) -> tuple[Any, ...]:
    return make(3), make(3)


SAMPLES: dict[str, Sample] = {
    "conv1d": lambda make: (make(1, 2, 5), make(3, 2, 3)),
    "conv2d": lambda make: (make(1, 2, 5, 5), make(3, 2, 3, 3)),
    "conv3d": lambda make: (make(1, 2, 3, 3, 3), make(3, 2, 3, 3, 3)),
    "conv_transpose1d": lambda make: (make(1, 2, 5), make(2, 3, 3)),
    "conv_transpose2d": lambda make: (make(1, 2, 5, 5), make(2, 3, 3, 3)),
    "conv_transpose3d": lambda make: (make(1, 2, 3, 3, 3), make(2, 3, 3, 3, 3)),
    "conv_tbc": lambda make: (make(5, 1, 2), make(3, 2, 3), make(3), 0),
    "convolution": lambda make: (make(1, 2, 5), make(3, 2, 3), None, [1], [0], [1], False, [0], 1),
    "linear": lambda make: (make(2, 3), make(4, 3), make(4)),
    "matmul": lambda make: (make(3, 3), make(3, 3)),
    "mm": lambda make: (make(2, 3), make(3, 4)),
    "bmm": lambda make: (make(2, 2, 3), make(2, 3, 4)),
    "addmm": lambda make: (make(2, 4), make(2, 3), make(3, 4)),
    "matrix_exp": lambda make: (make(3, 3),),
    "pinv": lambda make: (make(4, 3),),
    "sparse_mm": lambda make: (make(2, 3).to_sparse(), make(3, 4)),
    "sparse_addmm": lambda make: (make(2, 4), make(2, 3).to_sparse(), make(3, 4)),
    "addbmm": lambda make: (make(2, 4), make(2, 2, 3), make(2, 3, 4)),
    "baddbmm": lambda make: (make(2, 2, 4), make(2, 2, 3), make(2, 3, 4)),
    "mv": lambda make: (make(2, 3), make(3)),
    "addmv": lambda make: (make(2), make(2, 3), make(3)),
    "addr": lambda make: (make(2, 3), make(2), make(3)),
    "vecdot": _binary,
    "multi_dot": lambda make: ([make(2, 3), make(3, 4), make(4, 2)],),
    "chain_matmul": lambda make: ([make(2, 3), make(3, 4), make(4, 2)],),
    "torch.chain_matmul": lambda make: (make(2, 3), make(3, 4), make(4, 2)),
    "einsum": lambda make: ("ij,ij->ij", [make(2, 3), make(2, 3)]),
    "torch.einsum": lambda make: ("ij,jk->ik", make(2, 3), make(3, 4)),
    "prelu": lambda make: (make(2, 3), make(1)),
    "scaled_dot_product_attention": lambda make: (make(1, 2, 4, 8), make(1, 2, 4, 8), make(1, 2, 4, 8)),
    "torch.nn.functional.multi_head_attention_forward": lambda make: (
        *(make(3, 1, 4), make(3, 1, 4), make(3, 1, 4), 4, 2, make(12, 4), make(12), None, None, False, 0.0),
        *(make(4, 4), make(4), True, None, False),
    ),
    "lstm": _rnn(4, lstm=True),
    "gru": _rnn(3),
    "rnn_tanh": _rnn(1),
    "rnn_relu": _rnn(1),
    "lstm_cell": _cell(4, lstm=True),
    "gru_cell": _cell(3),
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    **dict.fromkeys(["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"], _unary),
    **dict.fromkeys(["reciprocal", "rsqrt", "sinh", "tan"], _unary),
    "torch.Tensor.__rtruediv__": lambda make: (make(2, 3), 2.0),
    "torch.Tensor.__rdiv__": lambda make: (make(2, 3), 2.0),
    "pow": lambda make: (make(2, 3), 2),
    "torch.Tensor.__rpow__": lambda make: (make(2, 3), 2.0),
    "torch.square": _unary,
    "torch.Tensor.square": _unary,
    "softplus": _unary,
    **dict.fromkeys(["softmax", "log_softmax", "logsumexp", "cumsum", "cumprod"], _along),
    "torch.nn.functional.gumbel_softmax": _unary,
    "torch.ldexp": _binary,
    "torch.Tensor.ldexp": _binary,
    "sum": _unary,
    "torch.Tensor.sum_to_size": lambda make: (make(2, 3), (1, 3)),
    **dict.fromkeys(["torch.mvlgamma", "torch.Tensor.mvlgamma", "torch.special.multigammaln"], _along),
    "prod": _unary,
    "layer_norm": lambda make: (make(2, 3), [3], make(3), make(3), 1e-5),
    "group_norm": lambda make: (make(2, 4), 2, make(4), make(4), 1e-5),
    "rms_norm": lambda make: (make(2, 3), [3], make(3), 1e-5),
    "norm": _unary,
    "torch.frobenius_norm": lambda make: (make(2, 3), [0, 1]),
    "renorm": lambda make: (make(2, 3), 2, 0, 1.0),
    "dist": _binary,
    "pdist": _unary,
    "cdist": lambda make: (make(2, 3), make(4, 3), 2.0, None),
    "torch.cdist": lambda make: (make(2, 3), make(4, 3)),
    "cosine_similarity": _binary,
    "interpolate": lambda make: (make(1, 2, 4, 4), None, 2.0),
    **{
        f"torch._C._nn.{kernel}{dims}d": lambda make, dims=dims, more=more: (
            make(1, 2, *[4] * dims),
            [3] * dims,
            *more,
            *[None] * dims,
        )
        for kernel, more, sizes in [
            ("upsample_nearest", (), (1, 2, 3)),
            ("_upsample_nearest_exact", (), (1, 2, 3)),
            ("upsample_linear", (False,), (1,)),
            ("upsample_bilinear", (False,), (2,)),
            ("upsample_bicubic", (False,), (2,)),
            ("upsample_trilinear", (False,), (3,)),
        ]
        for dims in sizes
    },
    "torch._C._nn._upsample_bilinear2d_aa": lambda make: (make(1, 2, 4, 4), [3, 3], False, None, None),
    "torch._C._nn._upsample_bicubic2d_aa": lambda make: (make(1, 2, 4, 4), [3, 3], False, None, None),
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "multi_margin_loss": _classes,
    "multilabel_margin_loss": lambda make: (make(1, 3), _indices(make, 0, 2, -1)[None]),
    **dict.fromkeys(["kl_div", "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss"], _binary),
    "torch.poisson_nll_loss": lambda make: (make(2, 3), make(2, 3), True, False, 1e-8, 1),
    **dict.fromkeys(["hinge_embedding_loss", "binary_cross_entropy_with_logits"], _binary),
    "soft_margin_loss": lambda make: (make(2), _indices(make, 1, -1).to(make(2).dtype)),
    "cosine_embedding_loss": lambda make: (make(2, 3), make(2, 3), _indices(make, 1, -1)),
    "margin_ranking_loss": lambda make: (make(2), make(2), _indices(make, 1, -1)),
    **dict.fromkeys(["triplet_margin_loss", "triplet_margin_with_distance_loss", "gaussian_nll_loss"], _triplet),
    "multilabel_soft_margin_loss": _binary,
    "segment_reduce": lambda make: (make(3), "sum"),
    "addcdiv": _triplet,
    "addcmul": _triplet,
    "atan2": _binary,
    "bilinear": lambda make: (make(2, 3), make(2, 4), make(5, 3, 4), make(5)),
    "cross": lambda make: (make(2, 3), make(2, 3), 1),
    "torch.linalg.cross": _binary,
    "dot": _vectors,
    "vdot": _vectors,
    "inner": _binary,
    "index_put": lambda make: (make(3), (_indices(make, 0, 2),), make(2)),
    "index_add": lambda make: (make(3), 0, _indices(make, 0, 2), make(2)),
    "index_reduce": lambda make: (make(3), 0, _indices(make, 0, 2), make(2), "mean"),
    "fold": lambda make: (make(1, 4, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
    "torch.nn.functional.fold": lambda make: (make(1, 4, 4), 3, 2),
    "unfold": lambda make: (make(1, 1, 3, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    "torch.nn.functional.unfold": lambda make: (make(1, 1, 3, 3), 2),
    "scatter_add": lambda make: (make(3), 0, _indices(make, 0, 2), make(2)),
    "index_copy": lambda make: (make(3), 0, _indices(make, 0, 2), make(2)),
    "tensordot": lambda make: (make(2, 3), make(3, 4), [1], [0]),
    "torch.tensordot": lambda make: (make(2, 3), make(3, 4), 1),
    "grid_sample": lambda make: (make(1, 2, 4, 4), make(1, 3, 3, 2), 0, 0, False),
    "torch.nn.functional.grid_sample": lambda make: (make(1, 2, 4, 4), make(1, 3, 3, 2), "bilinear", "zeros", False),
    "cat": lambda make: ([make(2, 3), make(2, 3)],),
    "stack": lambda make: ([make(2, 3), make(2, 3)],),
    "binary_cross_entropy": lambda make: (make(2, 3), make(2, 3).detach()),
    "torch._C._nn.binary_cross_entropy": lambda make: (make(2, 3), make(2, 3).detach(), None, 1),
    "gelu": _unary,
    "std": _unary,
    "var": _unary,
    "local_response_norm": lambda make: (make(1, 4, 3), 2),
    "ctc_loss": lambda make: (
        make(6, 1, 3).log_softmax(-1),
        _indices(make, 1, 2)[None],
        _indices(make, 6),
        _indices(make, 2),
    ),
    "cpu": _unary,
    **dict.fromkeys(["acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_"], _unary),
    **dict.fromkeys(["log2_", "log1p_"], _unary),
    **dict.fromkeys(["reciprocal_", "rsqrt_", "sinh_", "tan_", "square_"], _unary),
    **dict.fromkeys(["pow_", "__ipow__"], lambda make: (make(2, 3), 2)),
    **dict.fromkeys(["cumsum_", "cumprod_"], _along),
    "renorm_": lambda make: (make(2, 3), 2, 0, 1.0),
}


def keywords(name: str, device: str = "cpu") -> dict[str, Any]:
    """What a dotted name takes by keyword alone, beside its sample."""
    return {"lengths": torch.tensor([3], device=device)} if name == "torch.segment_reduce" else {}


def sample(row: str, name: str) -> Sample:
    """The arguments to call a dotted name with."""
    return SAMPLES.get(name) or SAMPLES[row]


def resolve(name: str) -> Any:
    """The object that Python reaches by a dotted name."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found
