"""Compatibility with scripts written for NVIDIA apex. No other folder has names or special cases of apex."""

from .importing import install_as_apex, uninstall_apex

__all__ = ["install_as_apex", "uninstall_apex"]
