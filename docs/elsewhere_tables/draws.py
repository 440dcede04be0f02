"""Initialisers and random numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from . import TIMM, Row, Table, cell

COUNT, DTYPES = 2_000_000, ("float32", "float16", "bfloat16")


def _torch(code: str, dtype: str, imports: str = "") -> Any:
    import torch
    from torch.nn import functional, init

    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "F": functional, "init": init}
    exec(imports, names)
    return eval(code, names | {"e": torch.zeros(1_000, COUNT // 1_000, dtype=getattr(torch, dtype))})


def _jax(code: str, dtype: str) -> Any:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    names: dict[str, Any] = {
        "jax": jax,
        "jnp": jax.numpy,
        "key": jax.random.key(0),
        "dtype": dtype,
        "shape": (1_000, 2_000),
    }
    if "keras" in code:
        names["keras"] = __import__("keras")
    return eval(code, names).astype("float32")


def _mlx(code: str, dtype: str) -> Any:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    return eval(code, {"mx": mx, "dtype": getattr(mx, dtype), "shape": (1_000, 2_000)}).astype(mx.float32)


def _number(draw: Any, measured: str, code: str, dtype: str, **settings: str) -> Any:
    """Return one number of what was drawn, "v" in float64."""
    import numpy as np

    drawn = draw(code, dtype, **settings)
    v = drawn.double().numpy() if hasattr(drawn, "double") else np.array(drawn).astype(np.float64)
    return eval(measured, {"np": np, "v": v})


def _rows(packages: str, draw: Any, torch: bool, *rows: tuple[str, str, str], **settings: str) -> dict[str, Row]:
    def measure(code: str, title: str, measured: str) -> dict[str, str]:
        numbers = {dtype: cell(partial(_number, draw, measured, code, dtype, **settings)) for dtype in DTYPES}
        return {"measured": title} | numbers

    return {
        f"`{code}`, {title.split(' (')[0]}": Row(packages, partial(measure, *row), torch)
        for row in rows
        for code, title, _ in [row]
    }


_ROWS = {
    **_rows(
        TIMM, _torch, True,
        ("trunc_normal_(e, std=0.02)", "share below -5 std", "(v < -0.1).mean()"),
        ("trunc_normal_(e, std=0.02)", "lowest, in std", "v.min() / 0.02"),
        ("trunc_normal_tf_(e, std=0.02)", "lowest, in std", "v.min() / 0.02"),
        ("DropPath(0.1).train()(e + 1)", "mean (right: about 1)", "v.mean()"),
        imports="from elsewhere_tables import import_timm; import_timm();"
        "from timm.layers import DropPath, trunc_normal_, trunc_normal_tf_",
    ),
    **_rows(
        "", _torch, True,
        ("init.trunc_normal_(e, std=0.02)", "lowest, in std", "v.min() / 0.02"),
        ("init.trunc_normal_(e, std=0.02)", "std (right: 0.02)", "v.std()"),
        ("init.kaiming_uniform_(e)", "mean, in std (right: 0)", "v.mean() / v.std()"),
        ("init.xavier_normal_(e)", "std (right: 0.02582)", "v.std()"),
        ("init.orthogonal_(e[:64, :64])", "error of W Wᵀ", "abs(v @ v.T - np.eye(64)).max()"),
        ("torch.rand_like(e)", "mean (right: 0.5)", "v.mean()"),
        ("torch.rand_like(e)", "largest", "v.max()"),
        ("torch.rand_like(e)", "different numbers", "np.unique(v).size"),
        ("torch.rand_like(e)", "share of zeros", "(v == 0).mean()"),
        ("e.uniform_(-1, 1)", "mean (right: 0)", "v.mean()"),
        ("e.uniform_(1, 1.01)", "mean (right: 1.005)", "v.mean()"),
        ("torch.randn_like(e)", "largest", "abs(v).max()"),
        ("torch.randn_like(e)", "kurtosis (right: 3)", "(v**4).mean()"),
        ("e.normal_(1, 0.001)", "std (right: 0.001)", "v.std()"),
        ("e.exponential_()", "zeros", "(v == 0).sum()"),
        ("e.log_normal_(0, 3)", "infinite", "np.isinf(v).sum()"),
        ("e.cauchy_()", "infinite", "np.isinf(v).sum()"),
        ("e.geometric_(0.001)", "mean (right: 1,000)", "v.mean()"),
        ("torch.bernoulli(e + 0.999)", "share of zeros (right: 0.001)", "(v == 0).mean()"),
        ("torch.multinomial(e[0] + 0.0005, 2_000_000, True)", "classes ever drawn (right: 2,000)", "np.unique(v).size"),
        ("torch.poisson(e + 300)", "mean (right: 300)", "v.mean()"),
        ("F.dropout(e + 1, 0.1)", "value of a kept 1 (right: 1.1111)", "v.max()"),
        ("F.dropout(e + 1, 0.1)", "mean (right: 1)", "v.mean()"),
        ("F.dropout(e + 1, 0.001)", "mean (right: 1)", "v.mean()"),
        ("F.alpha_dropout(e.normal_(), 0.1, True)", "std (right: 1)", "v.std()"),
        ("F.rrelu(e - 1, training=True)", "mean (right: -0.2292)", "v.mean()"),
        ("torch._standard_gamma(e + 0.01)", "share of zeros", "(v == 0).mean()"),
    ),
    **_rows(
        "jax==0.10.2", _jax, False,
        ("jax.random.uniform(key, shape, dtype)", "mean (right: 0.5)", "v.mean()"),
        ("jax.random.normal(key, shape, dtype)", "largest", "abs(v).max()"),
        ("jax.random.truncated_normal(key, -2, 2, shape, dtype)", "std (right: 0.8796)", "v.std()"),
        ("jax.random.exponential(key, shape, dtype)", "mean (right: 1)", "v.mean()"),
        ("jax.random.gumbel(key, shape, dtype)", "mean (right: 0.5772)", "v.mean()"),
    ),
    **_rows(
        "keras==3.15.1 jax==0.10.2", _jax, False,
        ("keras.initializers.TruncatedNormal(seed=0)(shape, dtype)", "std (right: 0.04398)", "v.std()"),
        ("keras.initializers.GlorotUniform(seed=0)(shape, dtype)", "mean, in std (right: 0)", "v.mean() / v.std()"),
        ("keras.random.dropout(jnp.ones(shape, dtype), 0.1, seed=0)", "mean (right: 1)", "v.mean()"),
    ),
    **_rows(
        "mlx[cpu]==0.32.4", _mlx, False,
        ("mx.random.uniform(shape=shape, dtype=dtype)", "mean (right: 0.5)", "v.mean()"),
        ("mx.random.uniform(shape=shape, dtype=dtype)", "largest", "v.max()"),
        ("mx.random.normal(shape, dtype)", "std (right: 1)", "v.std()"),
        ("mx.random.truncated_normal(-2, 2, shape, dtype)", "std (right: 0.8796)", "v.std()"),
        ("mx.random.gumbel(shape, dtype)", "infinite", "np.isinf(v).sum()"),
    ),
}  # fmt: skip

_TEXT = f"""
{COUNT:,} numbers are drawn in each dtype, on a CPU, and measured in float64. `e` is a tensor of zeros. mpinit draws no
numbers: initialise weights in float32, before `mpinit.initialize` or inside `mpinit.float32_weights(model)`.
"""

TABLES = (Table("Initialisers and random numbers", _TEXT, ("measured", *DTYPES), _ROWS),)
