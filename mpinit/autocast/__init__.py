"""O1: patches of torch's functions that cast their arguments, and the undo of these patches."""

from .installation import apply as apply
from .stored import wrap as wrap
