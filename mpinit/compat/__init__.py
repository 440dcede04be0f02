"""What lets scripts written for NVIDIA apex run on mpinit: the old names and quirks live here and nowhere else."""

from .importing import install_as_apex, uninstall_apex

__all__ = ["install_as_apex", "uninstall_apex"]
