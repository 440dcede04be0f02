"""Parameters stepped inside of backward passes: a bucket as soon as its gradients are final, which are freed then.

torch calls a parameter's post-accumulate hook once a pass, when all has been added up that the pass brings to it and
nothing will read it for a gradient any more. A :class:`Released` takes the gradient's place at that moment, so that
whatever would read, clip or add to it raises until ``step()`` is over: nothing else has to be watched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..distributed.sharding import has_other_processes, is_sharded
from ..torch_internals.columns import are_same, are_trained, grads_of, set_grads
from ..torch_internals.running import current_pass, is_capturing
from ..torch_internals.step_hooks import has_step_hooks
from .per_parameter import StepNumbers, steps_per_parameter
from .scope import Part


@final
class Released(torch.Tensor):
    """What stands in the place of a gradient that has arrived: of its shape, without its memory; any use raises."""

    @staticmethod
    def __new__(cls, gradient: torch.Tensor) -> Released:
        return torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape).as_subclass(cls)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"a gradient was used between backward() and optimizer.step(), and {_AHEAD}")


@dataclass(eq=False)
class _Bucket:
    """Parameters that are stepped together, how many are waited for, and their gradients that have arrived."""

    part: Part
    awaited: int
    gradients: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


@final
class GradientRelease:
    """What one optimizer's steps have done ahead, inside of backward passes."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._parts: Sequence[Part] = ()
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        # Of the step that has begun: its pass, and what stands for the gradients that have arrived in it.
        self._pass = -1
        self._arrived: dict[nn.Parameter, Released] = {}
        # What the optimizer counts, before the first bucket was stepped and after the last one.
        self._before: StepNumbers | None = None
        self._after: StepNumbers | None = None

    def follow(self) -> None:
        """Have those parameters stepped ahead that are in the groups now."""
        parts = self._managed.scope.parts()
        if parts is not self._parts:
            self._parts, buckets = parts, [_Bucket(part, sum(are_trained(part.weights))) for part in parts]
            self._bucket_of = {weight: bucket for bucket in buckets for weight in bucket.part.weights}
            for weight in self._handles.keys() - self._bucket_of.keys():
                self._handles.pop(weight).remove()
        for weight in self._bucket_of:
            if weight.requires_grad and weight not in self._handles:
                register: Any = weight.register_post_accumulate_grad_hook
                self._handles[weight] = register(partial(_arrive, weakref.ref(self)))

    def end(self) -> None:
        """The session is over: gradients stay where they arrive."""
        self.forget()
        while self._handles:
            self._handles.popitem()[1].remove()

    def arrive(self, weight: nn.Parameter) -> None:
        """Autograd has added to a gradient all that this pass brings to it."""
        with self._lock:
            if self._pass != current_pass():
                self._begin(weight)
            bucket, gradient = self._bucket_of.get(weight), weight.grad
            if bucket is not None and gradient is not None:
                bucket.gradients[weight] = gradient
                self._arrived[weight] = weight.grad = Released(gradient)
                if len(bucket.gradients) == bucket.awaited:
                    self._step(bucket)

    def _begin(self, weight: nn.Parameter) -> None:
        """The first gradient of a backward pass has arrived."""
        managed, gradient = self._managed, weight.grad
        if self._arrived:
            weight.grad = None
            self.forget()
            raise RuntimeError(_LOST)
        if gradient is not None and gradient.requires_grad:
            raise RuntimeError(_refusal("create_graph=True needs gradients longer: use torch.autograd.grad"))
        if has_step_hooks(managed.optimizer) or is_capturing():
            raise RuntimeError(_refusal("step hooks and CUDA graphs need all of a step in step(): remove them"))
        if has_other_processes():
            raise RuntimeError(_refusal(_RANKS))
        managed.close_exposed()
        self._pass = current_pass()
        if managed.members.are_as_seen():
            self.follow()
        else:  # changed since the forward: step() looks at the groups, and does all of it
            self._parts, self._bucket_of = (), {}

    def _step(self, bucket: _Bucket) -> None:
        gradients = bucket.gradients
        if self._before is None:
            self._before = StepNumbers(self._managed.optimizer)
        else:
            self._before.put_back()
        set_grads(gradients, gradients.values())
        try:
            self._managed.run(alone=bucket.part)
        finally:
            set_grads(gradients, map(self._arrived.__getitem__, gradients))
        gradients.clear()
        self._after = StepNumbers(self._managed.optimizer)

    def check_looking(self, what: str) -> None:
        """Refuse what looks at gradients and masters, where some are stepped."""
        if self._arrived:
            raise RuntimeError(f"{what} was called between backward() and optimizer.step(), and {_AHEAD}")

    def forget(self) -> None:
        """No step has begun any more; gradients that were not used are on their weights again."""
        self._give_back()
        for bucket in self._bucket_of.values():
            bucket.gradients.clear()
        self._pass, self._arrived, self._before, self._after = -1, {}, None, None

    def _give_back(self) -> None:
        for weight, released in self._arrived.items():
            if weight.grad is released:
                weight.grad = self._bucket_of[weight].gradients.get(weight)

    def before_step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Prepare a step of what is left; refuse arguments, and gradients or options changed since ``backward()``."""
        if args or kwargs:
            raise RuntimeError(_refusal("step() with a closure or arguments comes later: call backward(), then step()"))
        if not are_same(grads_of(self._arrived), list(self._arrived.values())):
            self.forget()
            raise RuntimeError(_LOST)
        changed = [] if self._after is None else self._after.changed()
        if changed:
            why = f"a group's {changed[0]!r} was changed before step(): set it back, and change it after step()"
            raise RuntimeError(_refusal(why))
        self._give_back()
        if self._before is not None:
            self._before.put_back()

    def after_step(self) -> None:
        """It is over, and no gradient is left of those that have arrived."""
        set_grads(self._arrived, repeat(None))
        for bucket in set(self._bucket_of.values()):
            # What a pass does not reach holds a bucket back once; what comes later than expected waits for step().
            bucket.awaited = sum(map(self._arrived.__contains__, bucket.part.weights))
        self.forget()
        self.follow()


def _arrive(release: weakref.ref[GradientRelease], weight: nn.Parameter) -> None:
    """The hook, which holds nothing: the garbage collector does not see what weights' hooks hold."""
    if (alive := release()) is not None:
        alive.arrive(weight)


