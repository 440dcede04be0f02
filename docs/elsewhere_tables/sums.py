"""Sums of many small numbers, and losses."""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

from . import Row, Table, cell

MANY, DTYPES = 5_000, ("float32", "float16", "bfloat16")


def _torch(code: str, dtype: str, imports: str = "") -> Any:
    """Evaluate an expression of 5,000 ones, as many indices 0, and "leaf", a one with a gradient."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    names: dict[str, Any] = {"torch": torch, "F": functional, "dtype": kind}
    exec(imports, names)
    names |= {"ones": torch.ones(MANY, dtype=kind), "zeros": torch.zeros(MANY, dtype=torch.long)}
    leaf = names["leaf"] = torch.ones(1, dtype=kind, requires_grad=True)
    value = eval(code, names)
    if not value.requires_grad:
        return value.float().sum()
    value.float().sum().backward()
    return leaf.grad.to_dense().flatten()[0]


def _numpy(code: str, dtype: str) -> Any:
    import ml_dtypes
    import numpy as np

    ones = np.ones(MANY, getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    return eval(code, {"np": np, "ones": ones, "place": np.zeros(1, ones.dtype), "zeros": np.zeros(MANY, int)})


def _jax(code: str, dtype: str) -> Any:
    import jax

    jnp = jax.numpy
    names = {
        "jax": jax,
        "jnp": jnp,
        "ones": jnp.ones(MANY, dtype),
        "zeros": jnp.zeros(MANY, int),
        "one": jnp.ones(1, dtype),
    }
    return eval(code, names)


def _mlx(code: str, dtype: str) -> Any:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    names = {"mx": mx, "ones": mx.ones((MANY,), getattr(mx, dtype)), "zeros": mx.zeros((MANY,), mx.int32)}
    return eval(code, names).astype(mx.float32).item()


def _rows(packages: str, evaluate: Any, torch: bool, *codes: str, **settings: str) -> dict[str, Row]:
    def measure(code: str) -> dict[str, str]:
        return {dtype: cell(partial(evaluate, code, dtype, **settings)) for dtype in DTYPES}

    return {f"`{code}`": Row(packages, partial(measure, code), torch) for code in codes}


_SUMS = {
    **_rows(
        "",
        _torch,
        True,
        "ones.sum()",
        "ones.cumsum(0)[-1]",
        "ones.nansum()",
        "ones @ ones",
        "torch.bmm(ones[None, None], ones[None, :, None])",
        "torch.addbmm(0 * ones[:1, None], ones[:, None, None], ones[:, None, None])",
        "torch.linalg.vector_norm(ones, 1)",
        "torch.zeros(1, dtype=dtype).index_add_(0, zeros, ones)",
        "torch.zeros(1, 1, dtype=dtype).index_add_(0, zeros, ones[:, None])",
        "torch.zeros(1, dtype=dtype).index_put_((zeros,), ones, accumulate=True)",
        "torch.zeros(1, dtype=dtype).put_(zeros, ones, accumulate=True)",
        "torch.zeros(1, dtype=dtype).scatter_add_(0, zeros, ones)",
        "torch.zeros(1, dtype=dtype).scatter_reduce_(0, zeros, ones, 'sum')",
        "torch.segment_reduce(ones, 'sum', lengths=torch.tensor([5_000]))",
        "torch.sparse_coo_tensor(zeros[None], ones, (1,)).coalesce().values()",
        "torch.sparse_csr_tensor(torch.tensor([0, 5_000]), torch.arange(5_000), ones, (1, 5_000)) @ ones",
        "F.embedding_bag(zeros[None], ones[:1, None], mode='sum')",
        "F.conv1d(ones[None, None], ones[None, None])",
        "5_000 * F.avg_pool1d(ones[None], 5_000).float()",
        "F.embedding(zeros, leaf[:, None])",
        "F.embedding_bag(zeros[None], leaf[:, None], mode='sum')",
        "leaf[zeros]",
        "leaf.index_select(0, zeros)",
        "leaf.gather(0, zeros)",
        "leaf.take(zeros)",
        "leaf.expand(5_000)",
        "leaf.repeat(5_000)",
        "leaf.repeat_interleave(5_000)",
        "F.linear(ones[:, None], 0 * ones[:1, None], leaf)",
        "F.conv1d(ones[None, None], ones[:1, None, None], leaf)",
        "F.layer_norm(ones[:, None], (1,), None, leaf)",
        "F.layer_norm(ones[:, None], (1,), ones[:1], leaf)",
        "F.group_norm(ones[:, None], 1, ones[:1], leaf)",
        "F.batch_norm(ones[:, None], None, None, ones[:1], leaf, training=True)",
        "F.rms_norm(ones[:, None], (1,), leaf, 1e-30)",
        "F.prelu(-ones, leaf).neg()",
        "F.interpolate(leaf[None, None], size=5_000, mode='nearest')",
        "F.grid_sample(leaf[None, None, None], torch.zeros(1, 1, 5_000, 2, dtype=dtype), align_corners=True)",
        "F.pad(leaf[None, None], (0, 4_999), mode='replicate')",
    ),
    **_rows(
        "torch_geometric==2.8.1", _torch, True,
        "scatter(ones, zeros, reduce='sum')", "degree(zeros, dtype=dtype)",
        "to_dense_adj(torch.stack([zeros, zeros]), edge_attr=ones)",
        imports="from torch_geometric.utils import degree, scatter, to_dense_adj",
    ),
    **_rows(
        "ml_dtypes==0.6.0 numpy==2.4.6", _numpy, False,
        "np.sum(ones)", "np.mean(ones) * 5_000.0", "np.cumsum(ones)[-1]", "np.dot(ones, ones)",
        "np.einsum('i,i->', ones, ones)",
        "np.add.at(place, zeros, ones) or place[0]", "np.trapezoid(ones)",
    ),
    **_rows(
        "jax==0.10.2", _jax, False,
        "jnp.sum(ones)", "jnp.cumsum(ones)[-1]", "jnp.dot(ones, ones)", "jax.ops.segment_sum(ones, zeros)[0]",
        "jnp.zeros_like(one).at[zeros].add(ones)[0]", "jax.grad(lambda w: w[zeros].astype('float32').sum())(one)[0]",
        "jax.grad(lambda b: (ones[:, None] + b).astype('float32').sum())(one)[0]",
    ),
    **_rows(
        "mlx[cpu]==0.32.4", _mlx, False,
        "mx.sum(ones)", "mx.cumsum(ones)[-1]", "mx.matmul(ones[None], ones[:, None])",
        "(0 * ones[:1]).at[zeros].add(ones)[0]",
        "mx.grad(lambda w: w[zeros].astype(mx.float32).sum())(ones[:1])[0]",
    ),
}  # fmt: skip


def _loss(code: str, *shape: int) -> Row:
    """Make a row of a loss of normal numbers x with targets y (or classes c), and of its gradient."""

    def measure() -> dict[str, str]:
        import torch
        from torch.nn import functional

        torch.manual_seed(0)
        drawn, chosen = torch.randn(shape).half(), torch.randint(shape[-1], shape[:1])
        cells, right = {}, 0.0
        for dtype in DTYPES:
            x = drawn.to(getattr(torch, dtype), copy=True).requires_grad_()
            try:
                value = eval(code, {"torch": torch, "F": functional, "x": x, "y": x.detach().roll(1, 0), "c": chosen})
                value.backward()
            except Exception as error:
                cells |= {
                    dtype: f"{type(error).__name__}: {str(error).splitlines()[0]}"[:100],
                    f"gradient, {dtype}": "-",
                }
                continue
            size = x.grad.double().abs().sum().item()
            right = right or size
            cells |= {
                dtype: f"{value.item():.4g}",
                f"gradient, {dtype}": f"{size / right:.0%}".replace("%", " %") if isfinite(size) else str(size),
            }
        del cells["gradient, float32"]
        return cells

    return Row("", measure)


_LOSSES = {
    f"`{code}`, {' × '.join(f'{size:,}' for size in shape)}": _loss(code, *shape)
    for code, *shape in (
        ("F.cross_entropy(x, c)", 1_000, 1_000),
        ("F.cross_entropy(x, c)", 70_000, 4),
        ("F.cross_entropy(x, c)", 4, 100_000),
        ("F.cross_entropy(x, c, label_smoothing=0.1)", 4, 100_000),
        ("F.cross_entropy(x, c, reduction='sum')", 70_000, 4),
        ("F.cross_entropy(x, y.softmax(1))", 70_000, 4),
        ("F.nll_loss(x.log_softmax(1), c)", 70_000, 4),
        ("F.mse_loss(x, y)", 100_000),
        ("F.mse_loss(x, y)", 10_000_000),
        ("F.mse_loss(x, y, reduction='sum')", 100_000),
        ("F.mse_loss(1_000 * x, 1_000 * y)", 10_000),
        ("F.l1_loss(x, y)", 100_000),
        ("F.smooth_l1_loss(x, y)", 100_000),
        ("F.huber_loss(x, y)", 100_000),
        ("F.binary_cross_entropy(x.sigmoid(), y.sigmoid())", 100_000),
        ("F.binary_cross_entropy((10 * x).sigmoid(), y.sigmoid())", 100_000),
        ("F.binary_cross_entropy_with_logits(10 * x, y.sigmoid())", 100_000),
        ("F.kl_div(x.log_softmax(1), y.softmax(1), reduction='batchmean')", 1_000, 1_000),
        ("F.gaussian_nll_loss(x, y, torch.full_like(y, 1e-3))", 100_000),
        ("F.poisson_nll_loss(x + 12, y.exp())", 100_000),
        ("F.cosine_similarity(x, x.detach() + y, dim=1).mean()", 4, 100_000),
        ("F.cosine_similarity(1e-4 * x, 1e-4 * x.detach() + 1e-4 * y, dim=1).mean()", 100, 64),
        ("F.triplet_margin_loss(x, y, y.roll(1, 0))", 1_000, 512),
        ("F.pairwise_distance(x, x.detach()).mean()", 1_000, 512),
        ("F.soft_margin_loss(x, y.sign())", 100_000),
        ("F.multi_margin_loss(x, c)", 70_000, 4),
        ("F.normalize(1e-4 * x, dim=1).sum()", 100, 64),
        ("x.var()", 100_000),
        ("x.square().sum().sqrt()", 100_000),
        ("x.logsumexp(0)", 100_000),
    )
}

_SUM_TEXT = """
5,000 ones are added to one number, on a CPU with one thread. The right sum is 5,000; in bfloat16 4,992 is its
nearest number. 256 and 2,048 are the numbers at which a sum stops that adds one at a time in bfloat16 or float16. Where
`leaf` is used, the number is its gradient.
"""
_LOSS_TEXT = """
Losses of normal numbers `x`, with targets `y` or classes `c`, and the sum of their gradients' absolute values, as part
of float32's, on a CPU. Compute losses in float32: at O2 and O5 the outputs of a model are float32, so a loss outside of
it is; O1 and O4 compute losses in float32.
"""

TABLES = (
    Table("Sums", _SUM_TEXT, DTYPES, _SUMS),
    Table("Losses", _LOSS_TEXT, (*DTYPES, *(f"gradient, {dtype}" for dtype in DTYPES[1:])), _LOSSES),
)
