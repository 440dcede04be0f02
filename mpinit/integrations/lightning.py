"""Lightning: a precision plugin for its Trainer and for Fabric."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from .. import amp, checkpoint, registry
from ..basics.patching import Undo, UndoStack
from ..config.reading import check_level, check_names
from . import require

_lightning: Final[Any] = require("lightning").pytorch
Precision: Any = _lightning.plugins.Precision
_AVERAGING: Final = ("StochasticWeightAveraging", "WeightAveraging")  # Lightning 2.5 has but one.
_AVERAGERS: Final = tuple(kind for name, kind in vars(_lightning.callbacks).items() if name in _AVERAGING)
_HOOKS: Final = ("train_batch_end", "train_epoch_start", "train_end", "validation_epoch_start", "validation_epoch_end")


@final
class MixedPrecision(Precision):  # type: ignore[misc]
    """A plugin: ``Trainer(plugins=[MixedPrecision("O2")])`` or ``Fabric(plugins=[MixedPrecision("O2")])``.

    With a Trainer, the module is initialised before ``configure_optimizers``, and undone when the run ends: weights are
    float32 again. Checkpoints have float32 weights and the loss scale. Schedulers that step per batch do not step after
    a skipped step. Lightning's callbacks that average weights read and write float32 values.

    Fabric does not pass optimizers to a plugin. Call ``mpinit.add_optimizers(optimizer)`` after ``fabric.setup``. Or
    call ``mpinit.initialize`` before it, on all models and optimizers that share a loss; the plugin does not initialise
    them again. Save the loss scale by ``fabric.save(path, {..., "precision": plugin})``.

    Args:
        opt_level: as for :func:`mpinit.initialize`. Default "O1".
        **properties: any other argument of :func:`mpinit.initialize`.

    Example:
        >>> import mpinit, torch; from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("O2")])
        >>> model = fabric.setup(torch.nn.Linear(4, 2))
        >>> optimizer = mpinit.add_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer = fabric.setup_optimizers(optimizer)
        >>> fabric.backward(model(torch.ones(1, 4)).mean())
        >>> optimizer.step()
        >>> mpinit.undo(model.module)
    """

    main_params = staticmethod(amp.master_params)  # Lightning clips their gradients.

    def __init__(self, opt_level: str = "O1", **properties: Any) -> None:
        check_level(opt_level)
        check_names(properties, "MixedPrecision() has no keyword", also=("enabled", "process_group", "config"))
        self._settings = {"opt_level": opt_level, **properties, "await_optimizers": True}
        self._modules: list[torch.nn.Module] = []
        self._undos = UndoStack()
        self._has_trainer = False
        self._state: dict[str, Any] = {}

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Initialise the module, unless it is initialised."""
        if registry.of(module) is None:
            amp.initialize(module, **self._settings)
            self._undos.push(lambda: None if registry.of(module) is None else amp.undo(module))
        self._modules.append(module)
        self.load_state_dict(self._state)
        return module

    def connect(self, model: torch.nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Add the optimizers that the Trainer's ``configure_optimizers`` returned."""
        self._has_trainer = True
        if optimizers:
            amp.add_optimizers(optimizers)
        for scheduler in [config.scheduler for config in lr_schedulers if config.interval == "step"]:
            self._undos.push(skip_scheduler_with_step(scheduler, amp.step_was_skipped))
        # With DDP the model is the wrapper.
        module: Any = next(each for each in model.modules() if isinstance(each, _lightning.LightningModule))
        for callback in [each for each in module.trainer.callbacks if isinstance(each, _AVERAGERS)]:
            for name in map("on_{}".format, _HOOKS):
                self._undos.set_attribute(callback, name, _in_float32(getattr(callback, name)))
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Undo the initialisation; keep the loss scale for checkpoints and the next run."""
        self._state = self.state_dict()
        self._undos.unwind()
        self._modules, self._has_trainer = [], False

    # Overridden because Lightning's own call the Trainer's hooks.
    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().pre_backward(tensor, module) if self._has_trainer else tensor

    def post_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().post_backward(tensor, module) if self._has_trainer else tensor

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass of the scaled loss for all optimizers. A Trainer passes one of them first in ``args``."""
        sessions = [session for session in registry.sessions_of(self._modules) if session.optimizers]
        if registry.sessions_of(self._modules, scaled=True):
            registry.shared_session([session.optimizers[0] for session in sessions])
        with contextlib.ExitStack() as stack:
            for session in sessions:
                tensor = stack.enter_context(amp.scale_loss(tensor, list(session.optimizers)))
            super().backward(tensor, model, *args, **kwargs) if self._has_trainer else tensor.backward(*args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by a norm that is computed in float32, also of 16-bit gradients."""
        amp.clip_grad_norm_(optimizer, clip_val)

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Step; run the closure before, unless the optimizer calls it itself, as LBFGS does."""
        registry.session_meant(optimizer)
        if not self._has_trainer:
            return optimizer.step(closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state; empty without loss scaling."""
        states = map(checkpoint.session_state, registry.sessions_of(self._modules, scaled=True))
        return next(states, dict(self._state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loss scale's state, or keep it until a module is initialised."""
        self._state = state
        for session in registry.sessions_of(self._modules if state else [], scaled=True):
            checkpoint.load_session_state(session, state)


def _in_float32(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def inside(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        with amp.float32_weights(module):
            return hook(trainer, module, *args, **kwargs)

    return inside


def skip_scheduler_with_step(scheduler: Any, was_skipped: Callable[[Optimizer], bool]) -> Undo:
    """Patch ``scheduler.step`` to do nothing if its optimizer skipped the last step.

    The scheduler keeps its class, and its state dict does not change.
    """
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if was_skipped(self.optimizer) else kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": functools.wraps(kind.step)(step)})
    return functools.partial(setattr, scheduler, "__class__", kind)
