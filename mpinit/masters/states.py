"""Encoded states of optimizers: codes between steps, float32 while the optimizer's own code runs.

In an optimizer's state there is at any time either the float32 tensor or the encoded one, and each says all there is,
so that a step may fail anywhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..distributed.sharding import is_sharded, shard, sharded_as
from .codecs.codec import Codec
from .codecs.encoded import EncodedState, encoded_part, with_numbers

# Below this state is left in float32, as others do: it is small, and often all there is of a bias or a norm.
SMALLEST: Final = 4096

_States = Sequence[dict[Any, Any]]


class EncodedStates:
    """A session's way to keep its optimizers' states in codes."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def decode(self, states: _States) -> dict[tuple[int, Any], EncodedState]:
        """:func:`decode` for several; the codes, whose memory :meth:`encode` uses again, by (id of the state, key)."""
        return {(id(state), key): encoded for state in states for key, encoded in decode(state).items()}

    def encode(
        self,
        members: Sequence[tuple[torch.Tensor, dict[Any, Any]]],
        kept: frozenset[str],
        taken: dict[tuple[int, Any], EncodedState],
    ) -> None:
        """Put codes in the places of numbers, unless a parameter's gradient is sparse: most of its state is not used.

        ``kept`` names states that stay float32.
        """
        made: dict[int, EncodedState] = {}
        used: set[int] = set()
        for parameter, state in members:
            if parameter.grad is not None and parameter.grad.is_sparse:
                continue
            for key, value in state.items():
                if key in kept or not _is_encodable(value, parameter):
                    continue
                encoded = made.get(id(value))
                if encoded is None:
                    part, encoded = shard(value), taken.get((id(state), key))
                    # Two entries may have been one.
                    if encoded is None or id(encoded) in used or encoded.stride() != part.stride():
                        encoded = EncodedState.of(part, self.codec)
                    else:
                        encoded.write(part)
                    used.add(id(encoded))
                    made[id(value)] = encoded
                state[key] = sharded_as(encoded, value)


def decode(state: dict[Any, Any]) -> dict[Any, EncodedState]:
    """Put numbers in the places of codes, which are returned; what was one tensor under two names is one again."""
    taken = {key: encoded for key, value in state.items() if (encoded := encoded_part(value)) is not None}
    numbers: dict[int, Any] = {}
    for key, encoded in taken.items():
        if id(encoded) not in numbers:
            numbers[id(encoded)] = with_numbers(state[key])
        state[key] = numbers[id(encoded)]
    return taken


def shown(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with float32 tensors in the places of codes, in dicts of its own."""
    states = {
        key: {name: with_numbers(value) for name, value in state.items()} if isinstance(state, dict) else state
        for key, state in state_dict.get("state", {}).items()
    }
    return state_dict | {"state": states}


def states_of(holders: Sequence[Optimizer], parameter: torch.Tensor) -> list[dict[Any, Any]]:
    """What is kept for a parameter, each dict once: a wrapper may show the state of what it wraps."""
    found = {}
    for holder in holders:
        state = holder.state.get(parameter)
        if isinstance(state, dict):
            found[id(state)] = state
    return list(found.values())


def _is_encodable(value: Any, parameter: torch.Tensor) -> bool:
    part = getattr(value, "_local_tensor", value) if is_sharded(parameter) else value
    return (
        type(part) is torch.Tensor
        and part.dtype is torch.float32
        and value.shape == parameter.shape
        and part.dim() > 0
        and part.numel() >= SMALLEST
        and part.layout is torch.strided
    )
