"""The gradients of one optimizer's parameters: scaled, unscaled, widened and checked.

Autograd makes gradients in the weights' dtype. The weights have no ``grad_dtype``, so that a float32 gradient stays
float32 when a 16-bit one is added. At the end of a ``scale_loss`` block that scales, at the beginning of the next one,
or else at the step, 16-bit gradients of weights with masters are replaced by float32 ones, a bucket at a time. Inside a
DistributedDataParallel, whose buckets have the weights' dtype, they are rounded to it again before another pass.

Whether a step is skipped is decided as in ``torch.amp``. Gradients are checked for inf and nan once, where they are
unscaled. The next step uses the result. A step without a result checks the gradients that it is about to use.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

from ..basics import products
from ..basics.bulk import are_alike, are_plain, grads_of, set_grads
from ..basics.dtypes import LOWER_PRECISION
from ..basics.running import without_gradients
from ..distributed.sharding import dense_views

# The bytes of float32 gradients that are made at a time. The 16-bit ones are freed before the next are made.
_BUCKET_BYTES: Final = 16 * 2**20


class Gradients:
    """The gradients of some parameters, each in ``weight.grad``.

    Attributes:
        weights: the parameters; always the same list.
        is_scaled: whether a block is open in which they are multiplied by a loss scale.
        found_inf: whether gradients contained inf or nan in one of the blocks since the last step, as a 0-dimensional
            tensor, above 0 if so; None without a check.
        is_fresh: whether such a check was made since the last step.
    """

    def __init__(self, weights: Sequence[nn.Parameter], mastered: Sequence[nn.Parameter], widens_at_end: bool) -> None:
        self.weights = weights
        self.is_scaled = False
        self.found_inf: torch.Tensor | None = None
        self.is_fresh = False
        # The weights with masters, whose gradients become float32.
        self._mastered = mastered
        # Whether they do at the end of a block. Those of split masters, which are to save memory, do in the step.
        self.widens_at_end = widens_at_end

    def present(self) -> list[torch.Tensor]:
        """Return the gradients that are not None."""
        return [gradient for gradient in grads_of(self.weights) if gradient is not None]

    @without_gradients
    def begin(self, scale: torch.Tensor | None, done: set[int], in_ddp: bool) -> torch.Tensor | None:
        """Begin a block: multiply gradients by its scale, so that the gradients of the scaled loss can be added.

        Args:
            scale: the scale, 0-dimensional; None: 1.
            done: ids of gradients that were multiplied already in this pass, as those of another optimizer.
            in_ddp: whether a DistributedDataParallel is around the model.

        Returns:
            Whether they contained inf or nan before the block, 0-dimensional; None without gradients or a scale.
        """
        if not self.present():
            self.found_inf, self.is_fresh = None, False
            self.is_scaled = scale is not None
            return None
        before = None
        try:
            if not in_ddp:
                self.widen()
            if scale is not None:
                self.is_scaled = True
                before = self._multiply(scale, done)
            if in_ddp:
                self._round(done)
        except BaseException:
            self.drop()
            raise
        return before

    @without_gradients
    def end(self, inverse: torch.Tensor | None, done: set[int], checks: bool) -> torch.Tensor | None:
        """End a block: widen gradients, multiply them by the reciprocal of its scale, and check them, in one pass.

        Args:
            inverse: the reciprocal, 0-dimensional; None: 1, and nothing is done.
            done: as in :meth:`begin`.
            checks: whether steps are skipped after inf or nan.

        Returns:
            Whether they contain inf or nan, 0-dimensional; None without gradients or a check.
        """
        try:
            found = None
            if inverse is not None and self.is_scaled:
                found = self._multiply(inverse, done, self.widens_at_end)
        except BaseException:
            self.drop()
            raise
        self.is_scaled = False
        if checks and found is not None:
            self.found_inf = any_of(self.found_inf, found)
            self.is_fresh = True
            return found
        return None

    def _multiply(self, factor: torch.Tensor, done: set[int], widens: bool = False) -> torch.Tensor | None:
        """Multiply the gradients, each once in a pass, and return whether they contained inf or nan before."""
        found = None
        widened: set[int] = set()
        for wide in self._widened() if widens else ():
            found = any_of(found, multiply_and_check_(wide, factor))
            widened.update(map(id, wide))
        others = self.present()
        others = [gradient for gradient in others if id(gradient) not in widened] if widened else others
        fresh = [gradient for gradient in others if id(gradient) not in done] if done else others
        found = any_of(found, multiply_and_check_(fresh, factor))
        if len(fresh) < len(others):
            found = any_of(found, check([gradient for gradient in others if id(gradient) in done]))
        done.update(widened, map(id, fresh))
        return found

    def drop(self) -> None:
        """Clear all gradients, because some of them may be multiplied by a scale and others not."""
        set_grads(list(self.weights), [None] * len(self.weights))
        self.is_scaled, self.found_inf, self.is_fresh = False, None, False

    @without_gradients
    def widen(self) -> None:
        """Replace 16-bit gradients of weights with masters by float32 ones."""
        for _ in self._widened(with_views=self.widens_at_end):
            pass

    def _widened(self, with_views: bool = True) -> Iterator[list[torch.Tensor]]:
        """Widen gradients a bucket at a time, and yield the float32 gradients of each bucket.

        Args:
            with_views: whether also those that are views, as of a flat buffer of the user's, which has to keep them.
        """
        pairs = zip(self._mastered, grads_of(self._mastered), strict=True)
        weights = [weight for weight, gradient in pairs if gradient is not None and gradient.dtype in LOWER_PRECISION]
        weights = weights if with_views else [w for w in weights if w.grad is not None and not w.grad._is_view()]
        begin, sizes = 0, list(map(torch.Tensor.numel, weights))
        while begin < len(weights):
            end = len(weights)
            if 4 * sum(sizes[begin:]) > _BUCKET_BYTES:
                end, room = begin, _BUCKET_BYTES
                while end < len(weights) and room > 0:
                    room -= 4 * sizes[end]
                    end += 1
            bucket = weights[begin:end]
            wide = _in_float32(grads_of(bucket))
            try:
                set_grads(bucket, list(wide))
            except RuntimeError:  # swap_tensors has exchanged the grad_dtype of a weight, too
                for weight, gradient in zip(bucket, wide, strict=True):
                    weight.grad, weight.grad_dtype = None, None
                    weight.grad = gradient
            yield wide
            begin = end

    def _round(self, done: set[int]) -> None:
        """Round float32 gradients to the weights' dtype, in which DistributedDataParallel reduces them."""
        for weight in self._mastered:
            gradient = weight.grad
            if gradient is not None and gradient.dtype is not weight.dtype and weight.grad_dtype is None:
                rounded = gradient.to(weight.dtype)
                done.discard(id(gradient))  # another tensor may get the id
                done.add(id(rounded))
                weight.grad = rounded

    # -- at a step ------------------------------------------------------------------------------------------------

    @without_gradients
    def check(self) -> torch.Tensor | None:
        """Return whether the present gradients contain inf or nan, 0-dimensional; None without gradients."""
        present = self.present()
        return check(present) if present else None

    def consume(self) -> None:
        """Forget the result of the last check, because a step has used it."""
        self.found_inf, self.is_fresh = None, False


