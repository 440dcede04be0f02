"""Rules by name for the modules that are often kept in float32: ``keep_fp32=["@router_gates"]``."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

MARK: Final = "@"
# The smallest number of float16 above 0.
_SMALLEST: Final = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
_EPS_NAMES: Final = ("eps", "epsilon", "variance_epsilon", "norm_eps")
_GATE_NAMES: Final = ("router", "gate", "gating", "gate_network", "shared_expert_gate", "wg")
_HEAD_NAMES: Final = ("head", "heads", "lm_head", "classifier", "fc", "score", "logits", "qa_outputs")


def _is_router_gate(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    return name.rpartition(".")[2] in _GATE_NAMES or kind.endswith(("Router", "Gate", "Gating"))


def _is_rotary_table(name: str, module: nn.Module) -> bool:
    is_named = "rotary" in type(module).__name__.lower() or name.rpartition(".")[2] in ("rotary_emb", "rotary", "rope")
    return is_named and next(module.parameters(), None) is None


def small_eps(module: nn.Module) -> float | None:
    """Return the ``eps`` of a norm that is 0 in float16; None where there is none.

    Norms of torch compute in float32 inside, with any ``eps``.
    """
    if type(module).__module__.startswith("torch."):
        return None
    attributes = vars(module)
    for name in _EPS_NAMES:
        eps = attributes.get(name)
        if isinstance(eps, float) and 0.0 < eps < _SMALLEST / 2:
            return eps
    return None


def _has_small_eps(name: str, module: nn.Module) -> bool:
    return small_eps(module) is not None


def _is_final_head(name: str, module: nn.Module) -> bool:
    *path, last = name.split(".")
    # Blocks of a list have heads and classifiers of their own.
    return last in _HEAD_NAMES and not any(part.isdigit() for part in path)


RECIPES: Final[Mapping[str, Callable[[str, nn.Module], bool]]] = {
    "@router_gates": _is_router_gate,
    "@rotary_tables": _is_rotary_table,
    "@small_eps_norms": _has_small_eps,
    "@final_heads": _is_final_head,
}


def check_recipe(entry: Any) -> None:
    """Refuse a name that begins as a recipe's and is none.

    Raises:
        ValueError: it is none of :data:`RECIPES`.
    """
    if isinstance(entry, str) and entry.startswith(MARK) and entry not in RECIPES:
        near = difflib.get_close_matches(entry, RECIPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no recipe {entry!r}{hint} There are: {', '.join(RECIPES)}")
