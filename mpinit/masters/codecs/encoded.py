"""A tensor of an optimizer's state as it is between steps: codes that read as float32 numbers."""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...basics.patching import InterruptsDelayed
from ...distributed.sharding import sharded_as
from ..arithmetic import EAGER, Arithmetic
from .codec import BLOCK, Codec, Codes, Tensors

# The number of the meaning of pickled codes.
_FORMAT: Final = 2
_NO_MEMORY: Final = (
    "{} shares a tensor's memory, and an encoded state of an optimizer has codes there: pass a float32 copy "
    "(state['exp_avg'].clone())"
)


class _WithoutMemory(torch.Tensor):
    """A tensor that has no memory of its own. Methods that read memory, and not through torch, read a copy of it."""

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers as an array that refuses writes, because they would be lost."""
        array = self.clone().numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None and dtype != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def tolist(self) -> Any:
        """Return the numbers as a nested list."""
        return self.clone().tolist()

    def __format__(self, format_spec: str) -> str:
        return format(self.clone(), format_spec)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(_NO_MEMORY.format("DLPack"))

    def share_memory_(self) -> Any:
        """Refuse to put the memory at the disposal of other processes: there is none."""
        raise RuntimeError(_NO_MEMORY.format("share_memory_()"))


@final
class EncodedState(_WithoutMemory):
    """Float32 numbers in memory as codes.

    Every torch operation runs on the decoded float32 numbers. An in-place operation encodes the result. A view of it is
    a :class:`ReadOnlyView`.

    Attributes:
        codec: the encoding.
        codes: the codes, in a list that all detached tensors of the same numbers have.
    """

    codec: Codec
    codes: list[torch.Tensor]

    @staticmethod
    def __new__(cls, codec: Codec, codes: list[torch.Tensor], like: torch.Tensor) -> "EncodedState":
        make: Callable[..., EncodedState] = torch.Tensor._make_wrapper_subclass
        self = make(cls, like.size(), strides=like.stride(), dtype=torch.float32, device=codes[0].device)
        self.codec, self.codes = codec, codes
        return self

    def __init__(self, codec: Codec, codes: list[torch.Tensor], like: torch.Tensor) -> None:
        """Do nothing: ``__new__`` has set the attributes."""

    @classmethod
    def like(cls, values: torch.Tensor, codec: Codec) -> "EncodedState":
        """Allocate the codes of a tensor of the shape and device of ``values``, and of its strides if it is dense."""
        dense = torch.empty_like(values, device="meta")
        return cls(codec, list(codec.empty(-(-values.numel() // BLOCK), values.device)), dense)

    @classmethod
    def of(cls, values: torch.Tensor, codec: Codec) -> "EncodedState":
        """Encode float32 ``values``."""
        encoded = cls.like(values, codec)
        encoded.write(values)
        return encoded

    @property
    def code_bytes(self) -> int:
        return sum(code.nbytes for code in self.codes)

    @property
    def data(self) -> torch.Tensor:
        """A tensor with the same codes; setting ``data`` encodes the new numbers."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.device != self.device:
            raise ValueError(
                f"data of an encoded state of shape {tuple(self.shape)} on {self.device} was set to a tensor of shape "
                f"{tuple(values.shape)} on {values.device}, which its codes do not fit: put that in the state instead "
                "(optimizer.state[weight]['exp_avg'] = values)"
            )
        self.write(with_numbers(values))

    def decoded(self) -> torch.Tensor:
        return Together([self]).decode().parts[0]

    def write(self, values: torch.Tensor) -> None:
        """Encode other numbers of the same shape; a Ctrl-C comes before or after."""
        alone = Together([self])
        alone.parts[0].copy_(values.detach())
        with InterruptsDelayed():
            alone.encode()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on the numbers; what it wrote to is encoded again."""
        decoded: dict[int, torch.Tensor] = {}

        def numbers_of(state: EncodedState) -> torch.Tensor:
            return decoded.setdefault(id(state), state.decoded())

        arguments = (args, kwargs or {})
        plain_args, plain_kwargs = tree_map_only(EncodedState, numbers_of, arguments)
        written = [state for state in _written_to(func, *arguments) if isinstance(state, EncodedState)]
        if func is torch.ops.aten.detach.default:
            return EncodedState(args[0].codec, args[0].codes, args[0])
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable and any(returned.alias_info is not None for returned in func._schema.returns):
            return tree_map_only(torch.Tensor, ReadOnlyView, result)
        for state in written:
            state.write(decoded[id(state)])
        own = {id(decoded[id(state)]): state for state in written}
        return tree_map_only(torch.Tensor, lambda tensor: own.get(id(tensor), tensor), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EncodedState({self.codec.name}, {self.decoded()!r})"

    # Copies are plain float32 tensors: the steps of an optimizer that was copied or unpickled are torch's own. They
    # would encode a state again after each operation, and round it each time.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.decoded()
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduce to the codes, the shape and the strides, from which a float32 tensor is unpickled."""
        # Copied, because the codes may be views of a bucket's.
        codes = tuple(code.clone() for code in self.codes)
        return _rebuilt, (self.codec, codes, tuple(self.size()), self.stride(), _FORMAT)


