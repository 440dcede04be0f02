"""Transformers: ``enable`` makes a ``Trainer`` train in mixed precision."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from .. import amp, registry
from ..basics.dtypes import parse_dtype
from . import require
from .accelerate import attach, check
from .pretrained import save_in

if TYPE_CHECKING:
    from ..settings.keywords import Level

require("transformers")

_LOSS_SCALE = "loss_scale.pt"
_INSTEAD = {
    "args.fp16": "the opt_level says the type: leave TrainingArguments(fp16=...) out, and give enable() opt_level='O2'",
    "args.bf16": "the opt_level says the type, and opt_level='O5' is bfloat16: give bf16=False (in TRL's "
    "configurations, SFTConfig and the like, True is the default)",
    "args.fp16_full_eval": "the weights that are evaluated are 16-bit already: leave it out",
    "args.bf16_full_eval": "the weights that are evaluated are 16-bit already: leave it out",
    "model_init": "each train() would make a model that mpinit does not know: give the Trainer a model instead",
    "is_fsdp_enabled": "FSDP replaces the parameters in train(): prepare with Accelerate, then mpinit.initialize",
    "is_deepspeed_enabled": "DeepSpeed keeps masters itself: use its own bf16 or fp16 settings",
}


def enable(trainer: Any, opt_level: "Level" = "O5", *, save_dtype: Any = torch.float32, **properties: Any) -> None:
    """Make a Trainer train in mixed precision, whatever dtype its model was loaded in: one line before ``train()``.

    Accumulation, clipping, evaluation, generation and callbacks stay as they are. Every ``checkpoint-N`` holds the
    masters' float32 bits, and the loss scale where there is one: ``resume_from_checkpoint`` gives the bits of a run
    that was not interrupted. ``mpinit.undo(trainer.model)`` takes everything back.

    Args:
        trainer: a Trainer, or of a subclass; its optimizer was given to it, or is going to be made by it.
        opt_level: as of :func:`mpinit.initialize`. Default "O5": bfloat16 weights, float32 masters.
        save_dtype: of weights and config that ``trainer.save_model`` and ``model.save_pretrained`` write outside of
            ``train()``: float32, the masters' bits, or a 16-bit type. Default float32.
        **properties: any other argument of :func:`mpinit.initialize`. ``keep_fp32`` is, by default, what Transformers
            and PEFT leave float32 too: buffers that are not loaded (rotary frequencies), and adapters that are trained.

    Raises:
        ValueError: the Trainer casts by itself, makes its model in ``train()``, or leaves training to FSDP, DeepSpeed
            or DataParallel. Nothing was changed.

    Example:
        >>> import mpinit, transformers
        >>> from mpinit.integrations.transformers import enable
        >>> config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
        >>> trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config))
        >>> enable(trainer, verbosity=0)  # and then: trainer.train()
        >>> trainer.model.dtype
        torch.bfloat16
        >>> mpinit.undo(trainer.model)
    """
    wanted = parse_dtype(save_dtype)
    _check(trainer)
    model, optimizer = trainer.model, registry.unwrapped(trainer.optimizer)
    given = [] if optimizer is None else [optimizer]
    if not {"keep_fp32", "config"} & properties.keys():
        properties["keep_fp32"] = _float32_as_usual(model)
    amp.initialize([model], given, opt_level, await_optimizers=optimizer is None, **properties)
    session = registry.of(model)
    if session is None:
        return
    if given:
        attach(trainer.accelerator, given)
    create_optimizer = MethodType(functools.partial(_create_optimizer, trainer.create_optimizer), trainer)
    session.patch(trainer, "create_optimizer", create_optimizer)
    # A Trainer fails on a scaler.pt where it has no scaler: the loss scale is in a file of ours, which a Trainer at
    # another level, or without mpinit, passes over.
    for name, method in (("_save_scaler", _save_loss_scale), ("_load_scaler", _load_loss_scale)):
        session.patch(trainer, name, MethodType(method, trainer))
    # Training goes on from a checkpoint, which is float32 whatever is asked for.
    save_in(model, lambda: torch.float32 if trainer.is_in_train else wanted)


def _save_loss_scale(trainer: Any, folder: str) -> None:
    session = registry.session_of(trainer.optimizer)
    if trainer.args.should_save and not all(scaler.is_identity for scaler in session.scalers):
        torch.save(amp.state_dict(trainer.optimizer), Path(folder, _LOSS_SCALE))


def _load_loss_scale(trainer: Any, folder: str | None) -> None:
    # The second is the Trainer's own: of a run with fp16=True.
    for file in [] if folder is None else [Path(folder, _LOSS_SCALE), Path(folder, "scaler.pt")]:
        if file.is_file():
            amp.load_state_dict(torch.load(file, weights_only=True), trainer.optimizer)
            return


def _check(trainer: Any) -> None:
    for name, instead in _INSTEAD.items():
        if functools.reduce(getattr, name.split("."), trainer):
            raise ValueError(f"trainer.{name} is set, and mpinit cannot be beside it: {instead}")
    if trainer.args.n_gpu > 1:
        raise ValueError(f"the Trainer runs {trainer.args.n_gpu} GPUs by DataParallel: start it with torchrun instead")
    check(trainer.accelerator)


def _float32_as_usual(model: Any) -> list[str]:
    """List what Transformers and PEFT keep in float32 over 16-bit weights: buffers in no checkpoint, and adapters."""
    saved = model.state_dict()
    computed = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and name not in saved]
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return computed + (trained if hasattr(model, "peft_config") else [])


def _create_optimizer(create: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    created = create(*args, **kwargs)
    if registry.of(created) is None:
        attach(trainer.accelerator, amp.add_optimizers(created))
    return created
