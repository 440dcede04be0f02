"""The version of amp's interface, which some scripts print."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
