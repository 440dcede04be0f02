"""What the tests of frameworks share."""

from __future__ import annotations

import torch

_libraries: list[torch.library.Library] = []


def let_torchvision_load() -> None:
    """Let ``import torchvision``, and with it peft, lightning and timm, load where its operators do not.

    Package indexes give a torchvision built for CUDA beside a torch built for the CPU. Its compiled operators cannot be
    loaded there, and importing it then fails on the first operator that it writes a meta kernel for. Declaring those
    is enough: nothing here calls them.
    """
    if _libraries or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        import torchvision
    except (RuntimeError, AttributeError):
        pass
    else:
        assert torchvision.__version__
        return
    library = torch.library.Library("torchvision", "DEF")
    arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library.define(f"nms{arguments}")
    library.define(f"qnms{arguments}")
    _libraries.append(library)
