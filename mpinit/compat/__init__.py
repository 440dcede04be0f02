"""Compatibility with scripts written for NVIDIA apex: its names and quirks are here and nowhere else."""

from .importing import install_as_apex, uninstall_apex

__all__ = ["install_as_apex", "uninstall_apex"]
