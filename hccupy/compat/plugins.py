"""What vLLM (entry point group vllm.general_plugins) and SGLang (sglang.srt.plugins) call in each of their processes."""

from __future__ import annotations

from .. import switches


def register() -> None:
    """With HCCUPY_HPC=1, stand in for hpc-ops. Otherwise nothing happens, and nothing is imported."""
    if switches.on("HCCUPY_HPC"):
        from .install import install_hpc

        install_hpc()
