"""``python -m mpinit``: the same as the ``mpinit`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
