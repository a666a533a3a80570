"""What vLLM (entry point group vllm.general_plugins) and SGLang (sglang.srt.plugins) call in each of their processes."""

from __future__ import annotations

import os


def register() -> None:
    """With HCCUPY_HPC=1, stand in for hpc-ops. Otherwise nothing happens, and nothing is imported."""
    if os.environ.get("HCCUPY_HPC") == "1":
        from .install import install_hpc

        install_hpc()
