"""The page ``reference/cast-policy.md``, from the cast lists, and what is in no list, as data measured with torch 2.13.

The data is complete for ``torch.testing``'s database of operators; ``tests/autocast/test_operators.py`` compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from mpinit.autocast.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow
from mpinit.autocast.cpu_autocast_list import RUNS_UNCAST

# The matrix products inside run in 16 bits: float32 arguments come back in 16 bits.
_PRODUCTS: Final = (
    "torch.cov",
    "torch.corrcoef",
    "torch.matrix_power",
    "torch.linalg.matrix_power",
    "torch.linalg.pinv",
)

# Powers, logarithms and sums inside run in float32, and so the result is, though not every step is.
_POWERS: Final = ("torch.nn.functional.local_response_norm", "torch.nn.functional.linear_cross_entropy")

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
    *("torch.trace", "torch.triangular_solve"),
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
    Cast.BANNED: "float16 arguments raise NotImplementedError; others run in float32",
    Cast.REFUSED: "in place on a 16-bit tensor raises NotImplementedError",
}

_INTRODUCTION: Final = """\
# The cast policy

Made from `mpinit/autocast/cast_lists.py` by `python docs/generate.py`; a test compares the two.

The tables list how O1 (`patch_torch_functions=True`) casts the arguments of each function. They apply to every device,
in float16 and bfloat16.

- **native**: the device's own autocast casts them.
- **wrapped**: mpinit replaces the names listed first by wrappers. The names in parentheses call one of them. On a
  device that is not listed, every function is wrapped.
- float64, integer, bool and complex tensors are never cast.
- Calls with `out=`, in-place functions, and calls with a 16-bit `dtype=`, such as `softmax(x, dtype=torch.bfloat16)`,
  are not cast.
- `interpolate(mode="area")` is pooling, and in no row.
- A function in no row runs in the dtype of its arguments. The exceptions are listed at the end: functions that call
  functions with a row, and functions without a 16-bit kernel on the CPU.

## Where casts are on

- Casts are on in the thread that called `initialize`, also for losses, and in any thread inside the forward of a model
  that was initialised at O1. With `patch_torch_functions="model"` they are on only inside such forwards. They are on
  until the session ends, or is garbage-collected without `undo`.
- Casts are off inside the forward of another session's model without casts. Casts of your own `torch.autocast` block
  around it stay on there, unless the model is compiled and O1 is live in the thread.
- Casts are off in `backward()`, in `torch.autograd.grad` and in `optimizer.step()`, but on in its closure. They are off
  in `mpinit.disable_casts()` and in `torch.autocast(..., enabled=False)`.
- `mpinit.disable_casts()` around `model(x)` always switches casts off. So does `torch.autocast(..., enabled=False)`,
  with one exception: around a compiled model, in a thread where casts are off already, a compiled graph cannot see it.
  Use `disable_casts()` there.
- The first forward of a training inside `torch.autocast(..., enabled=False)` warns that it computes in float32. Many
  loops open that block themselves, if their own mixed precision is off (`autocast(enabled=args.amp)`).
- Wrappers cast while torch's autocast flag of the tensor's device is on. So they also cast inside your own
  `torch.autocast` block, while a session with O1 is live.
- Weight casts are cached within the forward of an initialised model and dropped at its end. Outside of a forward they
  are not cached. A step of an initialised optimizer inside a forward or an entry point drops the cache. If a forward
  changes a weight in place itself, the cache has the old value.
- All sessions share torch's namespaces. With several live sessions the stricter policy applies to all. The undo of the
  last session removes all wrappers.

## Functions of your own

Use `register_half_function(module, name)`, `register_float_function` or `register_promote_function`, before or after
`initialize`, or the decorators `half_function`, `float_function` and `promote_function`.

- A registration overrides the rows below.
- A half function's body runs with casts on, a float function's with casts off. A builtin function of torch runs with
  casts off, so that a registration overrides the device's own list too.
- Weights that are passed to a half function are cast at each call.
- In-place writes of a function to its arguments, tensors, lists and dicts, reach the caller's own. New entries have the
  dtype that the function computed.
- Code that ran `from module import name` before the registration calls the function without casts. The registration
  warns if it finds such a name.
- The same applies to torch's own functions: code that ran `from torch import exp` before `initialize` calls `exp`
  without casts. If a module of yours has such a name, `initialize` logs it.
"""


_UNLISTED: Final = """\
## Functions in no row that run in another dtype than their arguments'

The list was made by running torch's own database of operators at O1; a test compares it. Methods of the same name
behave the same way.

- Functions that call matrix products, which run in 16 bits. With float32 arguments the result is 16-bit, on every
  device; `out=` is computed in 16 bits or refused. To avoid that, call them inside `mpinit.disable_casts()`.
{products}
- Functions that call powers, logarithms and sums, which run in float32. The result is float32, on every device, but
  some steps inside run in 16 bits.
{powers}
- Functions that run in float32 **on the CPU only**, because it has no 16-bit kernel. Other devices run them in the
  arguments' dtype, and torch raises if they have no such kernel either.
{on_cpu}

Any other function follows the functions that it calls, in torch (such as `torch.linalg.polar` of torch 2.15) or
elsewhere.

The CPU's own autocast list, which a plain `torch.autocast("cpu")` uses, has more functions. While a session with O1 is
live these are removed from it, so that the CPU behaves like CUDA.

{as_given}
"""


def _named(cast: Cast) -> list[str]:
    return [name for name, found in MADE_OF_OTHERS.items() if found is cast]


def _listing(names: Iterable[str], indent: str = "  ") -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(listed, 119, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def page() -> str:
    """Return the page of the cast policy."""
    torch_rows = {row.name: row for row in TORCH_POLICY}
    stricter = [row for row in APEX_POLICY if torch_rows.get(row.name) is not row]
    parts = [
        _INTRODUCTION,
        "## The policy of `mpinit.initialize`\n",
        *_sections(TORCH_POLICY),
        "## The policy of apex.amp under its old name: the rows above, and instead or besides\n",
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
