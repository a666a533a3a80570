"""How the rope and store_kv kernels are started: pure functions of a Bound and an Arch, reasons beside the numbers."""

from __future__ import annotations

import math

from ..arch import Arch
from ..dtypes import BY_NAME
from ..spec import Bound, Launch, Variant

THREADS = 256  # largest block, the kernels' __launch_bounds__
FLAGS_PER_WARP = 128  # ints of split_k_flag that one warp clears
SEARCH_DUPLICATES = 1024  # rows; store_kv compares each slot with the later ones up to here (8 KB of slots per row)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def heads_per_warp(head_dim: int, rotary_dim: int, interleaved: bool) -> int:
    """HeadLanes of kernels/common/rope.cuh: both partners of a pair in one lane, two chunks of up to 8 elements a lane."""
    half = rotary_dim // 2
    chunk = math.gcd(rotary_dim if interleaved else half, head_dim, 8)
    single = (head_dim if interleaved else head_dim - rotary_dim) // chunk
    slots = (0 if interleaved else half // chunk) + _ceil(single, 2)
    return max(32 // (1 << (slots - 1).bit_length()), 1)


def _parts(b: Bound, steps: int) -> tuple[int, int]:
    """(warps for q and k, warps for v) of one row, when a warp keeps `steps` KB in flight."""
    a = b.axes
    heads = heads_per_warp(a["head_dim"], a["rotary_dim"], b.scalars["rope_style"] == "interleaved")
    return _ceil(a["q_heads"] + a["kv_heads"], heads * steps), _ceil(a["kv_heads"] * a["v_head_dim"], 512 * steps)


def _blocks(units: int, arch: Arch) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block for `units` warps: as many multiprocessors as there are warps, then up to 8 warps a block."""
    warps = max(1, min(THREADS // 32, units // arch.sms))
    return (max(_ceil(units, warps), 1), 1, 1), (32 * warps, 1, 1)


def launch_rope(b: Bound, arch: Arch) -> Launch:
    """One warp per part of a row; the fp8 op's padding and flags are further warps."""
    a = b.axes
    tokens, requests = a["tokens"], a["requests"]
    fp8 = b.op.endswith("_fp8")
    # One step a warp gives the shortest chain of waits while all warps are on the machine at once (16 of 64 a
    # multiprocessor). Beyond, 3 KB in flight a warp (80 registers, 24 warps a multiprocessor): 18 + 2 steps of a 64/8
    # row make 6 + 1 warps. fp8 has more to compute: 2 KB, 9 + 1 warps, as 3 would spill at 80 registers.
    steps = 1 if tokens * sum(_parts(b, 1)) <= 16 * arch.sms else 2 if fp8 else 3
    rotated, values = _parts(b, steps)
    units = tokens * (rotated + values)
    if fp8:
        units += _ceil(requests * a["kv_heads"], FLAGS_PER_WARP)
        if b.scalars["q_quant"] == "dynamic" and b.scalars["is_prefill"]:
            units += requests * padded(b.scalars["max_q_len"]) // 32
    grid, block = _blocks(units, arch)
    written = [b.aligned[n] for n in ("q", "key_cache", "value_cache", "out_k", "out_v") if n in b.aligned]
    weights = [b.aligned[n] for n in ("q_norm_weight", "k_norm_weight") if n in b.aligned]
    # A few tails are cheaper to rewrite (192 KB each at 64/8 heads) than to look at first, which is one more wait.
    probe = requests > 8
    return Launch(
        grid,
        block,
        pdl=arch.clusters and steps == 1,  # large grids have their own work to hide the start behind
        defines={
            "kFp8": int(fp8),
            "kThreads": THREADS,
            "kMinBlocks": 3 if steps > 1 and not (fp8 and arch.cc[0] == 10) else 2,  # there 80 registers are one too few
            "kSteps": steps,
            "kRotatedParts": rotated,
            "kParts": rotated + values,
            "kTailProbe": int(probe),
            "kReadAlign": b.aligned["qkv"],
            "kWriteAlign": min(written),
            "kTableAlign": b.aligned["cos_sin"],
            "kWeightAlign": min(weights, default=16),
        },
        why=f"{rotated} + {values} warps a row, {steps} KB in flight each; tails {'looked at first' if probe else 'always rewritten'}",
    )


def padded(max_q_len: int | None) -> int:
    """The inner length of a prefill q_scale."""
    return _ceil(max_q_len or 0, 128) * 128


def _access(vector_bytes: int, aligned: int) -> int:
    """Bytes per access: what alignment and the length of a head's vector allow."""
    return math.gcd(vector_bytes, aligned, 16)


def launch_store_kv(b: Bound, arch: Arch) -> Launch:
    """One warp per row and 2 KB of it."""
    a = b.axes
    bytes_per_head = a["head_dim"] * BY_NAME[b.dtypes["cache"]].itemsize
    access = _access(bytes_per_head, min(b.aligned["cache"], b.aligned["src"]))
    parts = _ceil(a["kv_heads"] * bytes_per_head // access, 128)  # 4 accesses a lane, all in flight
    grid, block = _blocks(a["tokens"] * parts, arch)
    defines = {"kThreads": THREADS, "kAccess": access, "kParts": parts, "kSearch": SEARCH_DUPLICATES, "kStore": 1}
    return Launch(grid, block, pdl=arch.clusters and a["tokens"] <= 256, defines=defines, why=f"{parts} warps a row, {access} bytes an access")


def launch_zero_kv_tail(b: Bound, arch: Arch) -> Launch:
    """Warps of one request share the slots of its tail: 4 slots a warp."""
    a = b.axes
    parts = min(1 << max(a["block_size"] // 4 - 1, 0).bit_length(), 256)  # a power of two: few distinct binaries
    aligned = min(b.aligned["key_cache"], b.aligned["value_cache"])
    grid, block = _blocks(a["requests"] * parts, arch)
    defines = {"kThreads": THREADS, "kAccess": aligned, "kParts": parts, "kStore": 0}
    return Launch(grid, block, pdl=arch.clusters and a["requests"] <= 256, defines=defines, why=f"{parts} warps a request")


ROPE = Variant("row_parts", "rope_norm_store_kv.cu", "rope_norm_store_kv", launch_rope)
ROPE_FP8 = Variant("row_parts", "rope_norm_store_kv.cu", "rope_norm_store_kv_fp8", launch_rope)
STORE = Variant("row_parts", "store_kv.cu", "store_kv", launch_store_kv)
ZERO_TAIL = Variant("slots", "store_kv.cu", "zero_kv_tail", launch_zero_kv_tail)