def _in_float32(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    present = [gradient for gradient in gradients if gradient is not None]
    if not are_alike(present):  # sparse or sharded ones, or those of several devices
        return [gradient.to(torch.float32) for gradient in present]
    wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in present]
    torch._foreach_copy_(wide, present)
    return wide


# -- lists of gradients ------------------------------------------------------------------------------------------------


def any_of(*checks: torch.Tensor | None) -> torch.Tensor | None:
    """Return whether any of several checks found inf or nan; None without a check."""
    made = [check for check in checks if check is not None]
    return functools.reduce(lambda one, other: torch.maximum(one, other.to(one.device)), made) if made else None


def multiply_and_check_(gradients: list[torch.Tensor], factor: torch.Tensor) -> torch.Tensor | None:
    """Multiply gradients in place by a 0-dimensional float32 factor, and find inf and nan, in one pass over memory.

    Returns:
        A 0-dimensional float32 tensor: 1 if a number was inf or nan before, otherwise 0. Of sharded gradients only the
        parts of this process are checked. None without gradients.
    """
    if not gradients:
        return None
    if are_plain(gradients, factor.device):
        found_inf = torch.zeros((), dtype=torch.float32, device=factor.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, factor)
        return found_inf
    return any_of(*products.multiply_and_check_(dense_views(gradients), factor))


def check(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Do the same as :func:`multiply_and_check_` without multiplying."""
    dense = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in gradients]
    return any_of(*products.check(dense_views(dense)))


def are_zero(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers are 0; of shards only those of this process. This is a device sync."""
    return all(torch.stack(norms).amax().item() == 0 for norms in products.largest(dense_views(gradients)))
