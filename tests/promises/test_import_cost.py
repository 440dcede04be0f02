"""What ``import mpinit`` brings with it: what a training run needs, and nothing that takes long."""

from __future__ import annotations

import subprocess
import sys


def test_the_import_leaves_pydantic_and_inspectors_until_they_are_asked_for() -> None:
    program = """
import sys, mpinit
from mpinit import amp
late = [name for name in sys.modules if name.split(".")[0] in ("pydantic", "pydantic_core")]
assert not late, late
inspectors = [f"mpinit.inspect.{name}" for name in ("suggest", "explain", "history", "exponents", "stalled")]
assert not any(name in sys.modules for name in inspectors)
assert {"History", "Properties", "initialize"} <= set(dir(mpinit))
assert mpinit.OPT_LEVELS["O2"] == amp.OPT_LEVELS["O2"] and mpinit.Properties is amp.Properties
assert mpinit.suggest.__module__ == "mpinit.inspect.suggest"
star = {}
exec("from mpinit import *", star)
assert set(mpinit.__all__) <= set(star)
try:
    mpinit.initialise
except AttributeError as error:
    assert "has no attribute 'initialise'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
