"""How the sm_90a tensor-core kernels of pre, head and post_pre are started.

Two kernels, the same bits: one cluster of blocks per few tokens (decode), and persistent clusters that stream tiles of 8
tokens (everything else). Which of them runs depends on tokens; whether they run at all on baked facts only.
"""

from __future__ import annotations

from ..arch import Arch
from ..spec import Bound, Launch, Variant, ceil_div
from .ihc_launch import vector

# hidden from which on they are faster than what serves every size. H200, 16384 tokens, bf16, microseconds, that and these: hc 4, hidden 256 29.5
# and 37.1, 512 59 and 37; hc 3, 512 39.6 and 33.8; hc 2, 256 14.4 and 29.0, 2048 93 and 51. hc 1 is faster at some sizes (4096 87 and 77) and not
# at others (post_pre 141 and 140, 2048 with a norm 55 and 69). hc 8, 1024 222 and 224, head 154 and 121, 2048 473 and 258, head 317 and 140; hc 5,
# 1024 182 and 189, 2560 422 and 308.
LEAST = {2: 1024, 3: 512, 4: 512, 5: 2560, 6: 2048, 7: 2048, 8: 2048}
TILE = 8  # tokens: the n of mma.m16n8k16
OPS = {"ihc_pre": 0, "ihc_head": 1, "ihc_post_pre": 2}


def eligible(b: Bound, arch: Arch) -> tuple[bool, str]:
    """Baked facts alone decide: never tokens, strides or alignment, which must not change bits."""
    if arch.name != "sm_90a":
        return False, "written for sm_90a"
    if not arch.clusters_of_8:  # a slice of a GPU may be too small
        return False, "no cluster of 8 blocks with a multiprocessor each fits this GPU"
    if b.dtypes["x"] not in ("bfloat16", "float16"):
        return False, "x is exact in the tensor cores' 16-bit formats only"
    hc, hidden = b.axes["hc"], b.axes["hidden"]
    if hc not in LEAST:
        return False, f"hc in {tuple(LEAST)}"
    if hidden < LEAST[hc]:
        return False, f"hc {hc} from hidden {LEAST[hc]} on"
    ranks = stream_ranks(hc, hidden)
    if not weights_fit(hc, hidden, ranks):
        return False, "the weights do not fit the registers of a cluster"
    if hidden % (8 * ranks):
        return False, f"a block's share of {hidden} columns is no whole number of 16-byte pieces"
    if ranks == 16 and not arch.clusters_of_16:
        return False, "no cluster of 16 blocks with a multiprocessor each fits this GPU"
    return True, ""


RANKS = (2, 4, 8, 16)


