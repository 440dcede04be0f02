"""A bfloat16 weight and the 16 bits that complete it to its float32 master."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from ..basics.checksum import BLOCK, checksums, padded, words_of
from ..basics.interrupts import InterruptsHeld
from ..distributed.sharding import set_data, shard, sharded_as
from ..torch_internals.parameter_watching import TENSOR_GRAD
from .float_split import flat, join, split_
from .pairs import Pair, give_gradient


@final
class SplitPair(Pair):
    """A weight that is the upper half of its master; the master in the groups holds no memory between steps.

    Of a sharded weight each process keeps the remainder of its own shard.

    Attributes:
        remainder: int16, the lower halves, in the order of the weight's memory, in whole blocks.
        checksums: int32, of the weight's blocks as they were when the remainder was.
        bucket: what the two are parts of, or None.

    Example:
        >>> pair = SplitPair(nn.Parameter(torch.tensor([1.0001])))
        >>> pair.cast(torch.bfloat16)
        >>> pair.model_param.dtype, pair.values()
        (torch.bfloat16, tensor([1.0001]))
    """

    __slots__ = ("_before", "_strides", "bucket", "checksums", "remainder")

    def __init__(self, weight: nn.Parameter) -> None:
        master = nn.Parameter(placeholder(weight), weight.requires_grad)
        # It shows the weight's own gradient, which is 16-bit.
        master.grad_dtype = None
        super().__init__(weight, master)
        self.remainder: torch.Tensor
        self.checksums: torch.Tensor
        self.bucket: Any = None
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None
        self._strides = shard(weight).stride()

    @property
    def readable_param(self) -> nn.Parameter:
        """The weight: the master holds no numbers."""
        return self.model_param

    def cast(self, dtype: torch.dtype, clamps: bool = False) -> None:
        """Split the incoming float32 weight; a 16-bit one has nothing to remember, and bfloat16 has float32's range."""
        incoming = shard(self.model_param)
        self.remainder = torch.zeros(padded(incoming.numel()), dtype=torch.int16, device=incoming.device)
        if incoming.dtype != torch.bfloat16:
            weight = torch.empty_like(incoming, dtype=torch.bfloat16)
            split_(flat(incoming.float()), flat(weight), self._own(self.remainder))
            set_data(self.model_param, sharded_as(weight, self.model_param))
        del incoming
        self._strides = shard(self.model_param).stride()
        self.checksums = self._checksums_now()

    def _own(self, padded_tensor: torch.Tensor) -> torch.Tensor:
        return padded_tensor[: shard(self.model_param).numel()]

    def _checksums_now(self) -> torch.Tensor:
        return checksums(words_of(flat(shard(self.model_param))))

    def values(self) -> torch.Tensor:
        """Weight and remainder put together, in a new tensor."""
        self.follow_layout()
        weight = shard(self.model_param)
        joined = join(flat(weight), self._own(self.remainder)).as_strided(weight.size(), weight.stride())
        return sharded_as(joined, self.model_param)

    @torch.no_grad()
    def load(self, values: torch.Tensor) -> None:
        """Take the numbers apart."""
        weight = shard(self.model_param)
        dense = torch.empty_like(weight, dtype=torch.float32)
        sharded_as(dense, self.model_param).copy_(values)
        with InterruptsHeld():
            split_(flat(dense), flat(weight), self._own(self.remainder))
            self._strides = weight.stride()
            self.checksums.copy_(self._checksums_now())

    @torch.no_grad()
    def follow_weight(self) -> None:
        """A block that is not what it was is its own master: its remainders belong to other numbers."""
        now = self._checksums_as_it_lay()
        if self._before is None:
            self._before = self.remainder.clone(), self.checksums.clone()
        remainder, sums = self._before
        changed, as_before = now != self.checksums, (now == sums).repeat_interleave(BLOCK)
        self.remainder.masked_fill_(changed.repeat_interleave(BLOCK), 0)
        self.remainder.copy_(torch.where(as_before, remainder, self.remainder))
        self._lay_remainder_out_as(shard(self.model_param))
        self.checksums.copy_(self._checksums_now())

    def follow_layout(self) -> None:
        """The weight may have been laid out anew, in channels_last say: so are its remainders, if it was."""
        if shard(self.model_param).stride() != self._strides:
            self.follow_weight()

    def _checksums_as_it_lay(self) -> torch.Tensor:
        weight = shard(self.model_param)
        if weight.stride() == self._strides:
            return self._checksums_now()
        before = torch.empty_strided(weight.size(), self._strides, dtype=weight.dtype, device=weight.device)
        return checksums(words_of(flat(before.copy_(weight))))

    def forget_before(self) -> None:
        """Let go of the copies."""
        self._before = None

    def _lay_remainder_out_as(self, weight: torch.Tensor) -> None:
        if weight.stride() == self._strides:
            return
        own = self._own(self.remainder)
        laid_out = torch.empty_like(weight, dtype=torch.int16)
        laid_out.copy_(own.clone().as_strided(weight.size(), self._strides))
        own.copy_(flat(laid_out))
        self._before = None
        self._strides = weight.stride()

    def follow_master(self) -> None:
        """Refuse what cannot be followed: there is no memory for a master's numbers to be written to.

        Raises:
            RuntimeError: somebody gave the master memory of its own between steps.
        """
        if is_placeholder(shard(self.master_param)):
            return
        raise RuntimeError(
            'with master_weights="split" the parameters in optimizer.param_groups hold no numbers between steps, and '
            "one of them was given some: write to the model's weights, or use master_weights=True"
        )

    def clamp(self) -> bool:
        """Bfloat16 has float32's range."""
        return False

    def agree(self) -> bool:
        """Whether nobody wrote to the weight: the master has nothing to differ with."""
        return bool(torch.equal(self._checksums_as_it_lay(), self.checksums))

    def restore(self, dtype: torch.dtype) -> None:
        """Weight and remainder put together."""
        weight = self.model_param
        gradient = weight.grad if self.master_param.grad is None else self.master_param.grad
        if weight.dtype != dtype and hasattr(self, "remainder"):
            weight.grad = None
            set_data(weight, self.values().to(dtype))
        give_gradient(weight, gradient)

    def follow_device(self) -> None:
        """Move the remainder; it is in no bucket any more."""
        device = self.model_param.device
        if self.master_param.device != device:
            self.bucket = self._before = None
            self.remainder, self.checksums = self.remainder.to(device), self.checksums.to(device)
            set_data(self.master_param, placeholder(self.model_param))

    def let_go(self) -> None:
        """The weight has its gradient already."""
        TENSOR_GRAD.__set__(self.master_param, None)


def placeholder(weight: torch.Tensor) -> torch.Tensor:
    """What stands for a master between steps: its shape and dtype, and no memory.

    Its numbers are nan: whoever reads them in the optimizer's groups shall notice that they are not there.
    """
    return sharded_as(placeholder_of_shard(weight), weight)


def placeholder_of_shard(weight: torch.Tensor) -> torch.Tensor:
    """:func:`placeholder`, for this process's part of a weight."""
    return torch.full((), torch.nan, dtype=torch.float32, device=weight.device).expand(shard(weight).shape)


def is_placeholder(held: torch.Tensor) -> bool:
    """Whether what a master holds, of this process's part, is what stands there between steps."""
    return held.untyped_storage().nbytes() == held.element_size() and bool(held.isnan().all())
