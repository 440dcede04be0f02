"""LARC: layer-wise adaptive learning rates around any optimizer, under apex's name."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .... import amp as mp
from ... import _core


class LARC(Optimizer):
    """An optimizer around another one, which scales each parameter's gradient by a local learning rate.

    The local rate of a parameter ``w`` with gradient ``g`` is that of You, Gitman and Ginsburg, "Large Batch Training
    of Convolutional Networks" (2017), section 4::

        local = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w) + eps)
        factor = min(local / lr, 1) if clip else local
        g = (g + weight_decay * w) * factor      # unless norm(w) or norm(g) is 0

    The wrapped optimizer then steps with ``g`` and without weight decay. As in apex, ``w.grad`` is ``g`` afterwards.
    Values and gradients are those of the float32 masters where the optimizer has any, whether LARC is passed to
    ``amp.initialize`` or wraps an optimizer that was.

    Args:
        optimizer: the optimizer to wrap. Groups, state and defaults are its own.
        trust_coefficient: the coefficient of the local rate. Default 0.02.
        clip: True: the local rate is an upper limit of the group's ``lr`` (LARC). False: it multiplies it (LARS).
            Default True.
        eps: added to the denominator. Default 1e-8.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        >>> weight.sum().backward()
        >>> optimizer.step()
    """

    # A scaler must unscale the gradients first: their norms count.
    _step_supports_amp_scaling = False

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        # Not Optimizer.__init__, which would make groups and a state of its own.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __getattr__(self, name: str) -> Any:
        # Hooks and further attributes are the wrapped optimizer's. While a copy or a pickle is made, there is none yet.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer, under the name by which mpinit finds it; apex's name is ``optim``."""
        return self.optim

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Scale the gradients and step the wrapped optimizer.

        Raises:
            RuntimeError: a closure was passed.
        """
        if closure is not None:
            raise RuntimeError("LARC scales gradients once before the step, so it takes no closure: call backward()")
        session = _core.session_of(self.optim)
        decays = [group.get("weight_decay") for group in self.optim.param_groups]
        for group, own in zip(self.optim.param_groups, decays, strict=True):
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, decay = p if session is None else session.view.values_of(p), own or 0
                grad = p.grad.to(weight.dtype)
                weight_norm, grad_norm = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(grad)
                rate = self.trust_coefficient * weight_norm / (grad_norm + weight_norm * decay + self.eps)
                if self.clip:
                    rate = torch.clamp(rate / group["lr"], max=1)
                # On the device: a branch would wait for it once a parameter.
                scaled = torch.where((weight_norm != 0) & (grad_norm != 0), (grad + decay * weight) * rate, grad)
                if p.grad.dtype == scaled.dtype:
                    p.grad.copy_(scaled)
                else:  # a 16-bit gradient of a float32 master
                    p.grad = scaled
        if session is not None:
            deque(mp.master_params(self.optim), maxlen=0)  # masters that were handed out get the new gradients
        try:
            for group in self.optim.param_groups:
                group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, own in zip(self.optim.param_groups, decays, strict=True):
                if own is None:
                    del group["weight_decay"]
                else:
                    group["weight_decay"] = own


def _of_wrapped(name: str) -> property:
    return property(lambda self: getattr(self.optim, name), lambda self, value: setattr(self.optim, name, value))


# What a subclass of Optimizer would have of its own, and so __getattr__ does not find.
for _name in ("param_groups", "state", "defaults", "state_dict", "load_state_dict", "zero_grad", "add_param_group"):
    setattr(LARC, _name, _of_wrapped(_name))

# In apex, ``apex.parallel.LARC`` is the module, and the class is in it: both ways to write it work.
LARC.LARC = LARC  # type: ignore[attr-defined]
