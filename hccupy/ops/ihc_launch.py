"""How the iHC kernels are started: pure functions of a Bound and an Arch, with the reason beside each number."""

from __future__ import annotations

from ..arch import Arch
from ..dtypes import BY_NAME
from ..spec import Bound, Launch, Variant, ceil_div

CHUNK = 8  # elements that a thread sums as one; the unit of the fixed order of all sums
# The register limit of a thread falls to 168 at 320 threads a block and to 128 at 416; both spilled.
MOST_THREADS = 256


def vector(b: Bound, names: tuple[str, ...], most: int = CHUNK) -> int:
    """Elements per access that hidden, addresses and strides of these arrays allow."""
    sizes = {n: BY_NAME[b.dtypes[n]].itemsize for n in names if b.has(n)}
    for v in (8, 4, 2, 1):
        if v <= most and b.axes["hidden"] % v == 0 and all(b.aligned[n] >= min(16, v * s) for n, s in sizes.items()):
            return v
    return 1


def threads_for(hidden: int) -> int:
    """Threads of a block, from hidden alone: it fixes the order of the sums, so nothing else may enter."""
    chunks = ceil_div(hidden, CHUNK)
    passes = ceil_div(chunks, MOST_THREADS)
    return 32 * ceil_div(ceil_div(chunks, passes), 32)


