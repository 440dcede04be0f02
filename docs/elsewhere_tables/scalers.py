"""Dynamic loss scales: what they do after overflows, at the bottom and at the top."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from . import Row, Table, cell

JAX = "jax==0.10.2"
# A scaler is made from its first scale, its growth interval and its hysteresis, and is a function of "was there an
# overflow?" that returns the next scale.
Make = Callable[[float, int, int], Callable[[bool], float]]


def _shown(scale: float) -> str:
    if scale == 0 or math.isinf(scale) or math.isnan(scale):
        return str(scale)
    power = math.log2(scale)
    return f"2^{power:.0f}" if power == round(power) else f"{scale:.4g}"


def _measure(make: Make, has_hysteresis: bool) -> dict[str, str]:
    def trace() -> str:
        update = make(2.0**16, 2, 1)
        return ", ".join(_shown(update(overflow == "o")) for overflow in "oggggoog")

    def bottom() -> str:
        update = make(2.0**16, 1, 1)
        low = [update(True) for _ in range(300)][-1]
        return f"{_shown(low)}, then {_shown([update(False) for _ in range(3)][-1])}"

    def top() -> str:
        update = make(2.0**16, 1, 1)
        high = [update(False) for _ in range(300)][-1]
        return f"{_shown(high)}, then {_shown(update(True))}"

    def hysteresis() -> str:
        update = make(2.0**16, 100, 3)
        return ", ".join(_shown(update(overflow == "o")) for overflow in "oogoog")

    return {
        "overflow, 4 good, 2 overflows, good": cell(trace),
        "300 overflows, then 3 good": cell(bottom),
        "300 good, then an overflow": cell(top),
        "hysteresis 3: 2 overflows, good, 2 overflows, good": cell(hysteresis) if has_hysteresis else "has none",
    }


def _row(packages: str, make: Make, hysteresis: bool = False, torch: bool = True) -> Row:
    return Row(packages, partial(_measure, make, hysteresis), torch)


def _torch(init: float, interval: int, hysteresis: int) -> Callable[[bool], float]:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def update(overflow: bool) -> float:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        return float(scaler.get_scale())

    return update


def _mpinit(init: float, interval: int, hysteresis: int) -> Callable[[bool], float]:
    import torch

    import mpinit

    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = mpinit.DynamicLossScale(
        init=init, growth_interval=interval, hysteresis=hysteresis, max=2.0**24, max_consecutive_skips=1_000
    )
    mpinit.initialize(model, optimizer, "O2", loss_scale=rule, verbosity=0)

    def update(overflow: bool) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum() * (float("inf") if overflow else 2.0**-12)
        with mpinit.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return mpinit.loss_scale(optimizer)

    return update


def _jmp(init: float, interval: int, hysteresis: int) -> Callable[[bool], float]:
    import jax.numpy as jnp
    import jmp

    state = [jmp.DynamicLossScale(jnp.float32(init), period=interval)]

    def update(overflow: bool) -> float:
        state[0] = state[0].adjust(jnp.array(not overflow))
        return float(state[0].loss_scale)

    return update


def _flax(init: float, interval: int, hysteresis: int) -> Callable[[bool], float]:
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    state = [DynamicScale(growth_interval=interval, scale=jnp.float32(init))]

    def update(overflow: bool) -> float:
        factor = jnp.float32("inf" if overflow else 0)
        state[0] = state[0].value_and_grad(lambda w: (w * factor).sum())(jnp.ones(1))[0]
        return float(state[0].scale)

    return update


def _deepspeed(init: float, interval: int, hysteresis: int, consecutive: bool = False) -> Callable[[bool], float]:
    import torch
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist.get_rank = lambda: 1  # of its log only
    scaler = loss_scaler.DynamicLossScaler(init, interval, 1.0, hysteresis, consecutive, dtype=torch.half)

    def update(overflow: bool) -> float:
        scaler.update_scale(overflow)
        return float(scaler.loss_scale)

    return update


def _optax() -> dict[str, str]:
    import jax.numpy as jnp
    import optax

    transform = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    weights = jnp.ones(1)
    state, seen = transform.init(weights), []
    for overflow in "oogooo":
        updates, state = transform.update(jnp.full(1, jnp.inf if overflow == "o" else 0.0), state)
        weights = optax.apply_updates(weights, updates)
        seen.append(f"{float(weights[0]):g}")
    return dict.fromkeys(COLUMNS, "scales nothing") | {
        COLUMNS[0]: "a weight through 2 overflows, good, 3 overflows: " + ", ".join(seen)
    }


COLUMNS = (
    "overflow, 4 good, 2 overflows, good",
    "300 overflows, then 3 good",
    "300 good, then an overflow",
    "hysteresis 3: 2 overflows, good, 2 overflows, good",
)
_ROWS = {
    "torch.amp.GradScaler": _row("", _torch),
    "mpinit.DynamicLossScale": _row("", _mpinit, True),
    "DynamicLossScale of jmp": _row(f"jmp==0.0.4 {JAX}", _jmp, torch=False),
    "DynamicScale of flax": _row(f"flax==0.12.8 {JAX}", _flax, torch=False),
    "DynamicLossScaler of deepspeed": _row("deepspeed==0.19.8", _deepspeed, True),
    "DynamicLossScaler of deepspeed, consecutive_hysteresis": _row(
        "deepspeed==0.19.8", partial(_deepspeed, consecutive=True), True
    ),
    "apply_if_finite of optax": Row(f"optax==0.2.8 {JAX}", _optax, torch=False),
}

_TEXT = """
Scales after each step. They begin at 2^16; the scale may grow after 2 good steps in the first column, after every good
step in the next two, and after 100 in the last. [Loss scaling](../explanation/loss-scaling.md) has mpinit's rule.
"""

TABLES = (Table("Loss scales", _TEXT, COLUMNS, _ROWS),)
