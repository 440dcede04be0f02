"""The arithmetic of split masters and encoded states: torch's operations, or one compiled function where users ask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

Function = Callable[..., None]
_PAIRS: Final = {2: torch.int32, 4: torch.int64}

_NO_COMPILER: Final = (
    "mpinit.compile_steps could not compile for {} ({}: {}): it needs what torch.compile needs, a C++ compiler for a "
    "CPU and Triton for a GPU. Without compile_steps the steps have the same results"
)
_OTHER_BITS: Final = (
    "mpinit.compile_steps compiled {!r} for {}, and its numbers differ from those of torch's operations, so it is not "
    "used. Leave compile_steps out: the steps have the right results without it"
)


@dataclass(frozen=True)
class Sample:
    """A function that writes into some of its arguments, for a compiler.

    Attributes:
        function: the function, of torch's operations.
        arguments: those of a call, for a comparison of results.
        written: the indices of those that it writes to, and that are compared.
        pairs: a function of the same results to compile in its place: on arguments in which two neighbours are one
            whole number of twice as many bits.
    """

    function: Function
    arguments: Sequence[torch.Tensor]
    written: Sequence[int]
    pairs: Function | None = None


@final
class Arithmetic:
    """Runs functions that write into some of their arguments; compiled on the devices that were asked for.

    Example:
        >>> def double(values): values.mul_(2)
        >>> run, values = Arithmetic(), torch.ones(2)
        >>> run(double, values); values
        tensor([2., 2.])
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Function, torch.device], Function] = {}

    def __call__(self, function: Function, *arguments: torch.Tensor) -> None:
        if self._compiled:
            function = self._compiled.get((function, arguments[0].device), function)
        function(*arguments)

    def is_compiled_on(self, device: torch.device) -> bool:
        """Return whether functions are compiled for a device."""
        return any(known == device for _, known in self._compiled)

    def add(self, compiled: dict[tuple[Function, torch.device], Function]) -> None:
        """Use compiled functions, results of :func:`compiled_for`, from now on."""
        self._compiled |= compiled


# What is never compiled.
EAGER: Final = Arithmetic()


def compiled_for(device: torch.device, samples: Sequence[Sample]) -> dict[tuple[Function, torch.device], Function]:
    """Compile functions for a device, and compare their results on samples, bit by bit.

    Raises:
        RuntimeError: there is no compiler, or results differ.
    """
    made: dict[tuple[Function, torch.device], Function] = {}
    for sample in samples:
        function = sample.function
        eager, own = ([each.to(device, copy=True) for each in sample.arguments] for _ in range(2))
        with torch.no_grad():
            function(*eager)
            try:
                compiled = _compiled(function, own) if sample.pairs is None else _on_pairs(sample.pairs, function, own)
                compiled(*own)
            except Exception as error:
                said = str(error).strip().splitlines() or [""]
                raise RuntimeError(_NO_COMPILER.format(device, type(error).__name__, said[0])) from error
        if not all(_have_same_bits(eager[index], own[index]) for index in sample.written):
            raise RuntimeError(_OTHER_BITS.format(function.__name__, device))
        made[function, device] = compiled
    return made


def _compiled(function: Function, arguments: Sequence[torch.Tensor]) -> Function:
    """Compile a function for arguments of these dtypes and dimensions, of any sizes that are equal where these are.

    What ``torch.compile`` returns looks at its arguments, and at the state of the process, for 100 us in each call, a
    third of what a bucket of split masters takes. So inductor's own function is called here.
    """
    from torch._inductor import compile as compile_graph  # here, because importing it takes seconds
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, tracing_mode="symbolic")(*arguments)
    placeholders = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    # Without this option inductor leaves out roundings to 16 bits, and on a GPU fuses products with sums.
    compiled: Function = compile_graph(traced, placeholders, options={"emulate_precision_casts": True})

    def run(*tensors: torch.Tensor) -> None:
        # Code for sizes as symbols is right from 2 rows on, and on a GPU up to indices of 32 bits. No tensor is larger
        # than the first.
        if tensors[0].size(0) < 2 or tensors[0].numel() >= 2**31:
            function(*tensors)
        else:
            compiled(*tensors)

    return run


def _on_pairs(pairs: Function, function: Function, arguments: Sequence[torch.Tensor]) -> Function:
    compiled = _compiled(pairs, _as_pairs(arguments))

    def run(*tensors: torch.Tensor) -> None:
        # Weights of odd sizes are last in their bucket, and few.
        if any(each.numel() % 2 or each.storage_offset() % 2 for each in tensors):
            function(*tensors)
        else:
            compiled(*_as_pairs(tensors))

    return run


def _as_pairs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.view(_PAIRS[each.element_size()]) for each in tensors]


def _have_same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit; any nan equals any other."""
    if expected.dtype.is_floating_point:
        unlike = expected.isnan() != found.isnan()
        bits = torch.int16 if expected.element_size() == 2 else torch.int32
        return not bool(unlike.any() or ((expected.view(bits) != found.view(bits)) & ~expected.isnan()).any())
    return torch.equal(expected, found)
