"""The modules of a model, as ``modules()`` and ``named_modules()`` give them, in a fraction of their time.

Those are generators inside of generators, one for each module and level; a set-up walks a model many times.
"""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What ``model.modules()`` gives, in its order.

    Example:
        >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
        ['Sequential', 'Linear', 'ReLU']
    """
    found: dict[nn.Module, None] = {model: None}
    left = [iter(model._modules.values())]
    while left:
        for module in left[-1]:
            if module is not None and module not in found:
                found[module] = None
                below = module._modules
                if below:
                    left.append(iter(below.values()))
                    break
        else:
            left.pop()
    return list(found)


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``model.named_modules()`` gives, in its order.

    Example:
        >>> [name for name, _ in named_modules_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
        ['', '0', '1']
    """
    found: dict[nn.Module, str] = {}
    left: list[tuple[str, nn.Module | None]] = [("", model)]
    while left:
        name, module = left.pop()
        if module is not None and module not in found:
            found[module] = name
            if module._modules:
                prefix = f"{name}." if name else ""
                left += [(prefix + child, part) for child, part in reversed(module._modules.items())]
    return [(name, module) for module, name in found.items()]


def dotted(module_name: str, name: str) -> str:
    """What a tensor is called in a model whose module of that name has it under ``name``.

    Example:
        >>> dotted("", "weight"), dotted("encoder.0", "weight")
        ('weight', 'encoder.0.weight')
    """
    return f"{module_name}.{name}" if module_name else name
