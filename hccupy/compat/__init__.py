"""Other people's names for these ops: `install_hpc()` makes `import hpc` give ours to engines that look for it."""

from __future__ import annotations

from .install import install_hpc, uninstall_hpc

__all__ = ["install_hpc", "uninstall_hpc"]
