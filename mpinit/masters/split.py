"""Split masters: the float32 master is the bfloat16 weight plus a 16-bit remainder, exact to the bit.

The step materialises float32 masters a bucket at a time. Between steps the masters in the optimizer's groups are
placeholders of the right shape and dtype that hold no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.sharding import is_sharded, set_data
from ..torch_internals.data_watching import Watcher
from .buckets import Bucket, Buffers, grouped, placeholder
from .float_split import flat, join, split_
from .full import FullMasters, Pair

_PER_PARAMETER: Final = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


class SplitMasters(FullMasters):
    """Masters kept as 16-bit remainders beside bfloat16 weights: 2 bytes a parameter instead of 4.

    Gradients stay on the weights, in bfloat16 unless the weight's ``grad_dtype`` says otherwise. A write to a
    weight from outside sets the master to exactly what was written: for the whole tensor, or for the elements that
    changed where the write went through ``.data``.

    Args:
        optimizer: whose update must look at one parameter at a time.
        bucket_bytes: float32 bytes (masters and their gradients) materialised at a time.

    Raises:
        ValueError: the optimizer looks across parameters, or nothing is known of it.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int) -> None:
        super().__init__(Watcher(keeps_images=True))
        _check_optimizer(optimizer)
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._remainders: dict[int, torch.Tensor] = {}
        self._buckets: list[Bucket] | None = None
        self._buffers = Buffers()

    # -- pairs --------------------------------------------------------------------------------------------------

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        self._buckets = None
        if is_sharded(weight):
            raise ValueError(
                'master_weights="split" cannot take the parameters of a model apart that fully_shard has sharded: use '
                "master_weights=True"
            )
        if torch.empty_like(weight, device="meta").stride() != weight.stride():
            raise ValueError(
                f'master_weights="split" needs weights that fill their memory, and one of shape {tuple(weight.shape)} '
                "is a view with gaps; make it contiguous first, or use master_weights=True"
            )
        return nn.Parameter(placeholder(weight), requires_grad=True)

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
            split_(flat(incoming.float()), flat(weight), remainder)
            gradient, pair.model_param.grad = pair.model_param.grad, None
            set_data(pair.model_param, weight)
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
        self._buckets = None

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_holder(self, pair: Pair) -> nn.Parameter:
        """The weight: its 16-bit gradient becomes float32 only inside the step."""
        return pair.model_param

    def held_gradients(self) -> list[torch.Tensor | None]:
        """The weights' gradients."""
        return [weight.grad for weight in self._weights]

    def put_gradients(self, gradients: list[torch.Tensor | None], weights_have_them: bool = False) -> None:
        """Put gradients on the weights."""
        if not weights_have_them:
            for pair, gradient in zip(self.pairs, gradients, strict=True):
                self.put_gradient(pair, gradient)

    def put_gradient(self, pair: Pair, gradient: torch.Tensor | None) -> None:
        """Put a gradient on the weight."""
        if pair.model_param.grad is not gradient:
            pair.model_param.grad = gradient

    def are_usual(self, gradients: list[torch.Tensor | None], device: torch.device) -> bool:
        """Never: they are 16-bit."""
        return False

    def ready(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients as autograd left them, sparse ones coalesced."""
        return [g.coalesce() if g is not None and g.is_sparse else g for g in gradients]

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

    def relink(self) -> list[torch.Tensor | None]:
        """Nothing to link."""
        return self.held_gradients()

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
    def stepping(self, rounds_itself: bool = False) -> Iterator[Iterator[None]]:
        """Around the optimizer's steps: one iteration for the plain parameters, one for each bucket of masters."""
        parts = self._parts()
        try:
            yield parts
        finally:
            # After a failed step the bucket at hand is written back here and not whenever it is collected.
            parts.close()
            self.note_versions()

    def _parts(self) -> Generator[None]:
        ours = {id(pair.master_param) for pair in self.pairs}
        groups = self._optimizer.param_groups
        plain = [p for group in groups for p in group["params"] if id(p) not in ours and p.grad is not None]
        buckets = [
            bucket
            for bucket in self._filled_buckets()
            if any(pair.model_param.grad is not None for pair in bucket.pairs)
        ]
        if plain or not buckets:
            yield None
        hidden = [parameter.grad for parameter in plain]
        for parameter in plain:
            parameter.grad = None
        try:
            yield from self._buffers.materialised(buckets)
        finally:
            for parameter, gradient in zip(plain, hidden, strict=True):
                parameter.grad = gradient

    def _filled_buckets(self) -> list[Bucket]:
        """The buckets: pairs in order, as many at a time as the bytes allow for, at least one."""
        if self._buckets is None:
            self._buckets = []
            for pairs in grouped(self.pairs, self._bucket_bytes):
                bucket = Bucket(pairs, [self._remainders[id(pair.model_param)] for pair in pairs])
                for pair, remainder in zip(pairs, bucket.remainder.split_with_sizes(bucket.sizes), strict=True):
                    self._remainders[id(pair.model_param)] = remainder
                self._buckets.append(bucket)
        return self._buckets

    def step_with_closure(self, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate once, then step bucket by bucket: what per-parameter optimizers do with a closure."""
        with torch.enable_grad():
            loss = closure()
        with self.stepping() as parts:
            for _ in parts:
                step(*args, **kwargs)
        return loss

    def follow_masters(self) -> None:
        """Nothing to follow: between steps there is no master to write to."""

    def copy_back(self) -> None:
        """Nothing to copy: the weight is the upper half of its master."""
        self.note_versions()

    @torch.no_grad()
    def adopt(self, pair: Pair) -> None:
        """Where something else was written the weight is the master: an old remainder belongs to another number.

        What is known to be as it was keeps its remainder: reading ``.data`` changes nothing.
        """
        weight, remainder = pair.model_param.detach(), self._remainders[id(pair.model_param)]
        image = self._watcher.image_of(pair.model_param, self._versions[pair.index])
        if image is None or image.stride() != weight.stride():
            remainder.zero_()
        else:
            remainder.masked_fill_(flat(image).view(torch.int16) != flat(weight).view(torch.int16), 0)

    def values(self, pair: Pair) -> torch.Tensor:
        """The master's float32 values, in a new tensor."""
        weight = pair.model_param.detach()
        remainder = self._remainders.get(id(pair.model_param))
        if remainder is None:
            return weight.float()
        return join(flat(weight), remainder).as_strided(weight.size(), weight.stride())

    @torch.no_grad()
    def load(self, pair: Pair, values: torch.Tensor) -> None:
        """Set weight and remainder from float32 values of the same shape."""
        weight = pair.model_param
        dense = torch.empty_like(weight, dtype=torch.float32).copy_(values)
        split_(flat(dense), flat(weight.detach()), self._remainders[id(weight)])
        self.note_version(pair)


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
