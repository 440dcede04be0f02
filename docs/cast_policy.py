"""The page ``reference/cast-policy.md``, from the cast lists, and what is in no list, as data measured with torch 2.13.

The data is complete for ``torch.testing``'s database of operators; ``tests/functions/test_operators.py`` compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from mpinit.functions.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow
from mpinit.torch_internals.cpu_autocast_list import RUNS_UNCAST

# The matrix products inside run in 16 bits: float32 arguments come back in 16 bits.
_PRODUCTS: Final = (
    "torch.cov",
    "torch.corrcoef",
    "torch.matrix_power",
    "torch.linalg.matrix_power",
    "torch.linalg.pinv",
)

# Powers, logarithms and sums inside run in float32, and so the result is, though not every step is.
_POWERS: Final = (
    *("torch.nn.functional.gaussian_nll_loss", "torch.nn.functional.multilabel_soft_margin_loss"),
    *("torch.nn.functional.local_response_norm", "torch.nn.functional.linear_cross_entropy"),
)

MADE_OF_OTHERS: Final = {**dict.fromkeys(_PRODUCTS, Cast.LOWER_PRECISION), **dict.fromkeys(_POWERS, Cast.FP32)}

# Kernels that take no 16-bit tensors on a CPU, by the names they have in Python. What CUDA does with 16-bit tensors is
# its own: it computes avg_pool3d and short FFTs, and raises for most of linear algebra.
FLOAT32_ON_CPU: Final = (
    *("torch.nn.functional.avg_pool3d", "torch.nn.functional.ctc_loss", "torch.ctc_loss"),
    *("torch.quantile", "torch.nanquantile", "torch.polar", "torch.view_as_complex", "torch.stft"),
    *(f"torch.fft.{way}{kind}fft{dims}" for way in ("", "i") for kind in ("", "r") for dims in ("", "2", "n")),
    *("torch.fft.hfft", "torch.fft.ihfft"),
    *("torch.cholesky", "torch.cholesky_inverse", "torch.cholesky_solve", "torch.geqrf", "torch.inverse", "torch.lu"),
    *("torch.lu_solve", "torch.orgqr", "torch.ormqr", "torch.pinverse", "torch.qr", "torch.svd"),
    "torch.triangular_solve",
    *("torch.linalg.cholesky", "torch.linalg.cholesky_ex", "torch.linalg.cond", "torch.linalg.eig"),
    *("torch.linalg.eigh", "torch.linalg.eigvals", "torch.linalg.eigvalsh", "torch.linalg.householder_product"),
    *("torch.linalg.inv", "torch.linalg.inv_ex", "torch.linalg.lstsq", "torch.linalg.matrix_rank"),
    *("torch.linalg.qr", "torch.linalg.solve", "torch.linalg.svd", "torch.linalg.svdvals"),
    *("torch.linalg.tensorinv", "torch.linalg.tensorsolve"),
)

_DEVICES: Final = ("cpu", "cuda", "xpu")

_MEANING: Final = {
    Cast.LOWER_PRECISION: "arguments are cast to the 16-bit type",
    Cast.FP32: "16-bit arguments are cast to float32",
    Cast.PROMOTE: "arguments are cast to the widest type among them (float16 with bfloat16: float32)",
    Cast.BANNED: "float16 arguments raise NotImplementedError unless `allow_banned=True`; others run in float32",
    Cast.REFUSED: "in place on a 16-bit tensor raises NotImplementedError",
}

_INTRODUCTION: Final = """\
# The cast policy

Made from `mpinit/functions/cast_lists.py` by `python docs/generate.py`; a test compares the two.

What O1 (`patch_torch_functions=True`) does to the arguments of a function, on every device, in float16 and bfloat16.
**native**: the device's own autocast kernels do it. **wrapped**: a thin wrapper stands at the names printed first; the
names in parentheses end in one of them. A device that is not listed here gets every wrapper. float64, integer, bool
and complex tensors are never cast; a call with `out=` and an in-place function are left
alone; `softmax(x, dtype=...)` gives what was asked for, as a norm with a 16-bit `dtype=` does.
`interpolate(mode="area")` is pooling, in no row. Functions in no row run in the type they are given, on every device,
but for those listed at the end: some are made of functions that have a row, and the CPU has no 16-bit kernels for
others.

## Where casts are on

- In the thread that called `initialize`, losses included, and in any thread inside the forward of a model initialised
  at O1. With `cast_scope="model"` only the latter. Until the session ends, or is dropped without `undo`.
