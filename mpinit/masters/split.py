"""Split masters: the float32 master is the bfloat16 weight plus a 16-bit remainder, exact to the bit.

The step materialises float32 masters a bucket at a time. Between steps the masters in the optimizer's groups are
placeholders of the right shape and dtype that hold no memory. A weight is its master rounded half away from zero,
where full masters round half to even.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from ..basics.gradients import are_dense_in
from ..distributed.sharding import shard
from ..torch_internals.columns import grads_of, set_grads
from .buckets import Bucket, Buffers, grouped, large_first
from .pairs import Pair
from .parts import Numbers
from .per_parameter import check_steps_its_groups, check_steps_per_parameter, writes_gradients
from .split_pair import SplitPair
from .store import Gradients, MasterStore
from .two_copies import TwoCopies


@final
class SplitMasters(MasterStore):
    """The store of ``master_weights="split"``: 2 bytes a parameter beside the weight instead of 4.

    Gradients stay in bfloat16, on the weights and, the same tensors, on the masters.

    Args:
        bucket_bytes: float32 bytes (masters and their gradients) materialised at a time.
        scales: whether losses are scaled.
    """

    def __init__(self, bucket_bytes: int, scales: bool = True) -> None:
        super().__init__(scales)
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[TwoCopies, tuple[list[Pair], list[Bucket]]] = {}
        self._buffers = Buffers()
        self._gradient_writers: WeakSet[Optimizer] = WeakSet()

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Their update must look at one parameter at a time.

        Raises:
            ValueError: an optimizer looks across parameters, or nothing is known of it.
        """
        for optimizer in optimizers:
            check_steps_its_groups(optimizer)
            check_steps_per_parameter(optimizer, 'master_weights="split"', "master_weights=True")
            if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
                raise ValueError(
                    f"{type(optimizer).__name__} has train() and eval(), which write other numbers into its parameters "
                    'between steps, where masters of master_weights="split" hold none: use master_weights=True'
                )
            if writes_gradients(optimizer):
                self._gradient_writers.add(optimizer)

    def make(self, weight: nn.Parameter, dtype: torch.dtype) -> Pair | None:
        """A pair whose master holds no memory.

        Raises:
            ValueError: the weight is a view with gaps.
        """
        if not is_lower_precision(dtype):
            return None
        part = shard(weight)
        if torch.empty_like(part, device="meta").stride() != part.stride():
            raise ValueError(
                f'master_weights="split" needs weights that fill their memory, and one of shape {tuple(weight.shape)} '
                "is a view with gaps; make it contiguous first, or use master_weights=True"
            )
        return SplitPair(weight)

    def finish(self, pairs: Sequence[Pair]) -> None:
        """Take apart what joined after the casts; show the weights' gradients on the masters."""
        for pair in pairs:
            weight, master = pair.model_param, pair.master_param
            if not hasattr(pair, "remainder"):
                gradient, weight.grad = weight.grad, None
                pair.cast(torch.bfloat16)
                weight.grad = None if gradient is None else gradient.to(torch.bfloat16)
            master.grad = weight.grad
        # Who steps with whom may be another question now.
        self._buckets.clear()

    def as_held(self, gradients: Gradients) -> Gradients:
        """In the weights' type, sparse ones coalesced."""
        if are_dense_in(gradients, LOWER_PRECISION):
            return gradients
        held = [None if g is None else (g if is_lower_precision(g.dtype) else g.to(torch.bfloat16)) for g in gradients]
        return [g.coalesce() if g is not None and g.is_sparse else g for g in held]

    def are_plain(self, copies: TwoCopies, gradients: Gradients, device: torch.device) -> bool:
        """Only where there are none: they are 16-bit."""
        return not gradients

    @property
    def steps_in_parts(self) -> bool:
        """True."""
        return True

    def adds_up_natively(self) -> bool:
        """True: the gradient is the weight's own."""
        return True

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, copies: TwoCopies, rounds_itself: bool = False
    ) -> Iterator[Iterator[None]]:
        """One iteration for the parameters without masters, one for each bucket of masters."""
        parts = self._parts(optimizer, copies)
        try:
            with self.watcher:
                yield parts
        finally:
            # After a failed step the bucket at hand is written back here and not whenever it is collected.
            parts.close()
            copies.note_all()

    def _parts(self, optimizer: Optimizer, copies: TwoCopies) -> Generator[None]:
        others = [p for group in optimizer.param_groups for p in group["params"] if self.pairs.of(p) is None]
        plain = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
        buckets = [
            bucket
            for bucket in self._buckets_of(copies)
            if any(pair.model_param.grad is not None for pair in bucket.pairs)
        ]
        # A step sees the gradients of its own part alone.
        one_part = len(buckets) == 1 and not plain
        try:
            if not one_part:
                set_grads(copies.masters, [None] * len(copies.masters))  # whose weights keep their gradients
            numbers = None if one_part else Numbers(optimizer)
            if plain or not buckets:
                yield None
            plain = [(parameter, parameter.grad) for parameter, _ in plain]  # an optimizer may have cleared some
            for parameter, _ in plain:
                parameter.grad = None
            for index, part in enumerate(self._buffers.materialised(buckets, optimizer in self._gradient_writers)):
                if numbers is not None and (plain or index > 0):
                    numbers.put_back()
                yield part
        finally:
            for parameter, gradient in plain:
                parameter.grad = gradient
            gradients = grads_of(copies.weights)
            if optimizer in self._gradient_writers:
                # Others than before: from here on they are what both sides hold.
                copies.put_gradients(gradients, weights_have_them=True)
            else:
                set_grads(copies.masters, gradients)

    def _buckets_of(self, copies: TwoCopies) -> list[Bucket]:
        known = self._buckets.get(copies)
        if known is not None and known[0] is copies.pairs:
            return known[1]
        split = [pair for pair in copies.pairs if isinstance(pair, SplitPair)]
        buckets = []
        for pairs in map(large_first, grouped(split, self._bucket_bytes)):
            bucket = pairs[0].bucket
            buckets.append(bucket if bucket is not None and bucket.pairs == pairs else Bucket(pairs))
        self._buckets[copies] = copies.pairs, buckets
        return buckets

    def step_with_closure(
        self, optimizer: Optimizer, copies: TwoCopies, step: Callable[[Callable[[], Any] | None], Any], closure: Any
    ) -> Any:
        """Evaluate once, then step bucket by bucket: what per-parameter optimizers do with a closure."""
        with torch.enable_grad():
            loss = closure()
        copies.look_at_weights()
        with self.stepping(optimizer, copies) as parts:
            for _ in parts:
                step(None)
        return loss
