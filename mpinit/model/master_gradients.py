"""The gradients of full masters that users have: each is the gradient of its weight.

Autograd accumulates in ``weight.grad``. If a loss contains masters, it accumulates in ``master.grad``, too. Users
replace gradients of both. So the two are compared at each use of the model or the optimizer, before the first gradient
of a backward pass is accumulated, and after the pass.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..distributed.sharding import is_distributed, is_sharded
from ..masters.full import FullMasters
from ..masters.masters import Master
from ..torch_internals.bulk import (
    are_same,
    changed_grads,
    set_grads,
    versions_of,
)
from ..torch_internals.running import call_after_backward, current_graph_task

_FLOAT32: Final = frozenset({torch.float32})
BOTH: Final = (
    "the weight {0!r} and its float32 master of mpinit.master_params() were both {1}, differently: change one of the "
    "two"
)
_REPLACED: Final = (
    "the gradient of the weight {0!r} was replaced (p.grad = ...), and the one before it, which is still the gradient "
    "of its float32 master, was written to after that, as by clipping: call mpinit.master_params(optimizer) anew after "
    "gradients are replaced, and clip these, or change gradients in place (p.grad.div_(n))"
)


class MasterGradients:
    """The gradients that masters share with their weights, as parallel lists.

    A gradient that was replaced counts, whether it was replaced on the master or on the weight.
    """

    def __init__(self, table: FullMasters) -> None:
        self._table = table
        self._masters: list[Master] = []
        self._weights: list[nn.Parameter] = []
        self._parameters: list[nn.Parameter] = []
        self._are_bound = False
        # The id of a master -> the hooks of its weight, and its own.
        self._hooks: dict[int, tuple[list[RemovableHandle], RemovableHandle]] = {}
        # The gradients of both from the last time that they agreed, and the versions of those that are not None.
        self._gradients: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._on_gradient = _once_a_pass(weakref.ref(self))
        # The masters that were in the last block, the nodes that accumulate their gradients, and the hooks of these.
        self._in_blocks: list[Master] = []
        self._nodes: list[Any] = []
        self._node_hooks: list[RemovableHandle] = []

    def arrange(self, masters: list[Master]) -> None:
        """Set the list of masters; those that stay keep what is known of their gradients."""
        known = {id(master): gradient for master, gradient in zip(self._masters, self._gradients, strict=True)}
        versions = self._known_versions()
        self._masters = masters
        self._weights = [master.weight for master in masters]
        self._parameters = [master.parameter for master in masters]
        self._gradients = [known.get(id(master)) for master in masters]
        self._versions = [versions[id(gradient)] for gradient in self._gradients if gradient is not None]
        for key in set(self._hooks).difference(map(id, masters)):
            self._unhook(key)

    def close(self) -> None:
        """Remove the hooks and the gradients of masters."""
        for key in list(self._hooks):
            self._unhook(key)
        for handle in self._node_hooks:
            handle.remove()
        self._node_hooks, self._nodes, self._in_blocks = [], [], []
        set_grads(self._parameters, [None] * len(self._parameters))

    def begin(self) -> None:
        """Set the ``grad`` of all handed-out masters, now and after each backward pass."""
        if self._are_bound and len(self._hooks) == len(self._masters):
            return  # apply() has bound them
        self._are_bound = True
        if len(self._hooks) < len(self._masters):
            for master in self._masters:
                weight: Any = master.weight
                if id(master) not in self._hooks and weight.requires_grad:
                    hooks = [weight.register_hook(self._on_gradient)]
                    if master.is_sharded:  # FSDP2 sets its gradient without autograd, and runs hooks of this kind only
                        hooks.append(weight.register_post_accumulate_grad_hook(self._on_gradient))
                    self._hooks[id(master)] = hooks, self._hook_of_master(master)
        self.bind()

    def _hook_of_master(self, master: Master) -> RemovableHandle:
        """Hook a master, because a loss may contain it, as with a penalty on masters."""
        parameter: Any = master.parameter
        handle: RemovableHandle = parameter.register_hook(self._on_gradient)
        return handle

    def _unhook(self, key: int) -> None:
        hooks, hook_of_master = self._hooks.pop(key)
        for handle in (*hooks, hook_of_master):
            handle.remove()

    def follow_graphs(self) -> None:
        """Add gradients of graphs that contain masters, because they were made in a block, to those of the weights.

        The hooks are on the nodes that accumulate the masters' gradients: other backward passes do not run them.
        """
        if are_same(self._masters, self._in_blocks):
            return
        self._in_blocks = self._masters
        on_node = _once_a_pass_on_nodes(weakref.ref(self))
        with torch.inference_mode(False), torch.enable_grad():
            self._nodes = [get_gradient_edge(p).node for p in self._parameters if p.requires_grad]
        for handle in self._node_hooks:
            handle.remove()
        self._node_hooks = [node.register_hook(on_node) for node in self._nodes]

    def add_those_of_graphs(self) -> None:
        """Add gradients of masters to those of their weights, unless both have the same one."""
        if self._are_bound or not self._in_blocks or self._table.are_in_model or self._table.is_open:
            return
        found = changed_grads(self._parameters, [None] * len(self._parameters))
        if found is None:
            return
        for weight, parameter, gradient in zip(self._weights, self._parameters, found, strict=True):
            if gradient is not None:
                added = gradient if weight.grad is None else gradient + weight.grad
                parameter.grad, weight.grad = None, added.to(weight.grad_dtype or weight.dtype)

    def before_backward(self) -> None:
        """Apply changes of gradients before the first gradient of a backward pass is added to them."""
        if self._table.are_in_model or self._table.is_open:
            return
        self.apply()
        if is_distributed():
            self._narrow()

    def _narrow(self) -> None:
        """Cast the gradients of weights to the weights' dtype, because DistributedDataParallel refuses others."""
        for index, weight in enumerate(self._weights):
            gradient = weight.grad
            if gradient is None or gradient.dtype is weight.dtype:
                continue
            if weight.grad_dtype is not None or is_sharded(weight):
                continue
            weight.grad = gradient.to(weight.dtype)
            # The master's own gradient begins anew, and is added to the weight's after the backward pass.
            self._parameters[index].grad = self._gradients[index] = None
        self._record_versions()

    def after_backward(self) -> None:
        """Bind gradients at the end of a backward pass, which may have reached weights, masters, or both."""
        if not (self._table.are_in_model or self._table.is_open):
            self.apply()
            self._record_versions()

    def bind(self, anew: bool = False) -> None:
        """Set each master's ``grad`` to its weight's, which becomes float32. In-place writes so far count for both.

        Args:
            anew: also bind where the ``grad`` of a master was changed since. Default False.
        """
        if not self._are_bound:
            return
        theirs = changed_grads(self._weights, self._gradients)
        if theirs is None:
            if not anew:
                self._record_versions()
                return
            theirs = self._gradients
        self._gradients = theirs
        if not _FLOAT32.issuperset({gradient.dtype for gradient in theirs if gradient is not None}):
            # In a process group gradients have the weights' dtype.
            with torch.no_grad():
                self._gradients = theirs = self._table.in_kept_dtype(theirs)
            set_grads(self._weights, theirs)
        set_grads(self._parameters, theirs)
        self._record_versions()

    def _record_versions(self) -> None:
        self._versions = versions_of([gradient for gradient in self._gradients if gradient is not None])

    def _known_versions(self) -> dict[int, int]:
        present = [id(gradient) for gradient in self._gradients if gradient is not None]
        return dict(zip(present, self._versions, strict=True))

    def apply(self) -> None:
        """Set weights' gradients to those that were set on their masters, and the reverse.

        Raises:
            RuntimeError: a weight and its master got other gradients.
        """
        if not self._are_bound:
            self.add_those_of_graphs()
            return
        mine = changed_grads(self._parameters, self._gradients)
        theirs = changed_grads(self._weights, self._gradients)
        if theirs is not None:
            self._check_replaced(theirs)
        if mine is not None:
            for master, gradient, before in zip(self._masters, mine, self._gradients, strict=True):
                if gradient is not before:
                    self._apply_gradient(master, gradient, before)
        # Also where nothing was set on a master: it would keep a gradient alive that zero_grad() has dropped.
        if mine is not None or theirs is not None:
            self.bind(anew=mine is not None)

    def _check_replaced(self, theirs: Sequence[torch.Tensor | None]) -> None:
        """Refuse writes to the ``grad`` of a master whose weight got another gradient before.

        Raises:
            RuntimeError: there was one, as by clipping.
        """
        before, nothing = self._gradients, [None] * len(theirs)
        if are_same(before, nothing) or are_same(theirs, nothing):
            return
        known = self._known_versions()
        for master, now, was in zip(self._masters, theirs, before, strict=True):
            if now is None or was is None or now is was or master.parameter.grad is not was:
                continue
            # Gradients of another dtype come from mpinit: in a process group scale_loss casts them for DDP.
            if now.dtype is was.dtype and was._version != known[id(was)]:
                raise RuntimeError(_REPLACED.format(self._table.names.of(master.weight)))

    def _apply_gradient(self, master: Master, mine: torch.Tensor | None, before: torch.Tensor | None) -> None:
        theirs = master.weight.grad
        is_cleared_before_backward = mine is None and theirs is not before
        if mine is theirs or is_cleared_before_backward:
            return
        if before is None and theirs is not None and mine is not None:
            mine = mine + theirs  # the loss has reached both, as with a penalty on masters
        elif theirs is not before and theirs is not None:
            raise RuntimeError(BOTH.format(self._table.names.of(master.weight), "assigned other gradients"))
        master.weight.grad = mine


def _once_a_pass_on_nodes(known: "weakref.ref[MasterGradients]") -> Callable[[Any, Any], None]:
    """Make the hook of nodes of autograd's graph that queues, once per backward pass, what masters' gradients need."""
    last = -1

    def on_node(_: Any, __: Any) -> None:
        nonlocal last
        if last != (now := current_graph_task()):
            last = now
            gradients = known()
            if gradients is not None:
                call_after_backward(gradients.add_those_of_graphs)

    return on_node


def _once_a_pass(known: "weakref.ref[MasterGradients]") -> Callable[[torch.Tensor], None]:
    """Make the hook of all weights and masters, which does its work once per backward pass.

    It runs before the first gradient is accumulated, and queues the binding of gradients.
    """
    # A closure, because it runs for every weight in every backward pass, and a method needs a third more time.
    last = -1
    current = current_graph_task

    def on_gradient(_: torch.Tensor) -> None:
        nonlocal last
        if last != (now := current()):
            last = now
            gradients = known()
            if gradients is not None:
                gradients.before_backward()
                call_after_backward(gradients.after_backward)

    return on_gradient
