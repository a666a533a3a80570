"""The paged KV cache of one request: RoPE and every write by hccupy, reads through the block table.

Pages are handed out in shuffled order from a pool twice as large, and the pool starts full of NaN, as a busy engine's
would be. The attention reads whole pages, so a slot that hccupy failed to write, or failed to clear behind the last
token, turns the logits into NaN.

    --kv       qkv      cache    written by
    bf16       bf16     bf16     rope_norm_store_kv
    fp16       fp16     fp16     rope_norm_store_kv
    fp8        bf16     e4m3     rope_norm_store_kv_fp8 (dynamic q scales; k and v scales from the prompt)
    fp32       fp16     fp32     rope_norm_store_kv with out_k and out_v, then store_kv and zero_kv_tail

rope_norm_store_kv takes 16-bit rows only and stores in their dtype; an fp32 cache is therefore filled as an engine with
dense K and V fills it. Its rows are fp16, the finer of the two (SmolLM2's q, k and v stayed below 25, far from fp16's 65504).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import hccupy

from ..spec import ceil_div
from .backend import Backend, Clock
from .weights import Config

CACHE_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "uint8"}
QKV_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float16", "fp8": "bfloat16"}
E4M3_MAX = 448.0
HEADROOM = 2.0  # sqrt(2) for the rotation (scales are taken before it), the rest for tokens still to come


def rope_table(config: Config, positions: int) -> Any:
    """cos_sin [positions, head_dim]: cosines in the first half, sines in the second."""
    frequency = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angle = np.arange(positions)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


def shuffled_pages(length: int, block_size: int) -> Any:
    """Pages for `length` slots in shuffled order, out of a pool of twice as many; NumPy int64."""
    blocks = ceil_div(length, block_size)
    return np.random.default_rng(0).permutation(2 * blocks)[:blocks]


class PagedCache:
    """Keys and values of all layers, [num_blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, config: Config, backend: Backend, clock: Clock, length: int, kv: str, block_size: int) -> None:
        self.config, self.backend, self.clock, self.kv, self.block_size = config, backend, clock, kv, block_size
        self.length = 0
        pages = shuffled_pages(length, block_size)
        blocks = len(pages)
        place = np.arange(blocks * block_size)
        self.pages = backend.put(pages.astype(np.int64))  # to read by
        self.block_table = backend.put(pages.astype(np.int32)[None])  # to write by, [requests = 1, max_blocks]
        self.slots = backend.put((pages[place // block_size] * block_size + place % block_size).astype(np.int64))
        self.count = backend.put(np.arange(blocks * block_size + 1, dtype=np.int32))  # lengths and positions, to slice
        self.cos_sin = backend.put(rope_table(config, blocks * block_size))
        shape = (2 * blocks, block_size, config.kv_heads, config.head_dim)
        self.keys = [backend.stale(shape, CACHE_DTYPE[kv]) for _ in range(config.layers)]
        self.values = [backend.stale(shape, CACHE_DTYPE[kv]) for _ in range(config.layers)]
        self.scales: list[tuple[Any, Any]] = []  # per layer (k_scale, v_scale), fp8 only
        # With out_k and out_v the caches of rope_norm_store_kv are not touched: a page of its dtype stands in for each.
        self.unused = [backend.stale((1, *shape[1:]), QKV_DTYPE[kv]) for _ in range(2)]

    def begin(self, tokens: int) -> None:
        """Make room for `tokens` more; the metadata of this step is made once for all layers.

        Slices of arrays that lie on the device already: a decode step uploads nothing.
        """
        start, self.length = self.length, self.length + tokens
        used = ceil_div(self.length, self.block_size)
        self.used_pages = self.pages[:used]
        self.seq_lens = self.count[self.length : self.length + 1]
        self.q_index = self.count[0:2] if tokens == 1 else self.backend.put(np.array([0, tokens], np.int32))
        self.slot_mapping = self.slots[start : self.length]
        columns, rows = self.count[: used * self.block_size], self.count[start : self.length]
        self.hidden = columns[None, :] > rows[:, None]  # [tokens, used * block_size]: the future, and the unused tail

    def write(self, layer: int, qkv: Any) -> Any:
        """Rotate; store K and V of this step. qkv [tokens, width] fp32 → q [tokens, q_heads, head_dim] fp32."""
        qkv = self.backend.cast(qkv, QKV_DTYPE[self.kv])
        step = (self.cos_sin, self.seq_lens, self.q_index, self.block_table)
        store = {"fp8": self._write_fp8, "fp32": self._write_dense}.get(self.kv, self._write_fused)
        return store(layer, qkv, step)

    def _write_fused(self, layer: int, qkv: Any, step: tuple[Any, ...]) -> Any:
        caches = (self.keys[layer], self.values[layer])
        call = ("rope_norm_store_kv", hccupy.rope_norm_store_kv, *caches, qkv, *step)
        return self.backend.cast(self.clock(*call, rope_style="interleaved", tail="zero"), "float32")

    def _write_fp8(self, layer: int, qkv: Any, step: tuple[Any, ...]) -> Any:
        if layer == len(self.scales):  # the first step, the prompt, calibrates its layer
            self.scales.append(self._calibrate(qkv))
        k_scale, v_scale = self.scales[layer]
        caches = (self.keys[layer], self.values[layer])
        call = ("rope_norm_store_kv_fp8", hccupy.rope_norm_store_kv_fp8, *caches, qkv, *step)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "q_quant": "dynamic"}
        # is_prefill only chooses the layout of q_scale: False gives [tokens, q_heads], which is what is wanted here.
        q, q_scale, _ = self.clock(*call, **scales, is_prefill=False, rope_style="interleaved", tail="zero")
        return self.backend.from_e4m3(q) * q_scale[:, :, None]

    def _write_dense(self, layer: int, qkv: Any, step: tuple[Any, ...]) -> Any:
        shape = (len(qkv), self.config.kv_heads, self.config.head_dim)
        k, v = self.backend.stale(shape, QKV_DTYPE[self.kv]), self.backend.stale(shape, QKV_DTYPE[self.kv])
        call = ("rope_norm_store_kv", hccupy.rope_norm_store_kv, *self.unused, qkv, *step)
        q = self.clock(*call, rope_style="interleaved", out_k=k, out_v=v)
        caches = (self.keys[layer], self.values[layer])
        for cache, rows in zip(caches, (k, v), strict=True):
            self.clock("store_kv", hccupy.store_kv, cache, self.backend.cast(rows, "float32"), self.slot_mapping)
        self.clock("zero_kv_tail", hccupy.zero_kv_tail, *caches, self.seq_lens, self.block_table)
        return self.backend.cast(q, "float32")

    def _calibrate(self, qkv: Any) -> tuple[Any, Any]:
        """k_scale, v_scale [1]: the prompt's largest value lands at 448 / HEADROOM."""
        width = self.config.kv_heads * self.config.head_dim
        k, v = qkv[:, -2 * width : -width], qkv[:, -width:]
        factor = HEADROOM / E4M3_MAX
        return self.backend.absmax(k) * factor, self.backend.absmax(v) * factor

    def read(self, layer: int) -> tuple[Any, Any]:
        """Whole pages in order: k, v [kv_heads, used * block_size, head_dim] fp32."""
        k, v = self._gather(self.keys[layer]), self._gather(self.values[layer])
        if self.kv == "fp8":
            k_scale, v_scale = self.scales[layer]
            return k * k_scale, v * v_scale
        return k, v

    def _gather(self, cache: Any) -> Any:
        pages = cache[self.used_pages].reshape(-1, self.config.kv_heads, self.config.head_dim)
        pages = self.backend.permute(pages, 1, 0, 2)
        return self.backend.from_e4m3(pages) if self.kv == "fp8" else self.backend.cast(pages, "float32")
