"""``mpinit build-native``: compiles native code for optimizer steps on this machine's CPU."""

import argparse
import time

from ..masters.codecs.bfloat16 import BFloat16
from ..masters.codecs.codec import encodes_to_same_bits
from ..masters.codecs.minifloat import Minifloat
from ..optimizer.one_pass import KINDS, steps_with_other_bits
from ..torch_internals.native import is_switched_off, library, load
from ..torch_internals.native_build import build
from .output import show_json, show_text


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Compile native code for this CPU, torch and Python, with the C++ compiler that CXX names (default c++), and "
        "compare it with torch's operations on samples. Trainings on a CPU then load it: SGD, Adam and AdamW step in "
        "one pass over memory, and optimizer states are encoded faster, to the same bits. MPINIT_NATIVE=0 switches it "
        "off. TORCH_EXTENSIONS_DIR sets its folder. Build it again after an update of mpinit, torch or Python."
    )
    parser.add_argument("--force", action="store_true", help="build it again where it is built")


def run(arguments: argparse.Namespace) -> int:
    """Build, load and try it, and show the result."""
    begin = time.perf_counter()
    is_new = build(arguments.force)
    seconds, path = time.perf_counter() - begin, library()
    try:
        code = load(path)
    except (OSError, ImportError) as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}; build it again: mpinit build-native --force") from None
    others = steps_with_other_bits(code)
    codecs = BFloat16(), Minifloat()
    others += [f"{codec.name} states" for codec in codecs if not encodes_to_same_bits(codec, code)]
    if arguments.json:
        found = {"path": str(path), "built": is_new, "usable": not others, "other_bits": others}
        show_json({**found, "seconds": seconds if is_new else None, "switched_off": is_switched_off()})
    else:
        show_text(f"built in {seconds:.1f} s: {path}" if is_new else f"already built: {path}")
        if not others:
            show_text(f"usable: steps of {', '.join(KINDS)} and encoded states have torch's bits on samples")
        if is_switched_off():
            show_text("MPINIT_NATIVE=0 is set: it is not used")
    if others:
        raise RuntimeError(
            f"native code has other bits than torch's operations, which are used instead, for {', '.join(others)}"
        )
    return 0
