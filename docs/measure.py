"""Runs whose figures the pages show: ``python docs/measure.py audit`` writes docs/measured/audit.json.

All train one small transformer on the source of Python's standard library. ``python
docs/figures.py`` makes the tables and the plot of what is there.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo.stdlib_text import LENGTH, Writer, load_text

import mpinit

MEASURED: Final = Path(__file__).resolve().parent / "measured"
BATCH: Final = 8
RATES: Final = (1e-3, 1e-4, 1e-5, 1e-6)


@functools.cache
def _text() -> Tensor:
    return load_text().long()


def batches(steps: int, seed: int) -> Iterator[Tensor]:
    """Draw random pieces of the text, one byte longer than the model's input."""
    text, chance = _text(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=chance)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean cross entropy of the next byte, in float32."""
    logits = model(batch[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def _trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Writer(96, 3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(400, seed=0):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def checkpoint() -> Writer:
    """Return the model after 400 steps in float32, with weights rounded to bfloat16, as in published checkpoints."""
    model = Writer(96, 3, 4)
    model.load_state_dict(_trained())
    return model.bfloat16().float()


# -- what an audit foresees -------------------------------------------------------------------------------------------


def _muon(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=lr)


_OPTIMIZERS: Final[Mapping[str, Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, betas 0.9 and 0.95": functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)),
    "AdamW, weight decay 0.1": functools.partial(torch.optim.AdamW, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, centered": functools.partial(torch.optim.RMSprop, centered=True),
    "RMSprop, momentum 0.9": functools.partial(torch.optim.RMSprop, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "Muon": _muon,
    "SGD": torch.optim.SGD,
    "SGD, momentum 0.9": functools.partial(torch.optim.SGD, momentum=0.9),
    "SGD, Nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "ASGD": torch.optim.ASGD,
}


def audit() -> dict[str, Any]:
    """Measure the share of bfloat16 weights that a step does not change: predicted, and in 16 steps after 8 others."""
    rows = []
    for name, make in _OPTIMIZERS.items():
        for rate in RATES:
            model = checkpoint().bfloat16()
            optimizer = make(model.parameters(), lr=rate)
            data = list(batches(25, seed=1))
            loss_of(model, data[0]).backward()  # for those whose steps depend on the gradients
            foreseen = mpinit.audit(model, optimizer).stuck
            if not foreseen:
                raise SystemExit(f"nothing is foreseen of {name}")
            weights = [p for n, p in model.named_parameters() if n in foreseen]
            still, seen = 0, 0
            for number, batch in enumerate(data[1:]):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                before = [weight.detach().clone() for weight in weights]
                optimizer.step()
                if number >= 8:
                    still += sum(int((w == old).sum()) for w, old in zip(weights, before, strict=True))
                    seen += sum(weight.numel() for weight in weights)
            numbers = {n: p.numel() for n, p in model.named_parameters() if n in foreseen}
            share = sum(foreseen[n] * count for n, count in numbers.items()) / sum(numbers.values())
            shares = {"foreseen": round(share, 4), "measured": round(still / seen, 4)}
            rows.append({"optimizer": name, "rate": rate, **shares})
    errors = sorted(abs(row["foreseen"] - row["measured"]) for row in rows)
    return {
        "torch": torch.__version__,
        "rows": rows,
        "mean error": round(sum(errors) / len(errors), 4),
        "median error": round(errors[len(errors) // 2], 4),
        "largest error": round(errors[-1], 4),
    }


# -- what is trained, and what is served ------------------------------------------------------------------------------


_WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    'O5, "model"': {"opt_level": "O5", "master_weights": "model"},
}


def fidelity() -> dict[str, Any]:
    """Compare log-probabilities of the next byte after 100 steps, in training and of a plain 16-bit model."""
    rows = []
    for name, asked in _WAYS.items():
        model = checkpoint()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mpinit.initialize(model, optimizer, **asked)
        for batch in batches(100, seed=2):
            optimizer.zero_grad()
            with mpinit.scale_loss(loss_of(model, batch), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        texts = torch.cat(list(batches(16, seed=3)))

        def chosen(logits: Tensor, texts: Tensor = texts) -> Tensor:
            return logits.float().log_softmax(-1).gather(-1, texts[:, 1:, None]).squeeze(-1)

        each = mpinit.fidelity(model, texts[:, :-1], output=chosen)
        whole = mpinit.fidelity(model, texts[:, :-1], output=lambda y: chosen(y).sum(1), tolerance=math.log(1.2))
        rows.append(
            {
                "way": name,
                "mean": float(f"{each.mean:.2g}"),
                "largest": float(f"{each.largest:.2g}"),
                "sequences beyond a ratio of 1.2": round(whole.share * len(texts)),
                "sequences": len(texts),
                "first module": each.first_module,
            }
        )
        mpinit.undo(model)
    return {"torch": torch.__version__, "rows": rows}


# -- what it costs to look at the gradients ----------------------------------------------------------------------------


def _nets() -> dict[str, nn.Module]:
    blocks = [part for _ in range(40) for part in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())]
    return {
        "40 x (Linear 32, LayerNorm), 160 weights": nn.Sequential(*blocks, nn.Linear(32, 32)),
        "8 x Linear 1024, 8 million numbers": nn.Sequential(
            *[nn.Linear(1024, 1024) for _ in range(8)], nn.Linear(1024, 32)
        ),
    }


def skipping() -> dict[str, Any]:
    """Measure a step of AdamW at O5 with the check of gradients over one without, in turns; medians of 50 steps."""
    torch.set_num_threads(1)
    rows = []
    for name, net in _nets().items():
        width, times = next(net.parameters()).shape[1], {True: list[float](), False: list[float]()}
        pairs = {}
        for skips in times:
            model = copy.deepcopy(net)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            mpinit.initialize(model, optimizer, "O5", skip_nonfinite=skips)
            pairs[skips] = model, optimizer
        x = torch.randn(16, width)
        for number in range(60):
            for skips in (True, False) if number % 2 else (False, True):
                model, optimizer = pairs[skips]
                begin = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                times[skips].append(time.perf_counter() - begin)
        medians = {skips: statistics.median(each[10:]) for skips, each in times.items()}
        rows.append(
            {
                "network": name,
                "milliseconds without": round(1000 * medians[False], 2),
                "milliseconds with": round(1000 * medians[True], 2),
                "ratio": round(
                    statistics.median(a / b for a, b in zip(times[True][10:], times[False][10:], strict=True)), 3
                ),
            }
        )
    return {"torch": torch.__version__, "rows": rows}


# -- what masters are worth --------------------------------------------------------------------------------------------


def _nearest(values: Tensor, bits: int) -> Tensor:
    """Round float32 numbers to a number of bits, to nearest."""
    rest = 32 - bits
    whole = values.view(torch.int32)
    return ((whole + (1 << (rest - 1))) >> rest << rest).view(torch.float32)


def _stochastic(values: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16, stochastically."""
    noise = torch.randint(1 << 16, values.shape, generator=chance, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) >> 16 << 16).view(torch.float32)


