"""Plugs for frameworks whose loops own backward and step: one file a framework, imported only when it is used."""

import importlib
from typing import Any


def require(package: str) -> Any:
    """The package that a plug is for."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"mpinit.integrations.{package} needs {package}, and importing it failed ({error}): "
            f'pip install "mpinit[{package}]"'
        ) from error