- Off inside the forward of a model of another session that has no casts, but for those of your own `torch.autocast`
  block around it. Compiled by torch.compile, in a thread where O1 is live, it is off in such a block, too.
- Off in `backward()`, in `torch.autograd.grad` and in `optimizer.step()` (on again in a closure), in
  `mpinit.disable_casts()`, and in `torch.autocast(..., enabled=False)`.
- `mpinit.disable_casts()` around `model(x)` always wins. A `torch.autocast(..., enabled=False)` block wins too, except
  around a model compiled by torch.compile in a thread or scope whose flag is off anyway: there it changes nothing that
  a compiled graph could see, so use `disable_casts()`.
- Wrappers follow torch's own autocast flag, of the tensor's device: inside your own `torch.autocast` block they cast
  as well, while a session with O1 is live.
- Weight casts are cached within the forward of an initialised model and dropped at its end. Outside of one they are
  not cached. A weight changed in place *within* one forward, between two uses, is the one case the cache does not see.
- The namespaces of torch are one for the process: with several live sessions the stricter `cast_policy` and the
  wider `allow_banned` hold for all. Undoing the last one puts everything back.

## Functions of your own

`register_half_function(module, name)`, `register_float_function`, `register_promote_function`, before or after
`initialize`, and the decorators `half_function`, `float_function`, `promote_function`. A registration beats the rows
below. A half function's body runs with casts on, a float function's with casts off; a builtin function of torch runs
with casts off, so that a registration beats the device's own list too. Weights given to a half function are cast at
each call. Code that did `from module import name` before holds the function without casts; where that can be seen, the
registration warns. The same goes for torch's own functions that are wrapped: `from torch import exp` before
`initialize` is out of reach, and is logged where a module of yours did it.
"""


_UNLISTED: Final = """\
## Functions in no row that do not run in the type they are given

Found by running torch's own database of operators through O1; a test compares. The method of the same name does the
same.

- Made of matrix products, which run in 16 bits: float32 arguments come back in 16 bits, on every device, and
  `out=` is computed in 16 bits or refused. Put `mpinit.disable_casts()` around them where that is not wanted.
{products}
- Made of powers, logarithms and sums, which run in float32: the result is float32, though not every step inside is, on
  every device.
{powers}
- **On the CPU only**, in float32, because it has no 16-bit kernel. Other devices are given the type that the arguments
  have, and torch raises there where they have no such kernel either.
{on_cpu}

Whatever else is made of other functions, in torch (`torch.linalg.polar` of torch 2.15, say) or elsewhere, follows those
that it calls.

The CPU's own autocast list, which a bare `torch.autocast("cpu")` follows, names more. While a session with O1 is live
these kernels are off that list, so that they do on the CPU what they do on CUDA.

{as_given}
"""


def _named(cast: Cast) -> list[str]:
    return [name for name, found in MADE_OF_OTHERS.items() if found is cast]


def _listing(names: Iterable[str], indent: str = "  ") -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(listed, 119, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def page() -> str:
    """The page of the cast policy."""
    torch_rows = {row.name: row for row in TORCH_POLICY}
    stricter = [row for row in APEX_POLICY if torch_rows.get(row.name) is not row]
    parts = [
        _INTRODUCTION,
        '## `cast_policy="torch"` (the default)\n',
        *_sections(TORCH_POLICY),
        '## `cast_policy="apex"`: the rows above, and instead or besides\n',
        *_sections(stricter),
        _UNLISTED.format(
            products=_listing(_named(Cast.LOWER_PRECISION)),
            powers=_listing(_named(Cast.FP32)),
            on_cpu=_listing(sorted(FLOAT32_ON_CPU)),
            as_given=_listing((name for name in RUNS_UNCAST if not name.startswith("_")), indent=""),
        ),
    ]
    return "\n".join(parts)


def _sections(rows: Iterable[CastRow]) -> Iterator[str]:
    rows = list(rows)
    for cast, meaning in _MEANING.items():
        of_this_kind = [row for row in rows if row.cast is cast]
        if of_this_kind:
            yield f"### {cast.value}: {meaning}\n"
            yield _table(of_this_kind)


def _table(rows: Iterable[CastRow]) -> str:
    head = ("function", "names", *_DEVICES)
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        names = " ".join(f"`{name}`" for name in row.wraps)
        reached = " ".join(f"`{name}`" for name in row.reaches)
        where = ["native" if device in row.native else "wrapped" for device in _DEVICES]
        lines.append(_line((row.name, f"{names} ({reached})" if reached else names, *where)))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
