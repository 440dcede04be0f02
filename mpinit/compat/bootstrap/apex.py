"""The ``apex`` of processes that a script under ``mpinit run`` spawns: they inherit sys.path, but no import hooks.

Importing this file installs the hooks and replaces this module by the package that they provide.
"""

import importlib
import sys

from mpinit.compat.importing import install_as_apex

del sys.modules[__name__]
install_as_apex()
importlib.import_module("apex")
