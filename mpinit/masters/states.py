"""What optimizers' states are between steps: as the optimizers made them, or encoded.

An encoded state is float32 inside of a step, a bucket of parameters at a time, for any optimizer that updates each
parameter by itself. In an optimizer's state there is at any time either the float32 tensor or the encoded one, and each
says all there is, so that a step may fail anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from ..distributed.sharding import is_sharded, shard, sharded_as
from ..plan import OptimizerStates, Plan
from ..torch_internals.devices import bucket_bytes_at_most
from ..torch_internals.parameter_watching import TENSOR_GRAD
from .codecs.bfloat16 import BFloat16
from .codecs.blockwise import Blockwise
from .codecs.codec import Codec
from .codecs.encoded import EncodedState, encoded_part, with_numbers
from .parts import Numbers
from .per_parameter import check_steps_per_parameter, kept_states
from .state_buckets import StateBuckets

# Below this state is left in float32, as others do: it is small, and often all there is of a bias or a norm.
SMALLEST: Final = 4096

# Inside, one step an iteration.
Parts = AbstractContextManager[Iterator[None]]
Holders = Callable[[], Sequence[Optimizer]]
# A state, a key in it, and what is or belongs there.
_Entry = tuple[dict[Any, Any], Any, EncodedState]
_Entries = dict[tuple[int, Any], _Entry]


class StateStore(ABC):
    """A session's optimizers' states."""

    @abstractmethod
    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Before anything is changed: whether these optimizers' states can be kept like this.

        Raises:
            ValueError: one's cannot; the message says why and what to do.
        """

    @property
    @abstractmethod
    def steps_in_parts(self) -> bool:
        """Whether :meth:`stepping` may take more than one step."""

    @abstractmethod
    def stepping(self, masters: Parts, optimizer: Optimizer, holders: Holders) -> Parts:
        """Around the optimizer's steps: iterate over the inside, one step an iteration, on float32 state.

        Args:
            masters: the same on float32 masters, not entered yet.
            optimizer: whose step runs inside.
            holders: finds the optimizers that keep state for its parameters: itself, and those that it wraps.
        """

    @abstractmethod
    def put_in_form(self, optimizer: Optimizer, holders: Sequence[Optimizer]) -> None:
        """State that was made or loaded outside of a step becomes what it is between steps."""

    @abstractmethod
    def give_back(self, holders: Sequence[Optimizer]) -> None:
        """State becomes what it would be without a session."""

    @abstractmethod
    def shown(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with every tensor as it would be without a session."""


@final
class PlainStates(StateStore):
    """The store of ``optimizer_state="float32"``: states are what the optimizers make of them."""

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Every optimizer keeps its own."""

    @property
    def steps_in_parts(self) -> bool:
        """False: one step."""
        return False

    def stepping(self, masters: Parts, optimizer: Optimizer, holders: Holders) -> Parts:
        """In the parts in which the masters are put together."""
        return masters

    def put_in_form(self, optimizer: Optimizer, holders: Sequence[Optimizer]) -> None:
        """It has its form."""

    def give_back(self, holders: Sequence[Optimizer]) -> None:
        """It was never taken."""

    def shown(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """As it is."""
        return state_dict


@final
class EncodedStates(StateStore):
    """The store of states kept in codes.

    Args:
        codec: the encoding.
        bucket_bytes: float32 bytes decoded at a time.
    """

    def __init__(self, codec: Codec, bucket_bytes: int) -> None:
        self._codec = codec
        self._bucket_bytes = bucket_bytes
        self._buckets = StateBuckets()

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Their update must look at one parameter at a time.

        Raises:
            ValueError: an optimizer looks across parameters, or nothing is known of it.
        """
        for optimizer in optimizers:
            check_steps_per_parameter(optimizer, f'optimizer_state="{self._codec.name}"', 'optimizer_state="float32"')

    @property
    def steps_in_parts(self) -> bool:
        """True."""
        return True

    @contextmanager
    def stepping(self, masters: Parts, optimizer: Optimizer, holders: Holders) -> Iterator[Iterator[None]]:
        """One iteration for each bucket of the parameters that have a gradient in a part of the masters' step."""
        with masters as parts:
            smaller = self._smaller_parts(parts, optimizer, holders())
            try:
                yield smaller
            finally:
                # After a failed step states are encoded here, and not whenever the generator is collected.
                smaller.close()
                self._buckets.end_step(optimizer)

    def _smaller_parts(
        self, parts: Iterator[None], optimizer: Optimizer, holders: Sequence[Optimizer]
    ) -> Generator[None]:
        for _ in parts:
            yield from self._parts(optimizer, holders)

    def _parts(self, optimizer: Optimizer, holders: Sequence[Optimizer]) -> Generator[None]:
        present = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        with_gradient = [(p, p.grad) for p in present if p.grad is not None]
        buckets = self._bucketed(with_gradient)
        if len(buckets) < 2:
            with self._decoded(optimizer, holders, with_gradient):
                yield None
            return
        numbers = Numbers(optimizer)
        assign = TENSOR_GRAD.__set__
        left = dict(with_gradient)
        try:
            for parameter in left:
                assign(parameter, None)
            for index, bucket in enumerate(buckets):
                if index > 0:
                    numbers.put_back()
                for parameter, gradient in bucket:
                    assign(parameter, gradient)
                with self._decoded(optimizer, holders, bucket):
                    yield None
                for parameter, _ in bucket:
                    left[parameter] = parameter.grad  # an optimizer may have cleared it
                    assign(parameter, None)
        finally:
            for parameter, gradient in left.items():
                assign(parameter, gradient)

    def _bucketed(self, members: list[tuple[torch.Tensor, Any]]) -> list[list[tuple[torch.Tensor, Any]]]:
        """As many together as the bytes of two states in float32 allow for, at least one."""
        buckets: list[list[tuple[torch.Tensor, Any]]] = []
        room = 0
        for member in members:
            size = 8 * shard(member[0]).numel()
            if room < size or not buckets:
                buckets.append([])
                room = bucket_bytes_at_most(member[0].device, self._bucket_bytes)
            buckets[-1].append(member)
            room -= size
        return buckets

    @contextmanager
    def _decoded(
        self, optimizer: Optimizer, holders: Sequence[Optimizer], members: list[tuple[torch.Tensor, Any]]
    ) -> Iterator[None]:
        large = [(parameter, gradient) for parameter, gradient in members if shard(parameter).numel() >= SMALLEST]
        for parameter, gradient in large:
            if _is_sparse(gradient):
                for state in _states_of(holders, parameter):
                    _decode(state)
        parameters = [parameter for parameter, gradient in large if not _is_sparse(gradient)]
        taken = _encoded_in(holders, parameters)
        buckets, numbers = self._buckets.decode(optimizer, list({id(s): s for _, _, s in taken.values()}.values()))
        written: dict[int, torch.Tensor] = {}
        try:
            for state, key, encoded in taken.values():
                state[key] = sharded_as(numbers[id(encoded)], state[key])
            numbers.clear()
            yield
        finally:
            places = self._places(optimizer, holders, parameters, taken, written)
            for bucket in buckets:
                bucket.encode(written)
            written.clear()
            for state, key, encoded in places:
                state[key] = sharded_as(encoded, state[key])

    def _places(
        self,
        optimizer: Optimizer,
        holders: Sequence[Optimizer],
        parameters: Sequence[torch.Tensor],
        taken: _Entries,
        written: dict[int, torch.Tensor],
    ) -> list[_Entry]:
        """Where codes belong; ``written`` gets the numbers of those that are still to be encoded."""
        kept = kept_states(optimizer)
        known: dict[int, EncodedState] = {}
        places: list[_Entry] = []
        for parameter in parameters:
            for state in _states_of(holders, parameter):
                for key, value in state.items():
                    if key in kept or not _is_encodable(value, parameter):
                        continue
                    if id(value) not in known:
                        _, _, encoded = taken.get((id(state), key), (None, None, None))
                        part = shard(value)
                        # Two entries may have been one.
                        if encoded is None or id(encoded) in written or encoded.stride() != part.stride():
                            encoded = EncodedState.of(part, self._codec)
                        else:
                            written[id(encoded)] = part
                        known[id(value)] = encoded
                    places.append((state, key, known[id(value)]))
        return places

    def put_in_form(self, optimizer: Optimizer, holders: Sequence[Optimizer]) -> None:
        """Encode what is float32."""
        self._buckets.forget(optimizer)
        parameters = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        for state, key, encoded in self._places(optimizer, holders, parameters, {}, {}):
            state[key] = sharded_as(encoded, state[key])

    def give_back(self, holders: Sequence[Optimizer]) -> None:
        """Decode everything."""
        for holder in holders:
            self._buckets.forget(holder)
            for state in holder.state.values():
                if isinstance(state, dict):
                    _decode(state)

    def shown(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """With float32 tensors, in dicts of its own."""
        states = {
            key: {name: with_numbers(value) for name, value in state.items()} if isinstance(state, dict) else state
            for key, state in state_dict.get("state", {}).items()
        }
        return state_dict | {"state": states}


def _states_of(holders: Sequence[Optimizer], parameter: torch.Tensor) -> list[dict[Any, Any]]:
    """What is kept for a parameter, each dict once: a wrapper may show the state of what it wraps."""
    found = {}
    for holder in holders:
        state = holder.state.get(parameter)
        if isinstance(state, dict):
            found[id(state)] = state
    return list(found.values())


def _encoded_in(holders: Sequence[Optimizer], parameters: Sequence[torch.Tensor]) -> _Entries:
    return {
        (id(state), key): (state, key, encoded)
        for parameter in parameters
        for state in _states_of(holders, parameter)
        for key, value in state.items()
        if (encoded := encoded_part(value)) is not None
    }


def _decode(state: dict[Any, Any]) -> None:
    """Put numbers in the places of codes; what was one tensor under two names is one again."""
    decoded: dict[int, torch.Tensor] = {}
    for key, value in state.items():
        encoded = encoded_part(value)
        if encoded is not None:
            if id(encoded) not in decoded:
                decoded[id(encoded)] = with_numbers(value)
            state[key] = decoded[id(encoded)]


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


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


def states_for(plan: Plan) -> StateStore:
    """The store that a plan asks for."""
    if plan.optimizer_states is OptimizerStates.FLOAT32:
        return PlainStates()
    codec = Blockwise() if plan.optimizer_states is OptimizerStates.INT8 else BFloat16()
    return EncodedStates(codec, plan.split_bucket_bytes)
