"""Who takes part: one row per contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from . import peers
from .contenders import Contender, Float32, Float32Checked, HandWritten, TorchAmp
from .peers import Peer
from .with_mpinit import Mpinit
from .workloads import Task

FP16, BF16 = torch.float16, torch.bfloat16
# Where compilation is no matter of minutes.
_FEW = ("launch", "bandwidth", "classic")


@dataclass(frozen=True)
class Row:
    """A contender by name.

    Attributes:
        title: for people.
        build: Task -> Contender; raises Unavailable where it has no part.
        needs_network: it differs from others only in how a network is run.
        only: the workloads it is there for; empty for all of them.
        compiles: it compiles what it runs, so its operations cannot be counted at the dispatcher.
    """

    title: str
    build: Callable[[Task], Contender]
    needs_network: bool = False
    only: tuple[str, ...] = ()
    compiles: bool = False


ROSTER: Final[Mapping[str, Row]] = {
    "fp32": Row("float32", Float32),
    "fp32_checked": Row("float32 + finite check", Float32Checked, only=("bandwidth",)),
    "tf32": Row("TF32", partial(Float32, tf32=True), needs_network=True),
    "amp_fp16": Row("torch.amp fp16", partial(TorchAmp, dtype=FP16)),
    "amp_bf16": Row("torch.amp bf16", partial(TorchAmp, dtype=BF16), needs_network=True),
    "hand_fp16": Row("hand-written O2 fp16", partial(HandWritten, dtype=FP16)),
    "hand_bf16": Row("hand-written O2 bf16", partial(HandWritten, dtype=BF16)),
    "hand_bf16_unchecked": Row("hand-written O2 bf16, no check", partial(HandWritten, dtype=BF16, checked=False)),
    "o0": Row("mpinit O0", partial(Mpinit, opt_level="O0")),
    "o1_fp16": Row("mpinit O1 fp16", partial(Mpinit, opt_level="O1"), needs_network=True),
    "o1_bf16": Row(
        "mpinit O1 bf16", partial(Mpinit, opt_level="O1", patch_torch_functions_type=BF16), needs_network=True
    ),
    "o2_fp16": Row("mpinit O2 fp16", partial(Mpinit, opt_level="O2")),
    "o2_bf16": Row("mpinit O2 bf16", partial(Mpinit, opt_level="O2", cast_model_type=BF16)),
    "o2_split": Row(
        "mpinit O2 bf16 split", partial(Mpinit, opt_level="O2", cast_model_type=BF16, master_weights="split")
    ),
    "o2_compiled": Row(
        "mpinit O2 fp16 compiled step",
        partial(Mpinit, opt_level="O2", compile_step=True),
        compiles=True,
        only=_FEW,
    ),
    "o3_fp16": Row("mpinit O3 fp16", partial(Mpinit, opt_level="O3")),
    "o3_bf16": Row("mpinit O3 bf16", partial(Mpinit, opt_level="O3", cast_model_type=BF16)),
    "optimi": Row("optimi bf16 Kahan", partial(Peer, package="optimi", build=peers.optimi)),
    "torchao": Row(
        "torchao 8-bit Adam bf16",
        partial(Peer, package="torchao.optim", build=peers.torchao_8bit),
        compiles=True,
        only=_FEW,
    ),
    "flashoptim": Row("flashoptim bf16", partial(Peer, package="flashoptim", build=peers.flashoptim)),
}
