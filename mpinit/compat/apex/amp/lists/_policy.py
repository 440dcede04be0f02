"""The lists as apex lays them out, read from mpinit's own cast policy."""

from __future__ import annotations

from .....functions.cast_lists import APEX_POLICY, Cast


def names_under(prefix: str, cast: Cast) -> list[str]:
    """The functions of one kind that are reached under ``prefix``.

    Args:
        prefix: "torch", "torch.Tensor" or "torch.nn.functional".
        cast: what happens to their arguments.

    Returns:
        Bare names, in the policy's order.

    Example:
        >>> "softmax" in names_under("torch.nn.functional", Cast.FP32)
        True
    """
    names = (name.rpartition(".") for row in APEX_POLICY if row.cast is cast for name in row.names)
    return list(dict.fromkeys(name for owner, _, name in names if owner == prefix))
