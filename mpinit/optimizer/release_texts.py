"""What gradient release refuses, in words: why, and the way out."""

from __future__ import annotations

from typing import Any, Final

from ..basics.tables import counted

OTHER_PROCESSES: Final = (
    "gradient_release=True steps parameters as soon as backward() leaves their gradients, and where there are other "
    "processes these are added up over ranks later (DistributedDataParallel, fully_shard, tensor and pipeline "
    "parallel meshes of one or more dimensions): leave gradient_release off there"
)
TWO_OPTIMIZERS: Final = (
    "in the groups of two optimizers, and gradient_release=True frees a gradient when one of them has stepped its "
    "parameter: leave it to one, or leave gradient_release off"
)
CREATE_GRAPH: Final = (
    "backward(create_graph=True) asks for gradients of gradients, and gradient_release=True frees gradients as they "
    "arrive: use torch.autograd.grad(..., create_graph=True), or leave gradient_release off"
)
CAPTURING: Final = (
    "gradient_release=True counts steps in Python, which a CUDA graph does not replay: leave it off, or do not capture"
)
HOOK_ARGUMENTS: Final = "a step hook gives step() arguments, and gradient_release=True steps without any"
DELAYS: Final = (
    "mpinit.scale_loss(..., delay_unscale=True) says that more backward passes of the step follow, and "
    "gradient_release=True has one a step: add the losses up and call backward() once, or leave gradient_release off"
)
CLOSURE: Final = (
    "optimizer.step(closure) evaluates the loss inside of the step, and gradient_release=True steps inside of "
    "backward(): call backward() and then step(), or leave gradient_release off"
)
ARGUMENTS: Final = (
    "optimizer.step() was given arguments, and gradient_release=True has stepped without: leave them out, or leave "
    "gradient_release off"
)
MASTERS_OWN: Final = (
    "the gradient of a float32 master was replaced before backward(), which has added to its weight's: with "
    "gradient_release=True give the weight's gradient (model.parameters()), or none"
)
WAY_ON: Final = (
    "Parameters that were stepped are one step ahead of the others: load a checkpoint, or go on as it is with "
    "optimizer.zero_grad()"
)


def done(stepped: int, everyone: int, failed: bool) -> str:
    """What has happened to a step that has begun.

    Args:
        stepped: how many parameters were stepped.
        everyone: how many there are.
        failed: whether the backward pass has raised.
    """
    of_all = f"{stepped} of {counted(everyone, 'parameter')}"
    if failed:
        return f"the last backward pass has failed after stepping {of_all} (gradient_release=True)"
    return f"the last backward pass has stepped {of_all} already (gradient_release=True)"


def second_pass(was_done: str, failed: bool) -> str:
    """A backward pass that comes too early."""
    if failed:
        return f"backward() was called, but {was_done}. {WAY_ON}"
    return (
        f"a second backward() was called before optimizer.step(), and {was_done}: gradients do not accumulate then. "
        "Add the losses up and call backward() once, call optimizer.step() in between, or leave gradient_release off"
    )


def cleared(was_done: str) -> str:
    """``zero_grad()`` in the place of ``step()``."""
    return (
        f"optimizer.zero_grad() was called between backward() and optimizer.step(), and {was_done}: call "
        "optimizer.step() first, which finishes the step; to drop a step, decide before backward()"
    )


def came_again(name: str) -> str:
    """A gradient that was not final."""
    return (
        f"a gradient came to {name!r} again after it was stepped, out of a checkpointed part of the model that makes "
        "use of it too: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave gradient_release "
        f"off. {WAY_ON}"
    )


def looks(what: str, stepped: int) -> str:
    """Somebody who looks at gradients that are gone."""
    return (
        f"{what} looks at all gradients between backward() and step(), and {stepped} of them were used and freed "
        "already (gradient_release=True): there is no norm of all gradients to clip by. Leave gradient_release off, "
        "or bound updates in another way (a warm-up of the learning rate, an optimizer that normalises them)"
    )


def changed(key: str, before: Any, now: Any) -> str:
    """An option that not all parameters would be stepped with."""
    return (
        f"{key!r} of a parameter group was changed from {before!r} to {now!r} between backward() and optimizer.step(), "
        "and with gradient_release=True parameters were stepped in backward(): set it back, and change it before "
        "backward() or after step() (a learning-rate scheduler's step() belongs after optimizer.step())"
    )
