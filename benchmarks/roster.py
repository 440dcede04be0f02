"""The contenders by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from . import peers
from .contenders import Contender, Float32, HandWritten, SixteenBit, TorchAmp
from .peers import Peer
from .tasks import Task
from .with_mpinit import InBackward, Mpinit

FP16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Row:
    """A contender that can be built for any task.

    Attributes:
        title: the text in tables.
        build: Task -> Contender; raises Unavailable if the contender cannot train the task here.
        needs_network: whether it differs from others only in how a network runs.
        compiles: whether it compiles its step, so that operations cannot be counted at the dispatcher.
    """

    title: str
    build: Callable[[Task], Contender]
    needs_network: bool = False
    compiles: bool = False


def _peer(title: str, package: str, build: peers.Build, compiles: bool = False) -> Row:
    return Row(title, partial(Peer, package=package, build=build), compiles=compiles)


ROSTER: Final[Mapping[str, Row]] = {
    "fp32": Row("float32", Float32),
    "fp32_again": Row("float32 again", Float32),
    "o0": Row("mpinit O0", partial(Mpinit, opt_level="O0")),
    "tf32": Row("TF32", partial(Float32, tf32=True), needs_network=True),
    "amp_bf16": Row("torch.amp", partial(TorchAmp, dtype=BF16), needs_network=True),
    "amp_norms_bf16": Row(
        "torch.amp, LayerNorm in float32", partial(TorchAmp, dtype=BF16, float32_norms=True), needs_network=True
    ),
    "hand_bf16": Row("hand-written O2", partial(HandWritten, dtype=BF16, checked=False)),
    "plain_bf16": Row("plain bf16", partial(SixteenBit, dtype=BF16)),
    "o1_bf16": Row("mpinit O4 (O1)", partial(Mpinit, opt_level="O4"), needs_network=True),
    "o2_bf16": Row("mpinit O5 (O2)", partial(Mpinit, opt_level="O5")),
    "o2_split": Row("mpinit O5 split", partial(Mpinit, opt_level="O5", master_weights="split")),
    "o2_model": Row(
        "mpinit O5, masters in the model", partial(Mpinit, opt_level="O5", master_weights="model"), needs_network=True
    ),
    "o2_int8": Row(
        "mpinit O5 split, int8 states", partial(Mpinit, opt_level="O5", master_weights="split", optimizer_state="int8")
    ),
    "o2_split_bf16": Row(
        "mpinit O5 split, bf16 states",
        partial(Mpinit, opt_level="O5", master_weights="split", optimizer_state="bfloat16"),
    ),
    "o2_released": Row(
        "mpinit O5 split, int8 states, stepped in backward",
        partial(InBackward, opt_level="O5", master_weights="split", optimizer_state="int8"),
    ),
    "o2_eager": Row("mpinit O5 (O2), without native code", partial(Mpinit, opt_level="O5", native=False)),
    "o2_split_eager": Row(
        "mpinit O5 split, without native code", partial(Mpinit, opt_level="O5", master_weights="split", native=False)
    ),
    "o2_int8_eager": Row(
        "mpinit O5 split, int8 states, without native code",
        partial(Mpinit, opt_level="O5", master_weights="split", optimizer_state="int8", native=False),
    ),
    "o3_bf16": Row("mpinit O3", partial(Mpinit, opt_level="O3", cast_model_type=BF16)),
    "optimi": _peer("optimi, Kahan", "optimi", peers.optimi),
    "torchao": _peer("torchao 8-bit Adam", "torchao.optim", peers.torchao_8bit, compiles=True),
    "bitsandbytes": _peer("bitsandbytes 8-bit Adam", "bitsandbytes", peers.bitsandbytes_8bit),
    "flashoptim": _peer("flashoptim", "flashoptim", peers.flashoptim),
    "amp_fp16": Row("torch.amp", partial(TorchAmp, dtype=FP16)),
    "amp_norms_fp16": Row(
        "torch.amp, LayerNorm in float32", partial(TorchAmp, dtype=FP16, float32_norms=True), needs_network=True
    ),
    "hand_fp16": Row("hand-written O2", partial(HandWritten, dtype=FP16)),
    "hand_static": Row("hand-written O2, scale 128", partial(HandWritten, dtype=FP16, scale=128.0)),
    "o1_fp16": Row("mpinit O1", partial(Mpinit, opt_level="O1"), needs_network=True),
    "o2_fp16": Row("mpinit O2", partial(Mpinit, opt_level="O2")),
    "o2_static": Row("mpinit O2, scale 128", partial(Mpinit, opt_level="O2", loss_scale=128.0)),
    "o3_fp16": Row("mpinit O3", partial(Mpinit, opt_level="O3")),
}
CONTROLS: Final = (("fp32", "fp32_again"), ("fp32", "o0"))
BY_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": (
        *(
            "amp_bf16",
            "amp_norms_bf16",
            "hand_bf16",
            "plain_bf16",
            "o1_bf16",
            "o2_bf16",
            "o2_split",
            "o2_model",
            "o2_split_bf16",
            "o2_int8",
            "o2_eager",
            "o2_split_eager",
            "o2_int8_eager",
        ),
        *("o3_bf16", "optimi", "torchao", "bitsandbytes", "flashoptim"),
    ),
    "float16": ("amp_fp16", "amp_norms_fp16", "hand_fp16", "o1_fp16", "o2_fp16", "o3_fp16"),
}