def check_release(optimizers: Iterable[Optimizer], taken: Iterable[torch.Tensor]) -> None:
    """Refuse, with a ValueError, optimizers that cannot be stepped ahead; others step the parameters in ``taken``."""
    held = set(map(id, taken))
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not steps_per_parameter(optimizer):
            why = "nothing is known of how {} updates them: set optimizer.steps_per_parameter = True if one by one"
            raise ValueError(_refusal(why.format(type(optimizer).__name__)))
        if has_other_processes() or any(map(is_sharded, parameters)):
            raise ValueError(_refusal(_RANKS))
        if not held.isdisjoint(map(id, parameters)):
            raise ValueError(_refusal("some parameters are in the groups of two optimizers: leave them to one"))
        held.update(map(id, parameters))


def _refusal(why: str) -> str:
    return f"gradient_release=True steps parameters inside of backward(), and {why}, or leave gradient_release off"


_AHEAD: Final = (
    "gradient_release=True has stepped parameters inside of backward() and freed their gradients: there is one "
    "backward() a step, and nothing reads, clips, clears or adds to them before step(). Add losses up and call "
    "backward() once; give checkpoint() use_reentrant=False; bound updates without clipping; or leave it off"
)
_LOST: Final = (
    f"zero_grad() or a second backward() came before optimizer.step(), and {_AHEAD}. Decide before backward() to drop "
    "a step; after one that failed, step() uses what has arrived. The step that had begun is forgotten now"
)
_RANKS: Final = (
    "other ranks add to gradients later (DistributedDataParallel, fully_shard, meshes of one or more dimensions): use "
    "one process"
)
