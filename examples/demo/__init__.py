"""The parts of the handwritten-digits demo, ``examples/digits.py``."""
