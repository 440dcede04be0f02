"""Encoded states of optimizers: codes between steps, float32 while the optimizer's own code runs.

At any time an optimizer's state has either the float32 tensor or the encoded one, and each is complete, so a step may
fail anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.running import without_gradients
from ..distributed.sharding import is_sharded, shard, sharded_as
from .arithmetic import EAGER, Arithmetic
from .codecs.codec import Codec, Tensors, tensor_rows
from .codecs.encoded import EncodedState, Together, encoded_part, with_numbers

# Smaller states stay float32, as in bitsandbytes: biases and norms, which cost little memory.
SMALLEST: Final = 4096
# How many numbers of several states are decoded or encoded together, in float32 memory that all of them share.
_TOGETHER: Final = 1 << 22

_States = Sequence[dict[Any, Any]]


@dataclass(frozen=True)
class Decoded:
    """What was decoded.

    Attributes:
        codes: the codes, by (id of the dict of states, key).
        groups: what was decoded together; the numbers of a group are encoded where they are.
    """

    codes: dict[tuple[int, Any], EncodedState] = field(default_factory=dict)
    groups: Sequence[Together] = ()


class EncodedStates:
    """The encoding of a session's optimizer states.

    Attributes:
        codec: the encoding.
        run: runs the arithmetic of steps.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.run = Arithmetic()
        self._tensors: dict[tuple[tuple[int, ...], torch.device], Tensors] = {}

    def decode(self, states: _States) -> Decoded:
        """Decode several states; :meth:`encode` reuses the memory of the codes."""
        return decode(states, self.run)

    @without_gradients
    def encode(self, members: Sequence[tuple[torch.Tensor, dict[Any, Any]]], decoded: Decoded) -> None:
        """Replace float32 tensors by codes; not those of sparse gradients, of which a step uses little."""
        # The codes of each float32 tensor, which may be several entries, by its id.
        made: dict[int, EncodedState] = {}
        # The float32 numbers of codes, by their ids.
        numbers: dict[int, torch.Tensor] = {}
        new: list[EncodedState] = []
        entries: list[tuple[dict[Any, Any], Any, Any]] = []
        for parameter, state in members:
            if parameter.grad is not None and parameter.grad.is_sparse:
                continue
            for key, value in state.items():
                if not _is_encodable(value, parameter):
                    continue
                if id(value) not in made:
                    part, encoded = shard(value), decoded.codes.get((id(state), key))
                    # Two entries may have been one.
                    if encoded is None or id(encoded) in numbers or encoded.stride() != part.stride():
                        encoded = EncodedState.like(part, self.codec)
                        new.append(encoded)
                    made[id(value)], numbers[id(encoded)] = encoded, part
                entries.append((state, key, value))
        for group in (*decoded.groups, *map(Together, _divided(new))):
            for own, part in zip(group.states, group.parts, strict=True):
                value = numbers.get(id(own), part)
                if value.data_ptr() != part.data_ptr():
                    part.copy_(value)
            kind = group.rows, group.values.device
            if kind not in self._tensors:
                self._tensors[kind] = tensor_rows(*kind)
            group.encode(self._tensors[kind], self.run)
        for state, key, value in entries:
            state[key] = sharded_as(made[id(value)], value)


def decode(states: _States, run: Arithmetic = EAGER) -> Decoded:
    """Replace codes by float32 tensors, and return the codes; one tensor under two names stays one."""
    codes = {
        (id(state), key): encoded
        for state in states
        for key, value in state.items()
        if (encoded := encoded_part(value)) is not None
    }
    distinct = list({id(each): each for each in codes.values()}.values())
    groups = [Together(each).decode(run) for each in _divided(distinct)]
    numbers = {id(own): part for group in groups for own, part in zip(group.states, group.parts, strict=True)}
    wrapped: dict[int, Any] = {}
    for state in states:
        for key, value in state.items():
            if (id(state), key) in codes:
                known = id(codes[id(state), key])
                if known not in wrapped:
                    wrapped[known] = sharded_as(numbers[known], value)
                state[key] = wrapped[known]
    return Decoded(codes, groups)


def _divided(states: Sequence[EncodedState]) -> list[list[EncodedState]]:
    """Divide states into groups that are decoded or encoded together: of one codec and device, limited by size."""
    groups: list[list[EncodedState]] = []
    room: dict[tuple[str, torch.device], int] = {}
    last: dict[tuple[str, torch.device], list[EncodedState]] = {}
    for state in states:
        kind, size = (state.codec.name, state.device), state.numel()
        if size > room.get(kind, -1):
            groups.append([])
            last[kind], room[kind] = groups[-1], _TOGETHER
        last[kind].append(state)
        room[kind] -= size
    return groups


def decoded_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
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
