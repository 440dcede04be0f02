"""The helpers of apex for loops with float32 masters that a script keeps by hand.

``FP16_Optimizer`` is refused, with the lines that replace it.
"""

from .fp16util import *  # noqa: F403 - its __all__ lists the names
from .fp16util import __all__ as __all__
