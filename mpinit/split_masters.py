"""Split masters: the float32 master is the bfloat16 weight plus a 16-bit remainder, exact to the bit.

A float32 number's upper half, rounded half away from zero, is a bfloat16 number; what is missing fits a signed 16-bit
integer, namely the lower half read as one. The step materialises float32 masters a bucket at a time. Between steps
the masters in the optimizer's groups are placeholders of the right shape and dtype that hold no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .gradients import as_float32
from .masters import FullMasters, Pair

_PER_PARAMETER: Final = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_LOW, _HIGH = 0, 1  # the halves' places in a little-endian float32, the only order torch runs on


def split_(values: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write float32 ``values`` as a bfloat16 weight and an int16 remainder.

    Args:
        values: float32, one-dimensional, contiguous.
        weight: bfloat16, the same length, written to.
        remainder: int16, the same length, written to.

    Example:
        >>> values = torch.tensor([1.0 / 3.0])
        >>> weight, rest = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
        >>> split_(values, weight, rest); joined = torch.empty(1); join_(weight, rest, joined)
        >>> bool(joined == values)
        True
    """
    halves = values.view(torch.int16).view(-1, 2)
    remainder.copy_(halves[:, _LOW])
    # The arithmetic shift is -1 where the remainder is negative: there the weight was rounded up.
    torch.sub(halves[:, _HIGH], remainder >> 15, out=weight.view(torch.int16))


