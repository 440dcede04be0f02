"""The gradients of one optimizer's parameters: scaled, unscaled, widened and checked.

Autograd makes gradients in the weights' dtype. The weights have no ``grad_dtype``, so that a float32 gradient stays
float32 when a 16-bit one is added. At the end of every ``scale_loss`` block, or else at the step, 16-bit gradients of
weights with full masters are replaced by float32 ones, a bucket at a time. Inside a DistributedDataParallel, whose
buckets have the weights' dtype, they are rounded to it again before another pass.

Whether a step is skipped is decided as in ``torch.amp``. Gradients are checked for inf and nan once, where they are
unscaled. The next step uses the result. A step without a result checks the gradients that it is about to use.
"""

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import nn

from ..basics import products
from ..basics.bulk import are_alike, grads_of, have_grads, set_grads
from ..basics.dtypes import LOWER_PRECISION
from ..basics.running import without_gradients
from ..distributed.sharding import dense_views

# The bytes of float32 gradients that are made at a time. The 16-bit ones are freed before the next are made.
_BUCKET_BYTES: Final = 16 * 2**20
_DTYPE: Final = attrgetter("dtype")


class Gradients:
    """The gradients of some parameters, each in ``weight.grad``.

    Attributes:
        weights: the parameters.
        is_scaled: whether a block is open in which they are multiplied by a loss scale.
        is_open: whether a block is open for them, at any scale.
        were_empty: whether there were none at the beginning of the last block that scaled a loss.
        found_inf: whether gradients contained inf or nan in one of the blocks since the last step, as a 0-dimensional
            tensor, above 0 if so; None without a check.
        widens: whether 16-bit gradients of weights with masters become float32 at the end of a block. Those of split
            masters, which are to save memory, do in the step.
    """

    def __init__(self, widens: bool) -> None:
        self.weights: Sequence[nn.Parameter] = []
        self.is_scaled = self.is_open = self.were_empty = False
        self.found_inf: torch.Tensor | None = None
        self.widens = widens
        self._plain: Sequence[nn.Parameter] = []
        # The weights with masters, in buckets.
        self._buckets: list[Bucket] = []

    def set_weights(
        self, weights: Sequence[nn.Parameter], mastered: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]
    ) -> None:
        """Set the parameters, those of them with masters, and their full masters (split ones: the weights again)."""
        ids = set(map(id, mastered))
        self.weights = weights
        self._plain = [weight for weight in weights if id(weight) not in ids]
        self._buckets = in_buckets(mastered, masters)

    def present(self) -> list[torch.Tensor]:
        """Return the gradients that are not None."""
        return _present(grads_of(self.weights))

    # -- around a block -------------------------------------------------------------------------------------------

    @without_gradients
    def begin(self, scale: torch.Tensor | None, done: set[int] | None, in_ddp: bool) -> torch.Tensor | None:
        """Begin a block: multiply gradients by its scale, so that the gradients of the scaled loss can be added.

        Args:
            scale: the scale, 0-dimensional; None: 1.
            done: ids of gradients that were multiplied already in this pass, as those of another optimizer; None: there
                is no other.
            in_ddp: whether a DistributedDataParallel is around the model.

        Returns:
            Whether they contained inf or nan before the block, 0-dimensional; None without gradients or a scale.
        """
        self.is_open, self.is_scaled = True, scale is not None
        if scale is not None:
            self.were_empty = not have_grads(self.weights)
            if self.were_empty:
                self.consume()
                return None
        try:
            if not in_ddp:
                self.widen()
            found = None if scale is None else _multiply(self.present(), scale, done)
            if in_ddp:
                self._round(done)
        except BaseException:
            self.drop()
            raise
        return found

    @without_gradients
    def end(self, inverse: torch.Tensor | None, done: set[int] | None, checks: bool) -> torch.Tensor | None:
        """End a block: widen gradients, multiply them by the reciprocal of its scale, and check them, in one pass.

        Args:
            inverse: the reciprocal, 0-dimensional; None: 1, and nothing is multiplied or checked.
            done: as in :meth:`begin`.
            checks: whether steps are skipped after inf or nan.

        Returns:
            Whether they contain inf or nan, 0-dimensional; None without gradients or a check.
        """
        factor = inverse if self.is_scaled else None
        found = None
        try:
            scaled = [] if factor is None else self._plain if self.widens else self.weights
            others = _present(grads_of(scaled))
            for bucket in self._buckets if self.widens else ():
                wide, are_new = widened(bucket)
                if factor is not None and are_new and not others and done is None and _are_on(wide, factor.device):
                    found = any_of(found, _unscale(wide, factor))  # they are plain, as they were made here
                elif factor is not None:
                    found, others = any_of(found, _multiply([*wide, *others], factor, done)), []
            if factor is not None:
                found = any_of(found, _multiply(others, factor, done))
        except BaseException:
            self.drop()
            raise
        self.is_scaled = self.is_open = False
        if not checks or found is None:
            return None
        self.found_inf = any_of(self.found_inf, found)
        return found

    def drop(self) -> None:
        """Clear all gradients, because some of them may be multiplied by a scale and others not."""
        set_grads(list(self.weights), [None] * len(self.weights))
        self.is_scaled = self.is_open = False
        self.consume()

    def _round(self, done: set[int] | None) -> None:
        """Round float32 gradients to the weights' dtype, in which DistributedDataParallel reduces them."""
        for weight in [weight for weights, _ in self._buckets for weight in weights]:
            gradient = weight.grad
            if gradient is not None and gradient.dtype is not weight.dtype and weight.grad_dtype is None:
                rounded = gradient.to(weight.dtype)
                if done is not None:
                    done.discard(id(gradient))  # another tensor may get the id
                    done.add(id(rounded))
                weight.grad = rounded

    # -- in float32 -----------------------------------------------------------------------------------------------

    @without_gradients
    def widen(self) -> None:
        """Replace 16-bit gradients of weights with masters by float32 ones.

        Of split masters views stay, as those of a flat buffer of the user's: the step reads them as they are.
        """
        for bucket in self._buckets:
            widened(bucket, with_views=self.widens)

    # -- at a step ------------------------------------------------------------------------------------------------

    @without_gradients
    def check(self) -> torch.Tensor | None:
        """Return whether the present gradients contain inf or nan, 0-dimensional; None without gradients."""
        present = self.present()
        return check(present) if present else None

    def consume(self) -> None:
        """Forget the result of the last check, because a step has used it."""
        self.found_inf = None