def _by_hand(model: nn.Module, rate: float, steps: int, rounded: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Train bfloat16 weights with float32 masters, which ``rounded`` rounds after each step."""
    model.bfloat16()
    weights = list(model.parameters())
    kept = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(kept, lr=rate)
    for batch in batches(steps, seed=4):
        model.zero_grad()
        loss_of(model, batch).backward()
        for own, weight in zip(kept, weights, strict=True):
            own.grad = None if weight.grad is None else weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for own, weight in zip(kept, weights, strict=True):
                own.copy_(rounded(own))
                weight.copy_(own)
    return [own.detach() for own in kept]


def _plain(model: nn.Module, rate: float, steps: int, dtype: torch.dtype) -> list[Tensor]:
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in batches(steps, seed=4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [p.detach().float() for p in model.parameters()]


def _ours(model: nn.Module, rate: float, steps: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    for batch in batches(steps, seed=4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    mpinit.undo(model)
    return [p.detach() for p in model.parameters()]


def masters() -> dict[str, Any]:
    """Measure how much of the progress of 200 float32 steps remains with fewer bits, at four learning rates."""
    steps, chance = 200, torch.Generator().manual_seed(0)
    ways: dict[str, Callable[[nn.Module, float], list[Tensor]]] = {
        "float32": lambda model, rate: _plain(model, rate, steps, torch.float32),
        "bfloat16 alone": lambda model, rate: _plain(model, rate, steps, torch.bfloat16),
        "bfloat16, stochastic rounding": lambda m, rate: _by_hand(m, rate, steps, lambda v: _stochastic(v, chance)),
        "24 bits": lambda model, rate: _by_hand(model, rate, steps, lambda values: _nearest(values, 24)),
        "32 bits exact (O5, split)": lambda model, rate: _ours(model, rate, steps),
    }
    unseen = list(batches(24, seed=5))

    def evaluated(weights: list[Tensor]) -> float:
        model = checkpoint()
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), weights, strict=True):
                parameter.copy_(values)
            return sum(float(loss_of(model, batch).double()) for batch in unseen) / len(unseen)

    before = evaluated([p.detach() for p in checkpoint().parameters()])
    rows = []
    for rate in (1e-4, 1e-5, 1e-6, 1e-7):
        gains = {name: before - evaluated(way(checkpoint(), rate)) for name, way in ways.items()}
        kept = {name: round(gain / gains["float32"], 3) for name, gain in gains.items() if name != "float32"}
        rows.append({"rate": rate, "float32 takes off": float(f"{gains['float32']:.3g}"), "kept": kept})
    return {"torch": torch.__version__, "steps": steps, "loss before": round(before, 4), "rows": rows}


RUNS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "audit": audit,
    "fidelity": fidelity,
    "skipping": skipping,
    "masters": masters,
}


def main() -> int:
    """Run the named measurements and write their results."""
    for name in sys.argv[1:] or RUNS:
        MEASURED.mkdir(exist_ok=True)
        (MEASURED / f"{name}.json").write_text(json.dumps(RUNS[name](), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
