"""SmolLM2-135M-Instruct rebuilt as an independent-hyper-connection network on hccupy's public ops.

weights.py    the GGUF file → NumPy fp32 arrays and a Config
tokenizer.py  the GGUF file → text ↔ token ids, chat template, streaming
backend.py    NumPy, CuPy or PyTorch behind a dozen small functions
cache.py      the paged KV cache: RoPE and writes by hccupy, reads through the block table
network.py    the two networks: plain residual, and hyper-connections
show.py       `run_demo`: load, generate, prove, report
"""

from .show import run_demo

__all__ = ["run_demo"]