# -- lists of gradients ------------------------------------------------------------------------------------------------


Bucket = tuple[list[nn.Parameter], list[nn.Parameter]]


def in_buckets(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Divide weights and their masters into buckets by the bytes of their float32 gradients, in order."""
    buckets: list[Bucket] = []
    room = 0
    for weight, master in zip(weights, masters, strict=True):
        if room <= 0:
            buckets.append(([], []))
            room = _BUCKET_BYTES
        buckets[-1][0].append(weight)
        buckets[-1][1].append(master)
        room -= 4 * weight.numel()
    return buckets


def widened(bucket: Bucket, with_views: bool = True) -> tuple[list[torch.Tensor], bool]:
    """Replace the 16-bit gradients of some weights by float32 ones, in one operation.

    Args:
        bucket: the weights, and parameters of the same shapes and strides, faster to copy if they are float32.
        with_views: whether also gradients that are views of other tensors. Default True.

    Returns:
        The gradients that are present, and whether all were made here.
    """
    weights, likes = bucket
    gradients = grads_of(weights)
    narrow = _present(gradients)
    dtypes = set(map(_DTYPE, narrow))
    if dtypes.isdisjoint(LOWER_PRECISION):
        return narrow, False
    others: list[torch.Tensor] = []
    if len(dtypes) > 1 or len(narrow) < len(weights) or not with_views:
        found = [
            each
            for each in zip(weights, likes, gradients, strict=True)
            if (gradient := each[2]) is not None
            and gradient.dtype in LOWER_PRECISION
            and (with_views or not gradient._is_view())
        ]
        known = {id(gradient) for *_, gradient in found}
        others = [gradient for gradient in narrow if id(gradient) not in known]
        weights, likes = [weight for weight, *_ in found], [like for _, like, _ in found]
        narrow = [gradient for *_, gradient in found if gradient is not None]
        if not narrow:
            return others, False
    try:
        wide = _in_float32(narrow, likes)
        set_grads(weights, list(wide))
    except RuntimeError:  # sparse or sharded ones; masters on another device; swap_tensors has exchanged a grad_dtype
        wide = [gradient.to(torch.float32) for gradient in narrow]
        for weight, gradient in zip(weights, wide, strict=True):
            weight.grad, weight.grad_dtype = None, None
            weight.grad = gradient
        return [*wide, *others], False
    return ([*wide, *others], False) if others else (wide, True)


def _in_float32(gradients: list[torch.Tensor], likes: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    if set(map(type, gradients)) != {torch.Tensor}:
        raise RuntimeError("gradients of a class of their own are cast one by one")
    if likes[0].dtype is torch.float32:
        wide = list(map(torch.empty_like, likes))
    else:
        wide = [torch.empty_like(like, dtype=torch.float32) for like in likes]
    torch._foreach_copy_(wide, gradients)
    return wide


def _present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def any_of(*checks: torch.Tensor | None) -> torch.Tensor | None:
    """Return whether any of several checks found inf or nan; None without a check."""
    made = [check for check in checks if check is not None]
    return functools.reduce(lambda one, other: torch.maximum(one, other.to(one.device)), made) if made else None


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor, done: set[int] | None) -> torch.Tensor | None:
    """Multiply gradients, each once in a pass, and return whether they contained inf or nan before."""
    if done is None:
        return multiply_and_check_(gradients, factor)
    fresh = [gradient for gradient in gradients if id(gradient) not in done]
    known = [gradient for gradient in gradients if id(gradient) in done]
    found = any_of(multiply_and_check_(fresh, factor), check(known) if known else None)
    done.update(map(id, fresh))
    return found


def _are_on(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    return tensors[0].device == device and len(set(map(torch.Tensor.get_device, tensors))) == 1


def _unscale(gradients: list[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    found_inf = torch.zeros((), dtype=torch.float32, device=factor.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, factor)
    return found_inf


def multiply_and_check_(gradients: list[torch.Tensor], factor: torch.Tensor) -> torch.Tensor | None:
    """Multiply gradients in place by a 0-dimensional float32 factor, and find inf and nan, in one pass over memory.

    Returns:
        A 0-dimensional float32 tensor: 1 if a number was inf or nan before, otherwise 0. Of sharded gradients only the
        parts of this process are checked. None without gradients.
    """
    if not gradients:
        return None
    first = gradients[0]
    if first.dtype is torch.float32 and first.device == factor.device and are_alike(gradients):
        return _unscale(gradients, factor)
    return any_of(*products.multiply_and_check_(dense_views(gradients), factor))


def check(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Do the same as :func:`multiply_and_check_` without multiplying."""
    dense = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in gradients]
    return any_of(*products.check(dense_views(dense)))


def are_zero(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers are 0; of shards only those of this process. This is a device sync."""
    return all(torch.stack(norms).amax().item() == 0 for norms in products.largest(dense_views(gradients)))
