"""initialize on one large model, as its process holds it: how long it takes, what it holds at its peak."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from . import footprint

_BF16: dict[str, Any] = {"cast_model_type": torch.bfloat16}
LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "patch_torch_functions_type": torch.bfloat16},
    "O2": {"opt_level": "O2", **_BF16},
    "O2 split": {"opt_level": "O2", "master_weights": "split", **_BF16},
    "O3": {"opt_level": "O3", **_BF16},
}


class InitChild:
    """Square linear layers, all alike, so that a model twice as large has twice as many of them."""

    def __init__(self, level: str, parameters: int, side: int, device: str, weights: str = "bfloat16") -> None:
        self.level, self.side, self.device = level, side, torch.device(device)
        self.layers = max(1, parameters // side**2)
        self.dtype: torch.dtype = getattr(torch, weights)
        self.identity = {"level": level, "weights": weights, "parameters": self.layers * side**2}

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.device:
            layers = [nn.Linear(self.side, self.side, bias=False, dtype=self.dtype) for _ in range(self.layers)]
        model = nn.Sequential(*layers)
        return model, torch.optim.Adam(model.parameters(), fused=True)

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import mpinit

        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[self.level])
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, repeats: int) -> dict[str, Any]:
        """How long initialize takes on a new model each time, after one untimed."""
        torch.set_num_threads(1)
        return {**self.identity, "seconds": [self._timed() for _ in range(repeats + 1)][1:]}

    def _timed(self) -> float:
        import mpinit

        model, optimizer = self._build()
        begin = time.perf_counter()
        self._initialize(model, optimizer)
        took = time.perf_counter() - begin
        mpinit.undo(model)
        return took

    def bytes_taken(self) -> dict[str, Any]:
        """What is held before and after initialize, the peak between, and what a state_dict adds."""
        torch.set_num_threads(1)
        made: list[Any] = []
        kept: list[Any] = []
        _, initialize, state_dict, end = footprint.trace(
            [
                lambda: made.extend(self._build()),
                lambda: self._initialize(*made),
                lambda: kept.append(made[0].state_dict()),
                lambda: None,
            ],
            self.device,
        )
        held = {"before": initialize.start, "after": state_dict.start, "peak": initialize.peak}
        added = {"state_dict": end.start - state_dict.start, "state_dict_peak": state_dict.peak - state_dict.start}
        return {**self.identity, **held, **added}
