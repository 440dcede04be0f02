"""Encoded states of optimizers: codes between steps, float32 while the optimizer's own code runs.

At any time an optimizer's state has either the float32 tensor or the encoded one, and each is complete, so a step may
fail anywhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..distributed.sharding import is_sharded, shard, sharded_as
from .codecs.codec import Codec
from .codecs.encoded import EncodedState, encoded_part, with_numbers

# Smaller states stay float32, as in bitsandbytes: biases and norms, which cost little memory.
SMALLEST: Final = 4096

_States = Sequence[dict[Any, Any]]


class EncodedStates:
    """The encoding of a session's optimizer states."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def decode(self, states: _States) -> dict[tuple[int, Any], EncodedState]:
        """Decode several states; return codes by (id of the state, key): :meth:`encode` reuses their memory."""
        return {(id(state), key): encoded for state in states for key, encoded in decode(state).items()}

    def encode(
        self,
        members: Sequence[tuple[torch.Tensor, dict[Any, Any]]],
        kept: frozenset[str],
        codes: dict[tuple[int, Any], EncodedState],
    ) -> None:
        """Replace float32 tensors by codes, unless a parameter's gradient is sparse: a step uses little of its state.

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
                    part, encoded = shard(value), codes.get((id(state), key))
                    # Two entries may have been one.
                    if encoded is None or id(encoded) in used or encoded.stride() != part.stride():
                        encoded = EncodedState.of(part, self.codec)
                    else:
                        encoded.write(part)
                    used.add(id(encoded))
                    made[id(value)] = encoded
                state[key] = sharded_as(encoded, value)


def decode(state: dict[Any, Any]) -> dict[Any, EncodedState]:
    """Replace codes by float32 tensors, and return the codes; one tensor under two names stays one."""
    codes = {key: encoded for key, value in state.items() if (encoded := encoded_part(value)) is not None}
    numbers: dict[int, Any] = {}
    for key, encoded in codes.items():
        if id(encoded) not in numbers:
            numbers[id(encoded)] = with_numbers(state[key])
        state[key] = numbers[id(encoded)]
    return codes


def shown(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with float32 tensors instead of codes, in new dicts."""
    states = {
        key: {name: with_numbers(value) for name, value in state.items()} if isinstance(state, dict) else state
        for key, state in state_dict.get("state", {}).items()
    }
    return state_dict | {"state": states}


def states_of(holders: Sequence[Optimizer], parameter: torch.Tensor) -> list[dict[Any, Any]]:
    """List a parameter's states, each dict once: a wrapper may share the state of the optimizer that it wraps."""
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
