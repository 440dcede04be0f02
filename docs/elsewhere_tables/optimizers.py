"""Optimizers on bfloat16 parameters, alone and under O5."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from . import TIMM, Row, Table, import_timm

if TYPE_CHECKING:
    import torch

STEP, STEPS = 2.0**-10, 8
OPTIMI, POPULAR, HEAVY = "torch-optimi==0.3.3 packaging==26.4", "pytorch-optimizer==4.1.0", "heavyball==3.2.1"


def _model(dtype: torch.dtype, sparse: bool) -> torch.nn.Module:
    """Make a model of one weight, 64 by 64 ones, whose gradient is its input."""
    import torch

    class OneWeight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(64)
            return (
                (torch.nn.functional.embedding(rows, self.weight, sparse=True) if sparse else self.weight).mul(x).sum()
            )

    return OneWeight()


class Run:
    """A model of one weight with an optimizer of it, trained on chosen gradients."""

    def __init__(
        self, make: Any, rate: float, dtype: torch.dtype, level: str = "", sparse: bool = False, closure: bool = False
    ):
        import torch

        torch.manual_seed(0)
        self.model, self.closure = _model(dtype, sparse), closure
        self.optimizer = make(self.model, rate)
        if level:
            import mpinit

            mpinit.initialize(self.model, self.optimizer, opt_level=level)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def train(self, gradients: list[torch.Tensor]) -> None:
        """Step once with each gradient."""
        for gradient in gradients:

            def loss(gradient: torch.Tensor = gradient) -> Any:
                self.optimizer.zero_grad()
                value = self.model(gradient.to(self.model.weight.dtype))
                value.backward()
                return value

            if self.closure:
                self.optimizer.step(loss)
            else:
                loss()
                self.optimizer.step()

    def values(self) -> torch.Tensor:
        """Return the weight, or its master, in float32."""
        return self.model.state_dict()["weight"].detach().float()

    def saved(self) -> Any:
        """Return both states as they are read from a file."""
        import torch

        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def load(self, saved: Any) -> None:
        """Load both states."""
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def dtypes(self) -> str:
        """Name the dtypes of the states with more than one number."""
        return ", ".join(sorted({_dtype(tensor) for tensor in _tensors(list(self.optimizer.state.values()))})) or "none"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel() > 1:
            yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(vars(value))


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return name if type(tensor).__name__ in ("Tensor", "Parameter") else type(tensor).__name__


def _gradients(count: int, seed: int, signs: bool = False) -> list[torch.Tensor]:
    import torch

    chance = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(64, 64, generator=chance).bfloat16().float() for _ in range(count)]
    return [drawn[0].sign()] * count if signs else drawn


def _calibrated(run: Any, rate: float) -> float:
    """Find the learning rate at which eight float32 steps move the weights by 8 times 2^-10, on average."""
    import torch

    for _ in range(40):
        trial = run(rate, torch.float32)
        trial.train(_gradients(STEPS, 0, signs=True))
        moved = (trial.values() - 1).abs().mean().item()
        if abs(moved / (STEPS * STEP) - 1) < 0.003:
            return rate
        if not moved < float("inf"):
            break
        rate *= min(max(STEPS * STEP / max(moved, 1e-30), 0.25), 4)
    raise ValueError(f"no learning rate moves float32 weights by {STEPS * STEP}; {rate:.3g} moves them by {moved:.3g}")


def _resumed(run: Any, rate: float, dtype: torch.dtype, level: str) -> tuple[str, str]:
    """Say which dtypes states have before and after loading, and whether five steps after it are the same bits."""
    import torch

    states = "-"
    try:
        before = run(rate, dtype, level)
        before.train(_gradients(5, 1))
        states, saved = before.dtypes(), before.saved()
        after = run(rate, dtype, level)
        after.load(saved)
        states = states if after.dtypes() == states else f"{states} → {after.dtypes()}"
        for each in (before, after):
            torch.manual_seed(1)
            each.train(_gradients(5, 2))
    except Exception as error:
        return states, type(error).__name__
    return states, "yes" if torch.equal(before.values(), after.values()) else "no"


def _moved(run: Any, rate: float, dtype: torch.dtype, level: str) -> tuple[str, torch.Tensor]:
    trial = run(rate, dtype, level)
    trial.train(_gradients(STEPS, 0, signs=True))
    return f"{(trial.values() - 1).abs().mean().item() / (STEPS * STEP):.0%}".replace("%", " %"), trial.values()


def measure(make: Any, rate: float = 1e-3, **options: bool) -> dict[str, str]:
    """Measure one optimizer."""
    import torch

    run = partial(Run, make, **options)
    rate = _calibrated(run, rate)
    cells = {}
    for way, level in (("alone", ""), ("O5", "O5")):
        dtype = torch.float32 if level else torch.bfloat16
        try:
            cells[f"moves, {way}"], values = _moved(run, rate, dtype, level)
            if level:
                exact = run(rate, torch.float32)
                exact.train(_gradients(STEPS, 0, signs=True))
                cells["O5 is float32"] = "yes" if torch.equal(values, exact.values()) else "no"
        except Exception as error:
            cells |= {f"moves, {way}": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]}
            cells |= {f"states, {way}": "-", f"resumes, {way}": "-"}
            continue
        states, resumes = _resumed(run, 32 * rate, dtype, level)
        if level and resumes != "yes":
            resumes += f"; in float32 alone: {_resumed(run, 32 * rate, dtype, '')[1]}"
        cells |= {f"states, {way}": states, f"resumes, {way}": resumes}
    return {"O5 is float32": "-"} | cells


COLUMNS = ("moves, alone", "moves, O5", "O5 is float32", "states, alone", "states, O5", "resumes, alone", "resumes, O5")


def _of(packages: str, path: str, rate: float = 1e-3, options: dict[str, bool] | None = None, **arguments: Any) -> Row:
    """Make the row of an optimizer that takes parameters and a learning rate."""

    def make(model: torch.nn.Module, lr: float) -> Any:
        module, name = path.split(":")
        return getattr(importlib.import_module(module), name)(model.parameters(), lr=lr, **copy.deepcopy(arguments))

    return Row(packages, partial(measure, make, rate, **options or {}))


def _heavy(name: str, **arguments: Any) -> Row:
    def make(model: torch.nn.Module, lr: float) -> Any:
        import heavyball

        heavyball.utils.compile_mode = None
        return getattr(heavyball, name)(model.parameters(), lr=lr, **arguments)

    return Row(HEAVY, partial(measure, make))


def _groups(packages: str, path: str, **settings: Any) -> Row:
    """Make the row of an optimizer with settings in its group of parameters."""

    def make(model: torch.nn.Module, lr: float) -> Any:
        module, name = path.split(":")
        return getattr(importlib.import_module(module), name)([{"params": list(model.parameters()), **settings}], lr=lr)

    return Row(packages, partial(measure, make))


def _low_rank(packages: str, path: str, **settings: Any) -> Row:
    return _groups(packages, path, rank=8, update_proj_gap=4, proj_type="std", **settings)


def _muon(name: str) -> Row:
    def make(model: torch.nn.Module, lr: float) -> Any:
        import muon

        return getattr(muon, name)(model.parameters(), lr=lr)

    return Row("muon-optimizer==0.1.0", partial(measure, make))


def _adam_mini() -> Row:
    def make(model: torch.nn.Module, lr: float) -> Any:
        import adam_mini

        return adam_mini.Adam_mini(model.named_parameters(), lr=lr, dim=64, n_heads=4)

    return Row("adam-mini==1.1.1", partial(measure, make))


def _timm(name: str) -> Row:
    return Row(TIMM, partial(measure, lambda model, lr: getattr(import_timm().optim, name)(model.parameters(), lr=lr)))


def _dotted(packages: str, module: str, names: str, prefix: str, **rates: float) -> dict[str, Row]:
    return {f"{name} of {prefix}": _of(packages, f"{module}:{name}", rates.get(name, 1e-3)) for name in names.split()}


_TORCH = {
    f"torch.optim.{name}": _of("", f"torch.optim:{name}")
    for name in [
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
} | {
    "torch.optim.SGD, momentum": _of("", "torch.optim:SGD", momentum=0.9),
    "torch.optim.AdamW, fused": _of("", "torch.optim:AdamW", fused=True),
    "torch.optim.LBFGS": _of("", "torch.optim:LBFGS", 1.0, {"closure": True}, max_iter=1),
    "torch.optim.SparseAdam": _of("", "torch.optim:SparseAdam", 1e-3, {"sparse": True}),
}

_OTHERS = {
    **_dotted(OPTIMI, "optimi", "Adam AdamW Adan Lion RAdam Ranger SGD StableAdamW", "torch-optimi"),
    "Adan of torch-optimi, kahan_sum": _of(OPTIMI, "optimi:Adan", kahan_sum=True),
    "AdamW of torch-optimi, kahan_sum off": _of(OPTIMI, "optimi:AdamW", kahan_sum=False),
    **_dotted(
        POPULAR,
        "pytorch_optimizer",
        "ADOPT AdEMAMix AdaBelief AdaBound AdaNorm Adai AdamP Adan CAME Grams Kron LARS LaProp Lamb "
        "Lion MADGRAD MARS NovoGrad QHAdam SOAP ScalableShampoo ScheduleFreeAdamW Shampoo SignSGD "
        "SimplifiedAdEMAMix StableAdamW Tiger Yogi",
        "pytorch-optimizer",
    ),
    "AdaFactor of pytorch-optimizer": _of(
        POPULAR, "pytorch_optimizer:AdaFactor", relative_step=False, scale_parameter=False
    ),
    "Ranger21 of pytorch-optimizer": _of(POPULAR, "pytorch_optimizer:Ranger21", num_iterations=1_000),
    "Muon of pytorch-optimizer": _groups(POPULAR, "pytorch_optimizer:Muon", use_muon=True),
    "Lion of pytorch-optimizer, kahan_sum": _of(POPULAR, "pytorch_optimizer:Lion", kahan_sum=True),
    "StableAdamW of pytorch-optimizer, kahan_sum off": _of(POPULAR, "pytorch_optimizer:StableAdamW", kahan_sum=False),
    **{
        f"{name} of heavyball": _heavy(name)
        for name in ["AdamW", "SOAP", "PSGDKron", "Muon", "ADOPT", "LaProp", "SFAdamW"]
    },
    "AdamW of heavyball, ECC bf16+8": _heavy("AdamW", ecc="bf16+8", param_ecc="bf16+8"),
    **_dotted(
        "schedulefree==1.4.1", "schedulefree", "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree", "schedulefree"
    ),
    "Prodigy of prodigyopt": _of("prodigyopt==1.1.2", "prodigyopt:Prodigy", 1e3, growth_rate=1.0),
    "Prodigy of pytorch-optimizer": _of(POPULAR, "pytorch_optimizer:Prodigy", 1e3, growth_rate=1.0),
    "DAdaptAdam of pytorch-optimizer": _of(POPULAR, "pytorch_optimizer:DAdaptAdam", 1e3, growth_rate=1.0),
    **{
        f"{name} of dadaptation": _of("dadaptation==3.2", f"dadaptation:{name}", 1e3, growth_rate=1.0)
        for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptAdan")
    },
    "CAME of came-pytorch": _of("came-pytorch==0.1.3", "came_pytorch:CAME"),
    "Lion of lion-pytorch": _of("lion-pytorch==0.2.5", "lion_pytorch:Lion"),
    "SingleDeviceMuon of muon-optimizer": _muon("SingleDeviceMuon"),
    "GaLoreAdamW of galore-torch": _low_rank("galore-torch==1.0", "galore_torch:GaLoreAdamW", scale=0.25),
    "AdamW of apollo-torch": _low_rank(
        "apollo-torch==1.0.3", "apollo_torch:APOLLOAdamW", proj="random", scale_type="channel", scale=1
    ),
    **_dotted("bitsandbytes==0.50.2", "bitsandbytes.optim", "AdamW AdamW8bit Lion8bit AdEMAMix8bit", "bitsandbytes"),
    **_dotted("torchao==0.18.0", "torchao.optim", "AdamW8bit AdamW4bit AdamWFp8 _AdamW", "torchao"),
    "_AdamW of torchao, bf16_stochastic_round": _of(
        "torchao==0.18.0", "torchao.optim:_AdamW", bf16_stochastic_round=True
    ),
    "Adafactor of transformers": _of(
        "transformers==5.24.0", "transformers:Adafactor", relative_step=False, scale_parameter=False
    ),
    "Adafactor of transformers, scale_parameter": _of(
        "transformers==5.24.0", "transformers:Adafactor", relative_step=False
    ),
    "AdaBelief of adabelief-pytorch": _of(
        "adabelief-pytorch==0.2.1", "adabelief_pytorch:AdaBelief", print_change_log=False
    ),
    **_dotted("madgrad==1.3", "madgrad", "MADGRAD MirrorMADGRAD", "madgrad"),
    "Adam_mini of adam-mini": _adam_mini(),
    **_dotted("flashoptim==0.1.4", "flashoptim", "FlashAdamW", "flashoptim"),
    "Adan of adan-pytorch": _of("adan-pytorch==0.1.0", "adan_pytorch:Adan"),
    "SophiaG of sophia-opt": _of("sophia-opt==0.2.2", "sophia_opt:SophiaG"),
    "Ranger of pytorch-ranger": _of("pytorch-ranger==0.1.1", "pytorch_ranger:Ranger"),
    "Kron of kron-torch": _of("kron-torch==0.3.3", "kron_torch:Kron"),
    **_dotted("adam-atan2-pytorch==0.4.1", "adam_atan2_pytorch", "AdamAtan2", "adam-atan2-pytorch"),
    "ProdigyPlusScheduleFree": _of("prodigy-plus-schedule-free==2.0.1", "prodigyplus:ProdigyPlusScheduleFree", 1.0),
    **_dotted(
        "torch-optimizer==0.3.0", "torch_optimizer", "DiffGrad Lamb NovoGrad QHAdam RangerQH Yogi", "torch-optimizer"
    ),
    **{f"{name} of timm": _timm(name) for name in ("Adopt", "Lamb", "Lars", "LaProp", "Lion", "Mars", "NvNovoGrad")},
}

_TEXT = """
A weight of 64 by 64 ones, in bfloat16, alone and under `mpinit.initialize(model, optimizer, "O5")`.

- *moves*: the learning rate is set so that eight float32 steps with a fixed gradient of ±1 move the weights by
  8 × 2⁻¹⁰ on average. The cell has the part of that movement that is left. Each step alone is a quarter of the distance
  to the next bfloat16 number below 1, so 0 % is what rounding to nearest gives. Optimizers that find the learning rate
  by themselves have `growth_rate=1`, since no rate makes them take steps of a given size.
- *O5 is float32*: whether the masters after these steps are the bits of a float32 run.
- *states*: the dtypes of states with more than one number, and after the arrow, if they differ, those after
  `load_state_dict`.
- *resumes*: whether five steps after a resume (`state_dict`, `torch.save`, a new optimizer, `load_state_dict`) are
  bit-equal to five steps without one. The steps are larger here, so that weights move. torch's seed is set before both.
"""

TABLES = (
    Table("Optimizers of torch", _TEXT, COLUMNS, _TORCH),
    Table("Optimizers of other packages", "Measured like those of torch.", COLUMNS, _OTHERS),
)
