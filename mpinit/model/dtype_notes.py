"""The note on errors of torch in which dtypes meet inside of a 16-bit forward: the ways out, and no cause."""

import re
from typing import Final

import torch

from ..basics.dtypes import dtype_name, is_lower_precision

# Torch's and NumPy's words where dtypes do not match, or where a function has no 16-bit kernel.
_DTYPES: Final = re.compile(r"\bd?types?\b|type promoting|ScalarType|\b(Complex)?Half\b|\bBFloat16\b", re.IGNORECASE)
_NOTE: Final = (
    "mpinit: forward of {} runs in {}. Where its own code needs float32 (a function without a 16-bit kernel, a tensor "
    "that it makes itself), name that module in mpinit.initialize(keep_fp32=[...]), or use opt_level='O1' or 'O4', "
    "which cast in functions. Where a method besides forward was called, name it in entry_points=[...], so that its "
    "inputs and outputs are cast. Where an input is an object with tensors in it, mpinit.register_input its class. "
    "Where a module was put into the model after mpinit.initialize, call .to({}) on it, and "
    "optimizer.add_param_group."
)


def add_note(error: Exception, kind: str, dtype: torch.dtype | None) -> None:
    """Add the note to an error of dtypes, once.

    Args:
        error: the exception that a forward has raised.
        kind: the name of the model's class.
        dtype: the dtype that the forward runs in; None: after an undo.
    """
    if dtype is None or not is_lower_precision(dtype) or _DTYPES.search(str(error)) is None:
        return
    if not any(note.startswith("mpinit: ") for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE.format(kind, dtype_name(dtype), dtype))