def chunk_units(hidden: int, ranks: int) -> int:
    """Units of a chunk, as sm90_ihc.cuh has it: 8 chunks share a block's columns, and half of `ranks` chunks are whole groups."""
    units = ceil_div(2 * ceil_div(hidden // ranks, 32), 8)
    return units + ranks // 2 * units % 2


def weights_fit(hc: int, hidden: int, ranks: int) -> bool:
    """Do the weights of a block's share fit its registers, 168 of a thread, in bfloat16? (float16, which takes a third less, is served alike.)

    More spill; so do 144 where masks take registers: of hc 3, whose fourth channel is not there, and of the columns that do not fill their groups
    of 32 where hc 2 has more groups. Over 4 channels, 156 and 168 were not tried, and a block works out the gates of one token, so 8 blocks or more.
    """
    units = chunk_units(hidden, ranks)
    padded = 4 * units * 32 != hidden // ranks
    if hc > 4 and ranks < 8:
        return False
    return units * ceil_div(hc, 2) * 12 <= (144 if hc == 3 or hc > 4 else 132 if hc == 2 and padded else 168)


def stream_ranks(hc: int, hidden: int) -> int:
    """Blocks of a cluster that streams: the fewest whose registers hold the weights. It fixes the order of the sums.

    A tile of 8 tokens takes a cluster 1.1 us or more whatever its width, so more clusters of fewer blocks are faster. hc 2, 16384 tokens, us, in
    clusters of 8 and 4: hidden 4096 127 and 99, 6144 161 and 158, with a norm 241 and 186 (but 64 tokens 3.25 and 3.45).
    """
    return next((r for r in RANKS if weights_fit(hc, hidden, r)), RANKS[-1])


def resident(ranks: int, arch: Arch) -> int:
    """Clusters of so many blocks that run at once, with a multiprocessor each.

    Pairs of multiprocessors always take a cluster of 2. Of 4, as many as have room in clusters of 8: on an H200 30; with 32 two rounds were
    needed (hc 4, hidden 2048, 16384 tokens: 159 us, not 88).
    """
    if ranks == 16:
        return arch.clusters_of_16
    return arch.sms // 2 if ranks == 2 else arch.clusters_of_8 * 8 // ranks


def stream_clusters(tokens: int, fit: int, *, post: bool, norm: bool) -> int:
    """Clusters that stream so many tokens, of `fit` that run at once.

    Not all where tokens are few: the next grid stands beside this one then, and has its weights when this one ends. Measured with 15 clusters of
    8 blocks that fit (hc 4, hidden 6144, microseconds), stated as shares of them; with 7 of 16 blocks and with 30 and 66 of 4 and 2 where that
    is said. The bits do not depend on it.
    """
    if fit < 8:  # hidden 8192: fewer clusters unless that takes a round of tiles more
        if tokens <= 2 * TILE * (fit - 2):
            wanted = fit - 2  # at 40 tokens: pre 5 clusters 4.31, 3 4.39, 7 5.05; with a norm 4.93 and 5.65 (4); post_pre 4.95 and 5.67 (4)
        elif tokens <= 3 * TILE * (fit - 1):
            wanted = fit - 1  # at 128 tokens: pre 6 clusters 6.68, 5 7.35, 7 7.78; post_pre 8.64, 9.85, 10.0
        else:
            wanted = fit  # pre at 256 tokens: 7 clusters 9.56, 6 10.15
        return max(1, wanted)
    half = fit // 2  # as many as the next grid has room for; with more some blocks start late. pre at 48 tokens: 7 clusters 3.4, 8 4.1, 10 4.15
    if tokens <= TILE * half:
        wanted = half
    elif tokens <= TILE * (fit - 2):
        # One tile each. At 64: pre 9 clusters 4.13, 8 4.20, 7 4.58; with a norm 5.07, 5.04, 5.42; post_pre 5.21, 5.30, 6.11. At 88: pre 11 4.48,
        # 7 4.68; post_pre 5.68 and 6.4
        wanted = max(half + 2, ceil_div(tokens, TILE))
    elif tokens <= 2 * TILE * (fit - 2):
        # Two tiles. At 112: pre 7 clusters 4.87, 8 5.35, 13 5.55; with a norm 5.72, 6.17, 6.67. At 160: 10 5.72, 13 5.92. 30 that fit, hc 2, hidden
        # 6144 at 240: pre 15 5.42, 20 5.72, 28 5.73
        wanted = max(half, ceil_div(tokens, 2 * TILE))
    elif tokens <= 3 * TILE * (fit - 2):
        wanted = fit - 2  # two of the next grid get in. 256 tokens: pre 13 clusters 8.14, 12 8.20, 15 9.0
    elif norm and not post and tokens <= 5 * TILE * (fit - 2):
        wanted = fit - 2  # at 512 tokens: 15 clusters 13.5, 14 13.2, 13 13.0
    elif not post and not norm and tokens <= 5 * TILE * (fit - 1):
        wanted = fit - 1  # pre at 512 tokens: 15 clusters 12.25, 14 11.98, 13 12.06
    else:
        wanted = fit
    return max(1, min(wanted, fit))


def cluster_tokens(tokens: int) -> int:
    """Most tokens of a cluster of 16 blocks.

    pre, without and with a norm. At 12 tokens: 4 a cluster 2.29 and 2.99, 6 2.49 and 3.22; at 16: 6 2.66 and 3.27, 8 2.77 and 3.49; at 24: 8 2.88
    and 3.57, 6 3.16 and 3.78.
    """
    return 4 if tokens <= 12 else 6 if tokens <= 18 else 8


def lanes_ask(tokens: int, clusters: int, hc: int) -> bool:
    """Do the lanes that multiply ask for a cluster's first tile themselves?

    The kernel allows two tiles. With fewer than 14 rows a tile the loader asks sooner: hc 2, hidden 6144, 64 tokens in 15 clusters 3.4, by lanes 3.7.
    """
    tiles = clusters * ceil_div(tokens, clusters * TILE)
    return tiles <= 2 * clusters and tokens > (ceil_div(14, hc) - 1) * tiles


def launch(b: Bound, arch: Arch) -> tuple[Launch, str]:
    """(launch, source file). Figures: H200, hidden 6144, hc 4, bf16, microseconds."""
    op, tokens, hidden = OPS[b.op], b.axes["tokens"], b.axes["hidden"]
    arrays = ("x", "residual", "y", "z") if op == 2 else ("x", "y")
    vec = vector(b, arrays)
    if b.aligned["w"] < 16:
        vec = min(vec, 4)
    hc = b.axes["hc"]
    ranks = stream_ranks(hc, hidden)
    warps = ranks // 2 * chunk_units(hidden, ranks) // 2  # of a block of the kernel for few tokens, a group of 32 columns each
    defines = {"kOp": op, "kVec": vec, "kRanks": ranks, "kLanesAsk": 0}
    if hc <= 4 and tokens <= 32 and arch.clusters_of_16 and warps <= (24 if hc == 2 else 16):  # more spill
        each = cluster_tokens(tokens)
        clusters = ceil_div(tokens, each)
        why = f"{clusters} clusters of 16 blocks, up to {each} tokens each, weights and rows in registers"
        block = (warps + (warps < 16)) * 32  # a warp for the gates that are only returned
        return Launch((16 * clusters, 1, 1), (block, 1, 1), cluster=16, pdl=True, defines=defines, why=why), "cluster"
    fit = resident(ranks, arch)
    if hc > 4 and b.op == "ihc_pre":  # two sides: half of the clusters work on the post gates alone
        clusters = max(2, min(2 * ceil_div(tokens, TILE), fit))
    else:
        clusters = stream_clusters(tokens, fit, post=b.op == "ihc_post_pre", norm=b.has("rms_weight"))
    if vec == 8 and (hc <= 4 or b.op == "ihc_head"):  # aligned, one side
        defines["kLanesAsk"] = int(lanes_ask(tokens, clusters, hc))
    smem = 232448  # what a block of sm_90 may have; the kernel takes as many stages as fit
    why = f"{clusters} persistent clusters of {ranks} blocks stream tiles of 8 tokens through shared memory, weights in registers"
    return Launch((ranks * clusters, 1, 1), (512, 1, 1), smem, cluster=ranks, pdl=True, defines=defines, why=why), "stream"


def _variant(entry: str, kind: str) -> Variant:
    def when(b: Bound, arch: Arch) -> tuple[bool, str]:
        ok, reason = eligible(b, arch)
        if ok and launch(b, arch)[1] != kind:
            return False, f"{b.axes['tokens']} tokens are for the other of the two"
        return ok, reason

    return Variant(f"sm90_{kind}", f"sm90_ihc_{kind}.cu", entry, lambda b, arch: launch(b, arch)[0], when)


def variants(entry: str) -> tuple[Variant, ...]:
    """Both kernels of an op, to stand before its portable one."""
    return _variant(entry, "cluster"), _variant(entry, "stream")