def join_(weight: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
    """Write into float32 ``values`` what :func:`split_` took apart."""
    halves = values.view(torch.int16).view(-1, 2)
    halves[:, _LOW] = remainder
    halves[:, _HIGH] = weight.view(torch.int16)
    halves[:, _HIGH] += remainder >> 15


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension, whatever the order of its own."""
    return tensor.as_strided((tensor.numel(),), (1,))


class SplitMasters(FullMasters):
    """Masters kept as 16-bit remainders beside bfloat16 weights: 2 bytes a parameter instead of 4.

    Gradients stay on the weights, in bfloat16 unless the weight's ``grad_dtype`` says otherwise. An external write to
    a weight sets the master to exactly what was written, for the whole tensor.

    Args:
        optimizer: whose update must look at one parameter at a time.
        bucket_bytes: float32 bytes (masters and their gradients) materialised at a time.

    Raises:
        ValueError: the optimizer looks across parameters, or nothing is known of it.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int) -> None:
        super().__init__()
        _check_optimizer(optimizer)
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._remainders: dict[int, torch.Tensor] = {}

    # -- pairs --------------------------------------------------------------------------------------------------

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(_placeholder(weight), requires_grad=True)

    def set_gradient_dtype(self, weight: nn.Parameter) -> None:
        """Leave gradients in the weight's own type: that is what makes them small."""

    def check_gradient_dtype(self) -> None:
        """Nothing to follow: ranks exchange gradients in the weights' own type anyway."""

    def cast_weight(self, pair: Pair, dtype: torch.dtype) -> None:
        """Split the incoming float32 weight; a 16-bit one has nothing to remember."""
        incoming = pair.model_param.detach()
        remainder = torch.zeros(incoming.numel(), dtype=torch.int16, device=incoming.device)
        if incoming.dtype != torch.bfloat16:
            weight = torch.empty_like(incoming, dtype=torch.bfloat16)
            split_(_flat(incoming.float()), _flat(weight), remainder)
            gradient, pair.model_param.grad = pair.model_param.grad, None
            pair.model_param.data = weight
            pair.model_param.grad = None if gradient is None else gradient.to(dtype)
        self._remainders[id(pair.model_param)] = remainder

    def _settle(self, pair: Pair) -> None:
        if id(pair.model_param) not in self._remainders:
            self.cast_weight(pair, torch.bfloat16)
        super()._settle(pair)

    def release(self, pair: Pair) -> None:
        """Forget a pair and its remainder."""
        super().release(pair)
        self._remainders.pop(id(pair.model_param), None)

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_holder(self, pair: Pair) -> nn.Parameter:
        """The weight: its 16-bit gradient becomes float32 only inside the step."""
        return pair.model_param

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take the weights' gradients off them."""
        taken = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        return taken

    def put_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Put gradients on the weights."""
        for pair, gradient in zip(self.pairs, gradients, strict=False):
            self.put_gradient(pair, gradient)

    def put_gradient(self, pair: Pair, gradient: torch.Tensor | None) -> None:
        """Put a gradient on the weight."""
        if pair.model_param.grad is not gradient:
            pair.model_param.grad = gradient

    def collect_gradients(self) -> list[torch.Tensor | None]:
        """The weights' gradients, as autograd left them."""
        fresh = [pair.model_param.grad for pair in self.pairs]
        return [g.coalesce() if g is not None and g.is_sparse else g for g in fresh]

    def gradient_for(self, pair: Pair, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient from before the weight was cast waits in the weight's own dtype."""
        return gradient

    @property
    def accumulates_natively(self) -> bool:
        """Always: the gradient is the weight's own."""
        return True

    def unlinked(self) -> Iterator[Pair]:
        """None ever: the step reads the weights' own gradients."""
        return iter(())

    def relink(self) -> None:
        """Nothing to link."""

    def follow_cleared(self, set_to_none: bool) -> None:
        """Clear the weights' gradients, which the optimizer does not know."""
        for pair in self.pairs:
            gradient = pair.model_param.grad
            if gradient is not None and not set_to_none:
                pair.model_param.grad = torch.zeros_like(gradient)
            else:
                pair.model_param.grad = None

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[Iterator[None]]:
        """Around the optimizer's steps: one iteration for the plain parameters, one for each bucket of masters."""
        try:
            yield self._parts()
        finally:
            self.note_versions()

    def _parts(self) -> Iterator[None]:
        ours = {id(pair.master_param) for pair in self.pairs}
        groups = self._optimizer.param_groups
        plain = [p for group in groups for p in group["params"] if id(p) not in ours and p.grad is not None]
        buckets = self._buckets()
        if plain or not buckets:
            yield None
        hidden = [parameter.grad for parameter in plain]
        for parameter in plain:
            parameter.grad = None
        try:
            yield from self._step_buckets(buckets)
        finally:
            for parameter, gradient in zip(plain, hidden, strict=True):
                parameter.grad = gradient

    def _step_buckets(self, buckets: list[list[Pair]]) -> Iterator[None]:
        buffers: dict[torch.device, torch.Tensor] = {}
        for bucket in buckets:
            device = bucket[0].model_param.device
            needed = 2 * sum(pair.model_param.numel() for pair in bucket)
            if device not in buffers or buffers[device].numel() < needed:
                buffers[device] = torch.empty(needed, dtype=torch.float32, device=device)
            self._materialise(bucket, buffers[device])
            try:
                yield None
            finally:
                self._write_back(bucket)

    def _buckets(self) -> list[list[Pair]]:
        """Pairs with a gradient, on one device each, as many at a time as the bucket holds; at least one."""
        buckets: list[list[Pair]] = []
        room: dict[torch.device, int] = {}
        current: dict[torch.device, list[Pair]] = {}
        for pair in self.pairs:
            weight = pair.model_param
            if weight.grad is None:
                continue
            size = 8 * weight.numel()
            if weight.device not in current or room[weight.device] < size:
                current[weight.device] = []
                buckets.append(current[weight.device])
                room[weight.device] = self._bucket_bytes
            current[weight.device].append(pair)
            room[weight.device] -= size
        return buckets

    @torch.no_grad()
    def _materialise(self, bucket: list[Pair], buffer: torch.Tensor) -> None:
        start = 0
        for pair in bucket:
            weight, size = pair.model_param.detach(), pair.model_param.numel()
            master = buffer[start : start + size]
            join_(_flat(weight), self._remainders[id(pair.model_param)], master)
            pair.master_param.data = master.as_strided(weight.size(), weight.stride())
            pair.master_param.grad = self._gradient_in(buffer[start + size : start + 2 * size], pair.model_param)
            start += 2 * size

    @staticmethod
    def _gradient_in(buffer: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        gradient = weight.grad
        assert gradient is not None
        if gradient.dtype == torch.float32 or gradient.is_sparse:
            return as_float32(gradient)
        return buffer.as_strided(weight.size(), weight.stride()).copy_(gradient)

    @torch.no_grad()
    def _write_back(self, bucket: list[Pair]) -> None:
        for pair in bucket:
            weight, master = pair.model_param, pair.master_param
            split_(_flat(master.detach()), _flat(weight.detach()), self._remainders[id(weight)])
            master.grad = None
            master.data = _placeholder(weight)

    def step_with_closure(self, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate once, then step bucket by bucket: what per-parameter optimizers do with a closure."""
        with torch.enable_grad():
            loss = closure()
        with self.stepping() as parts:
            for _ in parts:
                step(*args, **kwargs)
        return loss

    def copy_back(self) -> None:
        """Nothing to copy: the weight is the upper half of its master."""
        self.note_versions()

    @torch.no_grad()
    def adopt(self, pair: Pair) -> None:
        """After an external write the weight is the master: an old remainder would belong to another number."""
        self._remainders[id(pair.model_param)].zero_()

    def values(self, pair: Pair) -> torch.Tensor:
        """The master's float32 values, in a new tensor."""
        weight = pair.model_param.detach()
        remainder = self._remainders.get(id(pair.model_param))
        if remainder is None:
            return weight.float()
        values = torch.empty_like(weight, dtype=torch.float32)
        join_(_flat(weight), remainder, _flat(values))
        return values

    @torch.no_grad()
    def load(self, pair: Pair, values: torch.Tensor) -> None:
        """Set weight and remainder from float32 values of the same shape."""
        weight = pair.model_param
        dense = torch.empty_like(weight, dtype=torch.float32).copy_(values)
        split_(_flat(dense), _flat(weight.detach()), self._remainders[id(weight)])
        self.note_version(pair)


def _placeholder(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)


def _check_optimizer(optimizer: Optimizer) -> None:
    known = (getattr(torch.optim, name, None) for name in _PER_PARAMETER)
    if any(cls is not None and isinstance(optimizer, cls) and type(optimizer).step is cls.step for cls in known):
        return
    if getattr(optimizer, "steps_per_parameter", False):
        return
    raise ValueError(
        f'master_weights="split" steps a bucket of parameters at a time, and {type(optimizer).__name__} is not known '
        f"to update each parameter by itself; known are {', '.join(_PER_PARAMETER)} of torch.optim. Use "
        "master_weights=True, or set optimizer.steps_per_parameter = True if it keeps no state across parameters"
    )
