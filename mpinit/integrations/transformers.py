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
    """Make a Trainer train in mixed precision, from a model of any dtype. Call it once before ``train()``.

    Accumulation, clipping, evaluation, generation and callbacks work as before. Each ``checkpoint-N`` has the masters'
    float32 values and the loss scale. A run resumed by ``resume_from_checkpoint`` is equal, bit for bit, to one without
    interruption. ``mpinit.undo(trainer.model)`` undoes it.

    Args:
        trainer: a Trainer, or an instance of a subclass. Its optimizer may be passed to it or be created by it.
        opt_level: as in :func:`mpinit.initialize`. Default "O5": bfloat16 weights, float32 masters.
        save_dtype: the dtype of weights that ``trainer.save_model`` and ``model.save_pretrained`` write outside of
            ``train()``, and of the config: float32 (the masters' values) or a 16-bit dtype. Default float32.
        **properties: any other argument of :func:`mpinit.initialize`. The default of ``keep_fp32`` is the tensors that
            Transformers and PEFT keep in float32: buffers that are not in checkpoints (rotary frequencies), and
            adapters that are trained.

    Raises:
        ValueError: the Trainer casts by itself, creates its model in ``train()``, or uses FSDP, DeepSpeed or
            DataParallel. Nothing was changed.

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
    initialised = [] if optimizer is None else [optimizer]
    if not {"keep_fp32", "config"} & properties.keys():
        properties["keep_fp32"] = _float32_as_usual(model)
    amp.initialize([model], initialised, opt_level, await_optimizers=optimizer is None, **properties)
    session = registry.of(model)
    if session is None:
        return
    if initialised:
        attach(trainer.accelerator, initialised)
    create_optimizer = MethodType(functools.partial(_create_optimizer, trainer.create_optimizer), trainer)
    session.patch(trainer, "create_optimizer", create_optimizer)
    # Not in scaler.pt: a Trainer without a scaler fails on that file. Trainers without mpinit ignore loss_scale.pt.
    for name, method in (("_save_scaler", _save_loss_scale), ("_load_scaler", _load_loss_scale)):
        session.patch(trainer, name, MethodType(method, trainer))
    # Checkpoints of train() are always float32, because training resumes from them.
    save_in(model, lambda: torch.float32 if trainer.is_in_train else wanted)


def _save_loss_scale(trainer: Any, folder: str) -> None:
    session = registry.session_of(trainer.optimizer)
    if trainer.args.should_save and not all(scaler.is_identity for scaler in session.scalers):
        torch.save(amp.state_dict(trainer.optimizer), Path(folder, _LOSS_SCALE))


def _load_loss_scale(trainer: Any, folder: str | None) -> None:
    # The second is the Trainer's own file, of a run with fp16=True.
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
    """List the tensors that Transformers and PEFT keep in float32: buffers in no checkpoint, and trained adapters."""
    saved = model.state_dict()
    computed = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and name not in saved]
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return computed + (trained if hasattr(model, "peft_config") else [])


def _create_optimizer(create: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    created = create(*args, **kwargs)
    if registry.of(created) is None:
        attach(trainer.accelerator, amp.add_optimizers(created))
    return created