def tile(b: Bound, arch: Arch, gates: int) -> tuple[int, bool, int]:
    """(tokens of a block, are their rows staged, dynamic shared bytes).

    w is fetched from L2 once for all tokens of a block, so more is better once every multiprocessor has a block.
    tokens * hc <= 16 bounds the sums that a thread holds. None of this changes bits.
    """
    hc, hidden = b.axes["hc"], b.axes["hidden"]
    threads = threads_for(hidden)
    row = hc * ceil_div(ceil_div(hidden, CHUNK), threads) * threads * CHUNK * BY_NAME[b.dtypes["x"]].itemsize
    sizes = [t for t in (4, 2, 1) if t * hc <= 16 and (t == 1 or ceil_div(b.axes["tokens"], t) >= arch.sms)]
    for t in sizes:
        static = 4 * t * (2 * threads // 32 * (gates + 1) + hc + threads // 32)  # partial sums of the block
        if t * row + static <= arch.smem:
            return t, True, t * row
    return sizes[0], False, 0


def _gated_defines(b: Bound, arrays: tuple[str, ...], head: int | None, threads: int) -> dict[str, int]:
    """What both kernels of an op with gates bake."""
    defines = {"kVec": vector(b, (*arrays, "rms_weight")), "kWeightVec": vector(b, ("w",), 4), "kThreads": threads}
    return defines if head is None else {**defines, "kHead": head}


def _gated(b: Bound, arch: Arch, arrays: tuple[str, ...], head: int | None) -> Launch:
    tokens, staged, smem = tile(b, arch, b.axes["hc"] * (1 if head else 2))
    threads = threads_for(b.axes["hidden"])
    defines = {**_gated_defines(b, arrays, head, threads), "kRanks": 0, "kMinBlocks": 1, "kTileTokens": tokens, "kStaged": int(staged)}
    grid = ceil_div(b.axes["tokens"], tokens)
    where = "rows staged in shared memory" if staged else "rows do not fit shared memory and are read again from L2"
    # Small grids have nothing else to hide their start behind; large ones keep every multiprocessor's shared memory.
    pdl = arch.clusters and grid <= 2 * arch.sms
    return Launch((grid, 1, 1), (threads, 1, 1), smem, pdl=pdl, defines=defines, why=f"{tokens} tokens a block share each fetch of w; {where}")


TENSOR_TOKENS = 8  # the n of the mma
TENSOR_UNIT = 64  # columns that a warp sums as one
# Bytes of w (of head: twice what it has). hc 2, hidden 2560 is faster without at 64 tokens (6.6 us, not 9.0) and no slower by much at 16384
# (113, 101).
TENSOR_LEAST = 1 << 18


def _tensor_units(b: Bound, ranks: int) -> int:
    """Units of a block."""
    return b.axes["hc"] * ceil_div(ceil_div(b.axes["hidden"], TENSOR_UNIT), ranks)


def _tensor_smem(b: Bound, ranks: int) -> tuple[int, int]:
    """(dynamic, all) shared bytes of a block of IhcTensor, with what the driver takes of each."""
    hc, chunk = b.axes["hc"], CHUNK * BY_NAME[b.dtypes["x"]].itemsize
    rows = TENSOR_TOKENS * (_tensor_units(b, ranks) * TENSOR_UNIT // CHUNK * chunk + (64 if chunk == 16 else 16))
    sums = 8 * TENSOR_TOKENS * (2 * hc + 1) * (MOST_THREADS // 32 + 1) + 4 * TENSOR_TOKENS * (hc + 2)
    return rows, rows + sums + 1024


def tensor_ranks(b: Bound, arch: Arch) -> int | None:
    """Blocks of a cluster of IhcTensor; None where no rows fit.

    From hc, hidden, dtype and architecture alone: the order of the sums follows the blocks. The fewest with which four fit a
    multiprocessor, or three, ...: blocks side by side hide each other's waiting, and a lone token is done sooner by more of them.
    H200, hc 4, hidden 4100, 4 and 8 blocks: 11.0 and 7.7 us at 1 token, 13.3 and 10.9 at 64, 387 and 408 at 16384.
    """
    for resident in (4, 3, 2, 1):
        for ranks in (1, 2, 4, 8):
            if resident * _tensor_smem(b, ranks)[1] <= arch.smem:
                return ranks
    return None


def _tensor_when(b: Bound, arch: Arch) -> tuple[bool, str]:
    """Baked facts alone decide, as everywhere where bits are at stake."""
    if not arch.clusters:
        return False, "needs thread-block clusters"
    if 8 * b.axes["hc"] ** 2 * b.axes["hidden"] < TENSOR_LEAST:
        return False, "so few weights are at hand as soon without"
    ranks = tensor_ranks(b, arch)
    if ranks is None:
        return False, "8 rows do not fit the shared memory of 8 blocks"
    if ranks == 8 and arch.name == "sm_90a" and not arch.clusters_of_8:  # a slice of a GPU may be too small
        return False, "no cluster of 8 blocks fits this GPU"
    return True, ""


def _tensor(b: Bound, arch: Arch, arrays: tuple[str, ...], head: int | None) -> Launch:
    ranks = tensor_ranks(b, arch) or 1
    smem, used = _tensor_smem(b, ranks)
    threads = MOST_THREADS if _tensor_units(b, ranks) >= 16 else MOST_THREADS // 2
    # Few tokens: fewer a cluster, so that every multiprocessor has a block. The bits are the same.
    each = max(1, min(TENSOR_TOKENS, ceil_div(b.axes["tokens"] * ranks, arch.sms)))
    grid = ranks * max(1, ceil_div(b.axes["tokens"], each))
    defines = {**_gated_defines(b, arrays, head, threads), "kRanks": ranks, "kMinBlocks": min(arch.smem // used, 3)}  # more would spill
    why = f"clusters of {ranks} blocks share {each} tokens, dots by tensor cores"
    return Launch((grid, 1, 1), (threads, 1, 1), smem, cluster=ranks, pdl=grid <= 2 * arch.sms, defines=defines, why=why)


def launch_pre(b: Bound, arch: Arch) -> Launch:
    """ihc_pre."""
    return _gated(b, arch, ("x", "y"), 0)


def launch_head(b: Bound, arch: Arch) -> Launch:
    """ihc_head."""
    return _gated(b, arch, ("x", "y"), 1)


def launch_post_pre(b: Bound, arch: Arch) -> Launch:
    """ihc_post_pre."""
    return _gated(b, arch, ("x", "residual", "y", "z"), None)


def launch_post(b: Bound, arch: Arch) -> Launch:
    """ihc_post: one 16-byte pack of x and hc of residual a thread."""
    hidden, tokens, hc = b.axes["hidden"], b.axes["tokens"], b.axes["hc"]
    size = BY_NAME[b.dtypes["x"]].itemsize
    vec = vector(b, ("x", "residual", "y"), max(16 // size, 1))
    packs = tokens * (hidden // vec)
    # 128 threads a block spread few packs over more multiprocessors; what passes 32 MB will not be found in L2 again.
    threads = 128 if packs <= 1536 * arch.sms else 256
    moved = tokens * hidden * size * (2 * hc + 1)
    streaming = moved > 32 << 20
    grid = ceil_div(packs, threads)
    # H200: streaming stores 444 -> 425 us at 16384 tokens, 114 -> 108 at 4096 (there only with dependent launches: 120 without).
    # The first 4 MB of rows fetched ahead: 1.21 -> 1.04 at 1 token, 8.3 -> 7.7 at 256, 16.0 -> 15.1 at 512; at 4096 109 -> 112.
    # 8 MB and all 15 at 256: 8.6 and 9.7.
    ahead = ceil_div(4 << 20, threads * vec * size * (hc + 1)) if moved <= 64 << 20 else 0
    # A grid that waits on the multiprocessors of this one is in its way: 1.70 -> 1.24 at 16 tokens. A small one is early in place: 1.04 -> 0.96 at 1.
    late = 2 * grid > arch.sms
    defines = {"kVec": vec, "kThreads": threads, "kStream": int(streaming), "kAhead": ahead, "kLate": int(late)}
    why = f"{vec} elements an access, {threads} threads a block{', streaming stores' if streaming else ''}"
    return Launch((grid, 1, 1), (threads, 1, 1), pdl=arch.clusters, defines=defines, why=why)


PRE_TENSOR = Variant("tensor", "ihc_pre.cu", "ihc_pre", lambda b, arch: _tensor(b, arch, ("x", "y"), 0), _tensor_when)
HEAD_TENSOR = Variant("tensor", "ihc_pre.cu", "ihc_head", lambda b, arch: _tensor(b, arch, ("x", "y"), 1), _tensor_when)
POST_PRE_TENSOR = Variant("tensor", "ihc_post_pre.cu", "ihc_post_pre", lambda b, arch: _tensor(b, arch, ("x", "residual", "y", "z"), None), _tensor_when)
PRE = Variant("portable", "ihc_pre.cu", "ihc_pre", launch_pre)
HEAD = Variant("portable", "ihc_pre.cu", "ihc_head", launch_head)
POST = Variant("portable", "ihc_post.cu", "ihc_post", launch_post)
POST_PRE = Variant("portable", "ihc_post_pre.cu", "ihc_post_pre", launch_post_pre)
