"""How the rope and store_kv kernels are started: pure functions of a Bound and an Arch, reasons beside the numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arch import Arch
from ..dtypes import BY_NAME
from ..spec import Bound, Launch, Variant, ceil_div

THREADS = 256  # largest block, the kernels' __launch_bounds__
AHEAD, RING = 3, 8192  # turns on their way, bytes of their units and those at hand (kernels/common/rope_stage.cuh)
NARROW_RING, ANGLES = 6144, 2048  # the same where rows are narrow, and the most that a warp's angles take
FLAGS_PER_WARP = 128  # ints of split_k_flag that one warp clears
SEARCH_DUPLICATES = 1024  # rows; store_kv compares each slot with the later ones up to here


def _heads_per_warp(b: Bound) -> int:
    """HeadLanes of kernels/common/rope.cuh: both partners of a pair in one lane, two chunks of up to 8 elements a lane."""
    dim, rotary, interleaved = b.axes["head_dim"], b.axes["rotary_dim"], b.scalars["rope_style"] == "interleaved"
    half = rotary // 2
    chunk = math.gcd(rotary if interleaved else half, dim, 8)
    single = (dim if interleaved else dim - rotary) // chunk
    slots = (0 if interleaved else half // chunk) + ceil_div(single, 2)
    return max(32 // (1 << (slots - 1).bit_length()), 1)


def _units(b: Bound, together: bool = False) -> tuple[int, int]:
    """Units of a row, 1 KB each (kernels/common/rope_row.cuh): (those that hold only q, the others).

    together: a unit has one head of as many rows as it has heads otherwise.
    """
    a = b.axes
    heads, values = _heads_per_warp(b), 512
    if together:
        heads, values = 1, 512 // heads
    only_q = a["q_heads"] // heads
    return only_q, ceil_div(a["q_heads"] + a["kv_heads"], heads) - only_q + ceil_div(a["kv_heads"] * a["v_head_dim"], values)


def _row_bytes(b: Bound) -> int:
    a = b.axes
    return 2 * ((a["q_heads"] + a["kv_heads"]) * a["head_dim"] + a["kv_heads"] * a["v_head_dim"])


def _stage_bytes(b: Bound) -> int:
    """RowStage of kernels/common/rope_block.cuh: a row of qkv and its angles in shared memory."""
    return ceil_div(_row_bytes(b) + 4 * b.axes["rotary_dim"], 128) * 128


def _blocks(units: int, arch: Arch) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block for `units` warps: as many multiprocessors as there are warps, then up to 8 warps a block."""
    warps = max(1, min(THREADS // 32, units // arch.sms))
    return (max(ceil_div(units, warps), 1), 1, 1), (32 * warps, 1, 1)


class Shape(NamedTuple):
    """How the warps share the work. steps: units a warp; warps: a multiprocessor; block: warps of one (0: by their number).

    way: "few" rows, each by warps of their own; a row a "block", brought by a bulk copy; "many" rows, `rows` of them a warp;
    or "narrow" ones, as many together in each unit as it has heads.
    """

    steps: int
    warps: int
    early: int = 0  # EARLY_..., 0: not a dependent launch
    way: str = "few"
    block: int = 0
    rows: int = 1

    @property
    def pdl(self) -> bool:
        """A dependent launch?"""
        return self.early > 0


# What a dependent launch does before the previous grid has ended: bits of kernels/common/rope_args.cuh.
EARLY_ROW, EARLY_ALL = 1, 3
# (rows a multiprocessor, Shape): from a row a block that has a multiprocessor for itself to four side by side. fp8 works on two units at once.
ROW_A_BLOCK = ((1, Shape(2, 11, EARLY_ALL, "block")), (2, Shape(3, 18, EARLY_ALL, "block")), (4, Shape(4, 18, EARLY_ALL, "block")))
ROW_A_BLOCK_FP8 = ((1, Shape(2, 11, EARLY_ALL, "block")), (2, Shape(4, 12, EARLY_ALL, "block")), (4, Shape(8, 16, EARLY_ALL, "block")))
# Bytes of a row from which fp8 has a row a block for three rows a multiprocessor, not four. 512 rows, a row a block and narrow: 64/8 heads 6.9 and 6.3 us,
# 24/1 (6.6 KB) 4.9 and 4.3, 8/1 (2.5 KB) 2.8 and 4.2; 300 rows of 64/8 6.6 and 7.0.
THREE_ROWS = 4096
MOST_WARPS = 20  # of a block
WIDE = 8192  # bytes of a row of bf16 from which memory likes it in pieces of 4 to 8 KB better than in heads of several rows
LONG = 16  # units a warp, in fp8, 16384 rows: 64/8 heads (80 units) 122.4 us with 10, 124.5 with 20; 40/8 (56) 87.9 with 14, 90.0 with 28; 9/3 (15) 14.0 and, with 8, 14.8


def shape_of(b: Bound, arch: Arch) -> Shape:
    """Measured on an H200 (kernels/NOTES.md), in units or rows a multiprocessor so that it carries over to other chips.

    A few rows are all latency: a warp a unit, or two. More rows: a block a row, brought by a bulk copy and shared by as many warps as
    registers allow. Many rows: small blocks in the order of the rows.
    """
    tokens, units = b.axes["tokens"], b.axes["tokens"] * sum(_units(b))
    if not arch.clusters:
        return Shape(1, 16) if units <= 16 * arch.sms else _many(b, arch)
    bulk = b.aligned["qkv"] >= 16 and b.aligned["cos_sin"] >= 16 and b.axes["rotary_dim"] % 4 == 0  # what bulk copies can move
    # 64/8 heads (20 units): 16 rows 1.8 us so and 2.0 with a row a block, 32 rows 2.4 and 2.1. 8/1 (4 units): 32 rows 1.8 and 1.6.
    few = 6 * tokens <= arch.sms or not bulk
    if few and units <= arch.sms:
        return Shape(1, 16, EARLY_ALL, block=3 if tokens <= 8 else 2)
    if few and units <= 5 * arch.sms:
        return Shape(2, 16, EARLY_ALL, block=1)
    stage = _stage_bytes(b) + 1024  # the barriers, and what the driver takes of each block
    if bulk:
        fp8 = b.op.endswith("_fp8")
        three = fp8 and _row_bytes(b) >= THREE_ROWS
        for rows, shape in ROW_A_BLOCK_FP8 if fp8 else ROW_A_BLOCK:
            if tokens <= min(rows, 3 if three else rows) * arch.sms and rows * stage <= arch.smem:
                # 64 rows, a warp a unit and one for two: 8/1 heads (4 units) 1.73 and 1.71 us, fp8 1.76 and 2.09; 24/1 (8) 1.90 and 1.81, 32/4 (10) 2.06 and 1.91.
                return shape._replace(steps=1) if rows == 1 and sum(_units(b)) <= 5 else shape
    return _many(b, arch)


def _two_grids(blocks: int, arch: Arch) -> int:
    """Shared memory a block with which as few fit on a multiprocessor as let this grid and the next stand side by side.

    With room for more, some multiprocessors get many blocks of one grid and others none (a page to clear takes 32 bytes a cycle each). H200:
    64/8 heads, 64 rows a block each 2.81 -> 2.31 us, fp8 3.24 -> 2.57; 16 rows, 176 blocks, room for 2.25 grids 1.60, 1.5 2.3, 3 1.9, any number 1.72;
    8/1 heads, 256 rows, room for 2 grids 2.19 (a page to clear: 3.94), 1.5 2.71 (4.36), 2.6 2.37 (4.79), any number 2.47 (5.66).
    """
    return arch.smem // (ceil_div(2 * blocks, arch.sms) + 1)


def _many(b: Bound, arch: Arch) -> Shape:
    """fp8 is arithmetic, and a head of several rows at a time shares its overhead; bf16 is memory, which likes wide rows in few pieces."""
    tokens, width, fp8 = b.axes["tokens"], _row_bytes(b), b.op.endswith("_fp8")
    if not fp8 and width > WIDE:
        # 64/8 heads, 16384 rows: 167.4 us with 8 units of one row, 168.3 with 4 of two, 170 with 8 of two; 40/8 119.9 with 4 of two, 125 with 10.
        s = Shape(8, 16, EARLY_ALL, "many", 1) if width > 2 * WIDE else Shape(4, 16, EARLY_ALL, "many", 1, 2 if width > 1.5 * WIDE else 4)
        rounds = tokens * _parts(b, s) // (2 * arch.sms * s.warps)  # two rounds of warps at least, so that they end together
        s = s._replace(rows=max(min(s.rows, rounds), 1))
    else:
        steps, warps = sum(_units(b, True)), ceil_div(tokens, _heads_per_warp(b))
        # Half a machine: fp8, 8/1 heads, 1024 rows, 3.6 us with 2 units a warp, 4.8 with 3, 5.9 with 5; 9/3, 2048 rows, 4.7 with 4, 5.1 with 8, 6.3 with 15.
        while (fp8 and steps > LONG) or (2 * warps <= 16 * arch.sms and steps >= 2):
            steps, warps = ceil_div(steps, 2), 2 * warps
        s = Shape(steps, 16, EARLY_ALL, "narrow", 1)
    return s if arch.clusters else s._replace(early=0)


def _lean(b: Bound, way: str) -> bool:
    """Do 128 registers suffice for two units at once? Idle lanes, units of q and k, dims that nothing rotates and a bound of fp8 take a few more."""
    dim, narrow = b.axes["head_dim"], way == "narrow"
    mixed = not narrow and b.axes["q_heads"] % _heads_per_warp(b) > 0
    plain = b.axes["rotary_dim"] == dim == b.axes["v_head_dim"] and b.scalars["rope_style"] == "neox" and b.scalars.get("upper_max") is None
    return dim in ((64, 128, 256) if narrow else (128, 256)) and plain and not mixed


def _parts(b: Bound, s: Shape) -> int:
    """Warps that compute a row: some for q alone, some for k and v (Share of kernels/common/rope_units.cuh)."""
    if s.way == "narrow":
        return ceil_div(sum(_units(b, True)), s.steps)
    return sum(ceil_div(n, s.steps) for n in _units(b))


def launch_rope(b: Bound, arch: Arch, shape: Shape | None = None) -> Launch:
    """kParts warps a row; the fp8 op's padding and flags are further warps where rows are few, else further work of the same."""
    a = b.axes
    tokens, requests = a["tokens"], a["requests"]
    fp8 = b.op.endswith("_fp8")
    s = shape or shape_of(b, arch)
    while s.way == "block" and _parts(b, s) >= MOST_WARPS:  # 160 heads or more
        s = s._replace(steps=s.steps + 1)
    parts = _parts(b, s)
    more = 0
    if fp8:
        more += ceil_div(requests * a["kv_heads"], FLAGS_PER_WARP)
        if b.scalars["q_quant"] == "dynamic" and b.scalars["is_prefill"]:
            more += requests * padded(b.scalars["max_q_len"]) // 32
    smem = 0
    warps = s.warps
    if not _lean(b, s.way):  # four warps a scheduler have 128 registers, three 168
        warps = min(warps, 16 if s.way == "block" else 12)
    elif s.way == "many" and _units(b)[0] % s.steps and not arch.clusters:  # a part that is not full: 40/8 heads spilled 24 bytes on sm_80
        warps = min(warps, 12)
    norm_bytes = sum(a["head_dim"] * BY_NAME[b.dtypes[n]].itemsize for n in ("q_norm_weight", "k_norm_weight") if b.has(n))
    if s.way == "block":
        smem = _stage_bytes(b)
        threads = 32 * (parts + 1)
        most = max(min(32 * warps // threads, arch.smem // (smem + 1024)), 1)
        if tokens <= 2 * arch.sms:
            smem = max(smem, _two_grids(tokens, arch))
        grid, block = (max(tokens, 1), 1, 1), (threads, 1, 1)
        how = "a row a block, by bulk copies"
    elif s.way == "many":
        smem = s.block * (RING + norm_bytes + (AHEAD + 1) * ceil_div(4 * a["rotary_dim"], 16) * 16)
        threads = 32 * s.block
        most = min(warps // s.block, arch.blocks)
        grid, block = (max(ceil_div(ceil_div(tokens, s.rows) * parts, s.block), 1), 1, 1), (threads, 1, 1)
        how = f"{s.steps} KB each, of {s.rows} rows"
    elif s.way == "narrow":
        smem, threads, most = NARROW_RING + ANGLES + norm_bytes, 32, min(warps, arch.blocks)
        grid, block = (max(ceil_div(tokens, _heads_per_warp(b)) * parts, 1), 1, 1), (threads, 1, 1)
        how = f"{s.steps} KB each, of {_heads_per_warp(b)} rows"
    else:
        if s.steps < 4 and b.scalars["tail"] == "zero" and not (b.has("out_k") and b.has("out_v")):
            # The tail is looked at by a warp of its own where warps have little to do. Four that clear it alone, where they can do it beside the arithmetic:
            # 8/1 heads, one row, a new page 1.67 -> 1.44 us, fp8 1.66 -> 1.25; 16 rows 1.75 -> 1.80, else 1.69 -> 1.76. 64/8 heads: 2.27 -> 4.32.
            slot = a["kv_heads"] * (a["head_dim"] + a["v_head_dim"]) * BY_NAME[b.dtypes["key_cache"]].itemsize
            parts += 4 if arch.clusters and tokens <= 8 and slot <= 512 else 1
        threads = THREADS
        most = 1 if s.block else max(32 * s.warps // threads, 1)
        count = tokens * parts + more
        grid, block = ((max(ceil_div(count, s.block), 1), 1, 1), (32 * s.block, 1, 1)) if s.block else _blocks(count, arch)
        if s.steps == 2:
            smem = _two_grids(grid[0], arch)  # asked for, so that no more fit; nothing uses it
        how = f"{s.steps} KB each"
    written = [b.aligned[n] for n in ("q", "key_cache", "value_cache", "out_k", "out_v") if n in b.aligned]
    weights = [b.aligned[n] for n in ("q_norm_weight", "k_norm_weight") if n in b.aligned]
    return Launch(
        grid,
        block,
        smem,
        pdl=s.pdl,
        defines={
            "kFp8": int(fp8),
            "kThreads": threads,
            "kMinBlocks": most,
            "kSteps": 1 if s.way == "narrow" else s.steps,  # narrow: both follow from the grid
            "kParts": 1 if s.way == "narrow" else parts,
            "kBulk": int(s.way == "block"),
            "kMany": int(s.way in ("many", "narrow")),
            "kTogether": int(s.way == "narrow"),
            "kEarly": s.early,
            "kReadAlign": b.aligned["qkv"],
            "kWriteAlign": min(written),
            "kTableAlign": b.aligned["cos_sin"],
            "kWeightAlign": min(weights, default=16),
        },
        why=f"{parts} warps a row, {how}",
    )


def padded(max_q_len: int | None) -> int:
    """The inner length of a prefill q_scale."""
    return ceil_div(max_q_len or 0, 128) * 128


def _access(vector_bytes: int, aligned: int) -> int:
    """Bytes per access: what alignment and the length of a head's vector allow."""
    return math.gcd(vector_bytes, aligned, 16)


def launch_store_kv(b: Bound, arch: Arch) -> Launch:
    """A block a row where there are few of them; else two accesses a thread, in blocks of 128 threads."""
    a = b.axes
    row = a["kv_heads"] * a["head_dim"] * BY_NAME[b.dtypes["cache"]].itemsize
    access = _access(a["head_dim"] * BY_NAME[b.dtypes["cache"]].itemsize, min(b.aligned["cache"], b.aligned["src"]))
    few = a["tokens"] <= SEARCH_DUPLICATES
    # H200, rows of 2 KB: 1, 2 and 4 accesses 77, 70 and 71 us at 65536 rows; 2.7, 3.3 and 6.2 at 1024, where a row's threads share the search.
    depth = 1 if few else 2
    part = 32 * min(ceil_div(row // access, 32 * depth), THREADS // 32 if few else 4)
    threads = part if few else max(128 // part, 1) * part
    parts = ceil_div(row // access, part * depth)
    grid = (max(ceil_div(a["tokens"] * parts, threads // part), 1), 1, 1)
    defines = {"kThreads": threads, "kAccess": access, "kPartThreads": part, "kDepth": depth, "kParts": parts, "kFewRows": int(few), "kStore": 1}
    return Launch(grid, (threads, 1, 1), pdl=arch.clusters, defines=defines, why=f"{part} threads a row, {depth} accesses of {access} bytes each")


def launch_zero_kv_tail(b: Bound, arch: Arch) -> Launch:
    """A warp for each slot that a tail can have, or for a few."""
    a = b.axes
    parts = min(1 << max(a["block_size"] - 1, 0).bit_length(), 256)  # a power of two: few distinct binaries
    # H200: 64 requests 3.4 us (128 threads 3.9; a warp for two slots 4.0, for four 4.2), 256 9.5 (64 threads 10.8), 1024 32.8 (64 threads 40; a warp for two
    # slots 33.1, for four 35).
    threads = 64 if a["requests"] * parts <= 64 * arch.sms else 128
    grid = (max(ceil_div(a["requests"] * parts * 32, threads), 1), 1, 1)
    defines = {"kThreads": threads, "kAccess": min(b.aligned["key_cache"], b.aligned["value_cache"]), "kParts": parts, "kStore": 0}
    return Launch(grid, (threads, 1, 1), pdl=arch.clusters, defines=defines, why=f"{parts} warps a request")


ROPE = Variant("row_parts", "rope_norm_store_kv.cu", "rope_norm_store_kv", launch_rope)
ROPE_FP8 = Variant("row_parts", "rope_norm_store_kv.cu", "rope_norm_store_kv_fp8", launch_rope)
STORE = Variant("row_parts", "store_kv.cu", "store_kv", launch_store_kv)
ZERO_TAIL = Variant("slots", "store_kv.cu", "zero_kv_tail", launch_zero_kv_tail)
