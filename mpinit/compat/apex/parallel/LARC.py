"""LARC: layer-wise adaptive rate control around another optimizer (You et al., arXiv:1708.03888)."""

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

import torch

from .... import amp as mp
from ..optimizers._shared import attribute_of, loss_of


class LARC(torch.optim.Optimizer):
    """Scales each parameter's gradient by a trust ratio, then lets the wrapped optimizer step.

    Groups, state and options are the wrapped optimizer's own objects, so learning-rate schedulers and amp may be
    given either of the two.

    Args:
        optimizer: the optimizer that steps.
        trust_coefficient: the trust in a layer's own scale.
        clip: limit the layer's rate to the optimizer's learning rate (LARC) and not only scale it (LARS).
        eps: added to the denominator.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.1))
    """

    # ``apex.parallel.LARC`` is the class, which hides the module of the same name: both spellings reach it.
    LARC: ClassVar[type[torch.optim.Optimizer]]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        # Hooks and nothing else: Optimizer.__init__ would set up groups, and those are the wrapped optimizer's.
        super().__setstate__({})

    param_groups = attribute_of("optim", "param_groups")
    state = attribute_of("optim", "state")
    defaults = attribute_of("optim", "defaults")

    def __getstate__(self) -> dict[str, Any]:
        """What pickling keeps: the wrapped optimizer and the options."""
        names = ("optim", "trust_coefficient", "clip", "eps")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients through the wrapped optimizer."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and step the wrapped optimizer.

        Args:
            closure: re-evaluates the model and returns the loss; evaluated once.

        Returns:
            What the closure returned, or None.
        """
        loss = loss_of(closure)
        # The decay is in the gradients once they are scaled.
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        # In the groups' order: masters, where the wrapped optimizer was initialised without this.
        stepped = mp.master_params(self.optim)
        with torch.no_grad():
            for group, decay in zip(self.param_groups, decays, strict=True):
                for p in islice(stepped, len(group["params"])):
                    if p.grad is not None:
                        self._scale_gradient(p, p.grad, group["lr"], decay)
        try:
            for group in self.param_groups:
                group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group.update({"weight_decay": decay} if "weight_decay" in group else {})
        return loss

    def _scale_gradient(self, p: torch.Tensor, grad: torch.Tensor, lr: float, decay: float) -> None:
        weight_norm, grad_norm = p.float().norm(), grad.float().norm()
        rate = self.trust_coefficient * weight_norm / (grad_norm + weight_norm * decay + self.eps)
        if self.clip:
            rate = torch.clamp(rate / lr, max=1.0)
        moved = (weight_norm > 0) & (grad_norm > 0)
        scaled = ((grad + decay * p) * rate).to(grad.dtype)
        grad.copy_(torch.where(moved, scaled, grad))


LARC.LARC = LARC
