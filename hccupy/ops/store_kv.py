"""store_kv and zero_kv_tail: for engines that have dense K and V already."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ..dtypes import BY_NAME, FLOATS, FP8
from ..spec import Arg, Axis, Bound, OpSpec, Scalar
from .rope_inputs import CASES_STORE, CASES_TAIL, inputs_store, inputs_tail
from .rope_launch import STORE, ZERO_TAIL
from .rope_norm_store_kv import STRIDES, bits, clear_slots

SOURCE = "a copy: cache[slot // block_size, slot % block_size] = src"


def reference_store(b: SimpleNamespace) -> None:
    """Bits of src to their slots; negative, out-of-range and null-block slots are skipped."""
    slots = b.slot_mapping.astype(np.int64)
    page, slot = np.divmod(slots, b.axes["block_size"])
    good = (slots >= 0) & (page < b.axes["num_blocks"]) & (page != b.null_block)
    bits(b.cache)[page[good], slot[good]] = bits(b.src)[good]


def reference_tail(b: SimpleNamespace) -> None:
    """Zero bytes at and after seq_lens[b] in the block of the last token."""
    a = b.axes
    column, slot = np.divmod(b.seq_lens.astype(np.int64) - 1, a["block_size"])
    good = (column >= 0) & (column < a["max_blocks"])
    request = np.flatnonzero(good)
    page, slot = b.block_table[request, column[good]].astype(np.int64), slot[good] + 1
    good = (page >= 0) & (page < a["num_blocks"]) & (page != b.null_block)
    for cache in (b.key_cache, b.value_cache):
        clear_slots(cache, page[good], slot[good])


def _bytes_store(b: Bound) -> int:
    a = b.axes
    return 2 * a["tokens"] * a["kv_heads"] * a["head_dim"] * BY_NAME[b.dtypes["cache"]].itemsize


def _bytes_tail(b: Bound) -> int:
    """Half a block a request, on average."""
    a = b.axes
    return a["requests"] * a["block_size"] // 2 * a["kv_heads"] * (a["head_dim"] + a["v_head_dim"]) * BY_NAME[b.dtypes["key_cache"]].itemsize


PAGES = (
    Axis("num_blocks", meaning="pages of the caches"),
    Axis("block_size", low=1, meaning="slots of a page"),
)
HEADS = (
    Axis("kv_heads", baked=True, low=1, meaning="heads of the caches"),
    Axis("head_dim", baked=True, low=1, high=2**16, meaning="any"),
)
DTYPES = (*FLOATS, *FP8)
NULL_BLOCK = Scalar("null_block", "int", None, optional=True, keyword=True, meaning="a page that is never written")

STORE_KV = OpSpec(
    name="store_kv",
    summary="Write dense K or V rows to the slots of a paged cache.",
    axes=(Axis("tokens", meaning="rows of src"), *PAGES, *HEADS),
    params=(
        Arg("cache", ("num_blocks", "block_size", "kv_heads", "head_dim"), DTYPES, STRIDES, mutated=True, meaning="pages, any strides"),
        Arg("src", ("tokens", "kv_heads", "head_dim"), ("=cache",), ("tokens", "kv_heads"), meaning="rows to copy"),
        Arg("slot_mapping", ("tokens",), ("int64", "int32"), meaning="page * block_size + slot; negative and out-of-range ones are skipped"),
        NULL_BLOCK,
    ),
    outputs=(),
    reference=reference_store,
    variants=(STORE,),
    make_inputs=inputs_store,
    bytes_moved=_bytes_store,
    cases=CASES_STORE,
    imagine={"tokens": "1", "num_blocks": "64", "block_size": "64"},
    tolerance={"": (0.0, 0.0)},
    source=SOURCE,
)
ZERO_KV_TAIL = OpSpec(
    name="zero_kv_tail",
    summary="Clear the slots behind the last token of each request in its last block.",
    axes=(
        Axis("requests", meaning="sequences in the batch"),
        *PAGES,
        Axis("max_blocks", meaning="columns of block_table"),
        *HEADS,
        Axis("v_head_dim", baked=True, low=1, high=2**16, meaning="any"),
    ),
    params=(
        Arg("key_cache", ("num_blocks", "block_size", "kv_heads", "head_dim"), DTYPES, STRIDES, mutated=True, meaning="pages of K, any strides"),
        Arg("value_cache", ("num_blocks", "block_size", "kv_heads", "v_head_dim"), ("=key_cache",), STRIDES, mutated=True, meaning="pages of V"),
        Arg("seq_lens", ("requests",), ("int32",), meaning="lengths; 0 leaves a request alone"),
        Arg("block_table", ("requests", "max_blocks"), ("int32",), ("requests",), meaning="pages of each request"),
        NULL_BLOCK,
    ),
    outputs=(),
    reference=reference_tail,
    variants=(ZERO_TAIL,),
    make_inputs=inputs_tail,
    bytes_moved=_bytes_tail,
    cases=CASES_TAIL,
    imagine={"requests": "1", "num_blocks": "64", "block_size": "64", "max_blocks": "64", "v_head_dim": "head_dim"},
    empty=("requests",),
    tolerance={"": (0.0, 0.0)},
    source="zero bytes in cache[last block, seq_len % block_size:]",
)
