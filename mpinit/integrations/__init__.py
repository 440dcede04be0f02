"""Integrations of frameworks whose loops call backward and step: one file each, imported only when used."""

import importlib
from typing import Any


def require(package: str) -> Any:
    """Import a framework, or raise an ImportError that names the command to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"mpinit.integrations.{package} needs {package}, and importing it failed ({error}): "
            f'pip install "mpinit[{package}]"'
        ) from error


def named(value: Any) -> str:
    """Name an object of a wrong type, for a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
