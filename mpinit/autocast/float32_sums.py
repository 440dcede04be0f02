"""Functions that add in float32 while a model has 16-bit weights, whoever calls them."""

import functools
from collections.abc import Callable
from typing import Any, Final

from ..torch_internals.sums_on_cpu import in_float32, lookup
from .cast_lists import BANNED_ROW, LOSS_ROWS

Function = Callable[..., Any]


def _loss(original: Function) -> Function:
    """Wrap a loss: it computes in float32 and returns float32.

    In float16 the mean of ``cross_entropy`` over 65,520 rows is 0, and so are its gradients; that of ``mse_loss`` with
    weights is nan.
    """

    def float32_loss(*args: Any, **kwargs: Any) -> Any:
        if any(map(callable, kwargs.values())):  # a distance of the user's, whose weights may be 16-bit
            return original(*args, **kwargs)
        return in_float32(original, args, kwargs)

    return float32_loss


# A dotted name -> what wraps the function there. Losses are wrapped where their Python bodies end, as for O1.
FLOAT32_SUMS: Final[dict[str, Callable[[Function], Function]]] = {
    **{name: _loss for row in (*LOSS_ROWS, BANNED_ROW) for name in row.wraps},
    "torch.ctc_loss": _loss,
    "torch.embedding": functools.partial(lookup, 4),
    "torch.embedding_bag": functools.partial(lookup, 5),
}
