"""Encoded states of optimizers: codes between steps, float32 while the optimizer's own code runs.

At any time an optimizer's state has either the float32 tensor or the encoded one, and each is complete, so a step may
fail anywhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..basics.running import is_faster_in_chunks
from ..distributed.sharding import is_sharded, shard, sharded_as
from .arithmetic import EAGER, Arithmetic
from .codecs.codec import Codec, tensor_rows
from .codecs.encoded import EncodedState, decode_together, encoded_part, rows_of, with_numbers, write_together

# Smaller states stay float32, as in bitsandbytes: biases and norms, which cost little memory.
SMALLEST: Final = 4096
# How many numbers of several states are decoded or encoded together, which needs some copies of them.
_TOGETHER: Final = 1 << 22

_States = Sequence[dict[Any, Any]]


class EncodedStates:
    """The encoding of a session's optimizer states.

    Attributes:
        codec: the encoding.
        run: runs the arithmetic of steps.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.run = Arithmetic()
        self._tensors: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def decode(self, states: _States) -> dict[tuple[int, Any], EncodedState]:
        """Decode several states; return codes by (id of the state, key): :meth:`encode` reuses their memory."""
        return decode(states, self.run)

    def encode(
        self,
        members: Sequence[tuple[torch.Tensor, dict[Any, Any]]],
        codes: dict[tuple[int, Any], EncodedState],
    ) -> None:
        """Replace float32 tensors by codes; not those of sparse gradients, of which a step uses little."""
        made: dict[int, EncodedState] = {}
        used: set[int] = set()
        # States that are encoded together, by id, and the entries that they replace afterwards.
        together: dict[int, tuple[EncodedState, torch.Tensor]] = {}
        entries: list[tuple[dict[Any, Any], Any, Any]] = []
        for parameter, state in members:
            if parameter.grad is not None and parameter.grad.is_sparse:
                continue
            for key, value in state.items():
                if not _is_encodable(value, parameter):
                    continue
                encoded = made.get(id(value))
                if encoded is None:
                    part, encoded = shard(value), codes.get((id(state), key))
                    # Two entries may have been one.
                    if encoded is None or id(encoded) in used or encoded.stride() != part.stride():
                        encoded = EncodedState.of(part, self.codec, self.run)
                    elif not is_faster_in_chunks(encoded.device):
                        together[id(encoded)] = encoded, part
                    else:
                        encoded.write(part, self.run)
                    used.add(id(encoded))
                    made[id(value)] = encoded
                if id(encoded) in together:
                    entries.append((state, key, value))
                else:
                    state[key] = sharded_as(encoded, value)
        self._write(list(together.values()))
        for state, key, value in entries:
            state[key] = sharded_as(made[id(value)], value)

    def _write(self, written: Sequence[tuple[EncodedState, torch.Tensor]]) -> None:
        for indices in _groups([state for state, _ in written]):
            states, values = [written[index][0] for index in indices], [written[index][1] for index in indices]
            if len(states) == 1:
                states[0].write(values[0], self.run)
                continue
            kind = rows_of(states), states[0].device
            if kind not in self._tensors:
                self._tensors[kind] = tensor_rows(*kind)
            write_together(states, values, self._tensors[kind], self.run)


def decode(states: _States, run: Arithmetic = EAGER) -> dict[tuple[int, Any], EncodedState]:
    """Replace codes by float32 tensors, and return the codes; one tensor under two names stays one."""
    codes = {
        (id(state), key): encoded
        for state in states
        for key, value in state.items()
        if (encoded := encoded_part(value)) is not None
    }
    distinct = list({id(each): each for each in codes.values()}.values())
    numbers: dict[int, torch.Tensor] = {}
    for indices in _groups(distinct):
        group = [distinct[index] for index in indices]
        values = decode_together(group, run) if len(group) > 1 else [each.decoded(run) for each in group]
        numbers.update(zip(map(id, group), values, strict=True))
    wrapped: dict[int, Any] = {}
    for state in states:
        for key, value in state.items():
            if (id(state), key) in codes:
                known = id(codes[id(state), key])
                if known not in wrapped:
                    wrapped[known] = sharded_as(numbers[known], value)
                state[key] = wrapped[known]
    return codes


def _groups(states: Sequence[EncodedState]) -> list[list[int]]:
    """Return the indices of the states of each group that is decoded or encoded together, all by the first's codec."""
    groups: list[list[int]] = []
    last: dict[torch.device, tuple[list[int], int]] = {}
    for index, state in enumerate(states):
        size = state.numel()
        group, count = last.get(state.device, ([], _TOGETHER))
        # Others are alone: on a CPU, where operations start fast, of another codec, empty, or without numbers.
        if is_faster_in_chunks(state.device) or state.codec.name != states[0].codec.name or not size or state.is_meta:
            groups.append([index])
        elif count + size > _TOGETHER:
            groups.append([index])
            last[state.device] = groups[-1], size
        else:
            group.append(index)
            last[state.device] = group, count + size
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
