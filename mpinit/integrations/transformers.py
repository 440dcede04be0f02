"""Transformers: ``enable`` makes a ``Trainer`` train in mixed precision."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from .. import amp, registry
from ..basics.dtypes import parse_dtype
from ..config.reading import check_level, check_names
from ..pretrained import with_configs
from . import named, require
from .accelerate import attach, check
from .pretrained import save_in

if TYPE_CHECKING:
    from ..initialization import Level

transformers = require("transformers")

_LOSS_SCALE = "loss_scale.pt"
# Methods of a Trainer that are patched.
_METHODS = ("create_optimizer", "_save_scaler", "_load_scaler", "call_model_init")
_INSTEAD = {
    "args.fp16": "the opt_level sets the dtype: omit TrainingArguments(fp16=...), and pass enable() opt_level='O2'",
    "args.bf16": "the opt_level sets the dtype, and opt_level='O5' is bfloat16: pass bf16=False (in TRL's "
    "configurations, SFTConfig and the like, True is the default)",
    "args.fp16_full_eval": "the weights that are evaluated are 16-bit already: omit it",
    "args.bf16_full_eval": "the weights that are evaluated are 16-bit already: omit it",
    "is_fsdp_enabled": "FSDP replaces the parameters in train(): prepare with Accelerate, then mpinit.initialize",
    "is_deepspeed_enabled": "DeepSpeed keeps masters itself: use its own bf16 or fp16 settings",
}


def enable(trainer: Any, opt_level: "Level" = "O5", *, save_dtype: Any = torch.float32, **properties: Any) -> None:
    """Make a Trainer train in mixed precision, from a model of any dtype. Call it once before ``train()``.

    Accumulation, clipping, evaluation, generation and callbacks work as before. Each ``checkpoint-N`` has the masters'
    float32 values and the loss scale. A run resumed by ``resume_from_checkpoint`` is equal, bit for bit, to one without
    interruption. Each model that ``train()`` or ``hyperparameter_search()`` makes by ``model_init`` is initialised.
    ``mpinit.undo(trainer.model)`` undoes it.

    Args:
        trainer: a Trainer, or an instance of a subclass. Its optimizer may be passed to it or be created by it.
        opt_level: as in :func:`mpinit.initialize`. Default "O5": bfloat16 weights, float32 masters.
        save_dtype: the dtype of weights that ``trainer.save_model`` and ``model.save_pretrained`` write outside of
            ``train()``, and of the config: float32 (the masters' values) or a 16-bit dtype. Default float32.
        **properties: any other argument of :func:`mpinit.initialize`. The default of ``keep_fp32`` is the tensors that
            Transformers, Diffusers and PEFT keep in float32: buffers that are not in checkpoints (rotary frequencies),
            those that a library's own lists name (a log line names them), and the weights that PEFT adds.

    Raises:
        TypeError: ``trainer`` is not a Trainer.
        ValueError: there is no such level, the model is initialised already, or the Trainer casts by itself, or uses
            FSDP, DeepSpeed or DataParallel. Nothing was changed.

    Example:
        >>> import mpinit, transformers
        >>> from mpinit.integrations.transformers import enable
        >>> config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
        >>> trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config))
        >>> enable(trainer)  # and then: trainer.train()
        >>> trainer.model.dtype
        torch.bfloat16
        >>> mpinit.undo(trainer.model)
    """
    wanted = parse_dtype(save_dtype)
    check_level(opt_level)
    check_names(properties, "enable() has no keyword", also=("enabled", "process_group", "config"))
    _check(trainer)
    model, optimizer = trainer.model, registry.unwrapped(trainer.optimizer)
    initialised = [] if optimizer is None else [optimizer]
    own_methods = {name: vars(trainer)[name] for name in _METHODS if name in vars(trainer)}
    again = functools.partial(enable, trainer, opt_level, save_dtype=save_dtype, **properties)
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
    if trainer.model_init is not None:
        call_model_init = MethodType(functools.partial(_initialize_new_model, again, own_methods), trainer)
        session.patch(trainer, "call_model_init", call_model_init)
    # Not in scaler.pt: a Trainer without a scaler fails on that file. Trainers without mpinit ignore loss_scale.pt.
    for name, method in (("_save_scaler", _save_loss_scale), ("_load_scaler", _load_loss_scale)):
        session.patch(trainer, name, MethodType(method, trainer))
    # Checkpoints of train() are always float32, because training resumes from them.
    if with_configs(model):
        save_in(model, lambda: torch.float32 if trainer.is_in_train else wanted)


def _save_loss_scale(trainer: Any, folder: str) -> None:
    session = registry.session_of(trainer.model)
    if trainer.args.should_save and session.view.scales_losses:
        torch.save(amp.state_dict(trainer.optimizer), Path(folder, _LOSS_SCALE))


def _load_loss_scale(trainer: Any, folder: str | None) -> None:
    # The second is the Trainer's own file, of a run with fp16=True.
    for file in [] if folder is None else [Path(folder, _LOSS_SCALE), Path(folder, "scaler.pt")]:
        if file.is_file():
            amp.load_state_dict(torch.load(file, weights_only=True), trainer.optimizer)
            return


def _check(trainer: Any) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(
            f"enable needs a transformers.Trainer, not {named(trainer)}: pass the Trainer that trains the "
            "model, or pass model and optimizer to mpinit.initialize"
        )
    for name, instead in _INSTEAD.items():
        if functools.reduce(getattr, name.split("."), trainer):
            raise ValueError(f"trainer.{name} is set, which conflicts with mpinit: {instead}")
    if trainer.args.n_gpu > 1:
        raise ValueError(f"the Trainer runs {trainer.args.n_gpu} GPUs by DataParallel: start it with torchrun instead")
    check(trainer.accelerator)
    if (session := registry.of(trainer.model)) is not None:
        raise ValueError(
            f"the Trainer's model is initialised already, in {session.describe()}: call enable once, before train(), "
            "and mpinit.undo(trainer.model) before another level"
        )


def _float32_as_usual(model: Any) -> list[str]:
    """List the tensors that Transformers, Diffusers and PEFT keep in float32 where weights are in a 16-bit dtype.

    These are buffers in no checkpoint and PEFT's own trained weights; ``initialize`` adds what a library lists. A
    trained layer of the model itself (a classifier, ``modules_to_save``, biases) has 16-bit inputs, so it is cast, too.
    """
    saved = model.state_dict()
    computed = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and name not in saved]
    tuned = _tuned(model) if hasattr(model, "peft_config") else []
    return list(dict.fromkeys([*computed, *tuned]))


# Under these names modules of PEFT have modules of the model itself.
_OF_THE_MODEL = ("base_layer", "base_model", "model", "original_module", "modules_to_save", "ln_tuning_layers")


def _tuned(model: Any) -> list[str]:
    """List the trained weights that PEFT has added, whose inputs it casts to float32."""
    found = []
    pending: list[tuple[str, Any, bool]] = [("", model, True)]
    while pending:
        path, module, is_added = pending.pop()
        is_added = is_added or type(module).__module__.startswith("peft.")
        if is_added:
            own = module.named_parameters(path, recurse=False)
            found += [name for name, weight in own if weight.requires_grad]
            # VeRA's matrices, beside which its trained vectors compute.
            buffers = module.named_buffers(path, recurse=False)
            found += [name for name, buffer in buffers if buffer.is_floating_point()]
        for name, child in module.named_children():
            pending.append((f"{path}.{name}" if path else name, child, is_added and name not in _OF_THE_MODEL))
    return found


def _initialize_new_model(
    again: Callable[[], None], own_methods: dict[str, Any], trainer: Any, trial: Any = None
) -> Any:
    """Make the model of a run of ``train()``, in place of the one before, and initialise it."""
    if trainer.model is not None:
        amp.undo(trainer.model)
    else:  # a search has dropped the model of the last trial, and its session with it
        trainer.accelerator.scaler = None
    for name in _METHODS:
        vars(trainer).pop(name, None)
    vars(trainer).update(own_methods)
    trainer.model = trainer.call_model_init(trial)
    trainer.optimizer = trainer.lr_scheduler = None
    again()
    return trainer.model


def _create_optimizer(create: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    created = create(*args, **kwargs)
    if registry.of(created) is None:
        attach(trainer.accelerator, amp.add_optimizers(_layer_wise(trainer, created) or created))
    return created


def _layer_wise(trainer: Any, created: Any) -> list[Any]:
    """Return the optimizers that step one weight each inside of backward, where the Trainer's own is a dummy.

    Raises:
        ValueError: gradients are scaled, and would be stepped before they are unscaled.
    """
    optimizers = list(getattr(registry.unwrapped(created), "optimizer_dict", {}).values())
    session = registry.of(trainer.model)
    if optimizers and session is not None and session.view.scales_losses:
        raise ValueError(
            f"optim={str(trainer.args.optim)!r} steps each weight inside of the backward pass, where gradients are "
            "still scaled: use enable(trainer, 'O5'), enable(trainer, ..., loss_scale=1.0), or an optim that is not "
            "layer-wise"
        )
    return optimizers