@final
class Together:
    """States of one codec and device that are decoded or encoded together, and float32 memory for their numbers.

    Attributes:
        states: the states.
        rows: the number of rows of each.
        values: float32 rows for all of them; what no state has is 0.
        parts: each state's numbers, of its shape and strides, in these rows.
    """

    def __init__(self, states: Sequence[EncodedState]) -> None:
        self.states = states
        self.rows = tuple(state.codes[0].size(0) for state in states)
        self._codes = _in_one(states, self.rows)
        self.values = torch.empty(sum(self.rows), BLOCK, dtype=torch.float32, device=states[0].device)
        flats = [part.view(-1) for part in self.values.split_with_sizes(self.rows)]
        ends = [part[state.numel() :] for part, state in zip(flats, states, strict=True) if state.numel() % BLOCK]
        if ends:
            torch._foreach_zero_(ends)
        self.parts = [part.as_strided(s.size(), s.stride()) for part, s in zip(flats, states, strict=True)]

    def decode(self, run: Arithmetic = EAGER) -> "Together":
        """Write the states' numbers into :attr:`values`, and return this object."""
        self.states[0].codec.decode_(self._codes, self.values, run)
        return self

    def encode(self, tensors: Tensors | None = None, run: Arithmetic = EAGER) -> None:
        """Write the codes of the numbers in :attr:`values`.

        Args:
            tensors: the result of :func:`.codec.tensor_rows`; None for a single state. Default None.
            run: calls functions of tensors. Default: as torch's operations.
        """
        self.states[0].codec.encode_(self.values, self._codes, tensors, run)


def _in_one(states: Sequence[EncodedState], rows: Sequence[int]) -> Codes:
    """Return the codes of several states in as many tensors as one has, of which theirs are parts from now on."""
    if len(states) == 1:
        return tuple(states[0].codes)
    whole = []
    for kind, parts in enumerate(zip(*(state.codes for state in states), strict=True)):
        first = parts[0]
        memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
        follow = not first.is_meta
        for part in parts:
            follow = follow and part.data_ptr() == end and part.untyped_storage().data_ptr() == memory
            end += part.nbytes
        if follow:
            together = first.as_strided((sum(rows), first.size(1)), first.stride())
        else:
            together = torch.cat(parts)
            for state, own in zip(states, together.split_with_sizes(rows), strict=True):
                state.codes[kind] = own
        whole.append(together)
    return tuple(whole)


def encoded_part(value: Any) -> EncodedState | None:
    """Return a state's codes, those of the local shard where it is sharded; None where it is not encoded."""
    part = getattr(value, "_local_tensor", value)
    return part if isinstance(part, EncodedState) else None


def with_numbers(value: Any) -> Any:
    """Return a state in float32, sharded as before; the state itself where it is not encoded."""
    encoded = encoded_part(value)
    return value if encoded is None else sharded_as(encoded.decoded(), value)


def _rebuilt(
    codec: Codec, codes: Codes, size: tuple[int, ...], strides: tuple[int, ...], version: int = 1
) -> torch.Tensor:
    if version != _FORMAT and codec.name == "int8":
        raise ValueError(
            f"these optimizer states were pickled as int8 codes of format {version}, and this mpinit reads format "
            f"{_FORMAT}: save optimizer.state_dict() with the mpinit that pickled them, which is float32 and loads here"
        )
    return EncodedState(codec, list(codes), torch.empty_strided(size, strides, device="meta")).decoded()


@final
class ReadOnlyView(_WithoutMemory):
    """A read-only view of decoded numbers. A write raises, because it would not reach the codes."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "ReadOnlyView":
        make: Callable[..., ReadOnlyView] = torch.Tensor._make_wrapper_subclass
        size, strides = numbers.size(), numbers.stride()
        self = make(cls, size, strides=strides, dtype=numbers.dtype, device=numbers.device)
        self.numbers = numbers
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(leaf, ReadOnlyView) for leaf in _written_to(func, *arguments)):
            raise RuntimeError(
                "a view of a copy of an encoded state of an optimizer was written to, which would change nothing: "
                "copy the whole (values = state['exp_avg'] + 0), change it, and copy it back "
                "(state['exp_avg'].copy_(values))"
            )
        plain_args, plain_kwargs = tree_map_only(ReadOnlyView, lambda part: part.numbers, arguments)
        result = func(*plain_args, **plain_kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return tree_map_only(torch.Tensor, ReadOnlyView, result)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.numbers)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.numbers.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            arguments = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, (EncodedState, ReadOnlyView))]
    return found
