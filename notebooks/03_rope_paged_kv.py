# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # RoPE, QK-norm and the paged KV cache in one call
#
# `rope_norm_store_kv` takes a fused projection `qkv`, normalises and rotates Q and K, returns Q, and writes K and V into pages. Here the
# pages are drawn. Every cell runs on a GPU too, where there is one.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap

import hccupy
from hccupy.bench.plot import BLUE, GREEN, GREY, PURPLE, STYLE, VERMILLION

plt.rcParams.update(STYLE)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(2)
q_heads, kv_heads, dim, slots = 8, 2, 64, 4
angles = torch.arange(64)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
ones = torch.ones(dim, device=device)
norm = {"q_norm_weight": ones, "k_norm_weight": ones, "qk_norm_policy": "norm_then_rope"}


def projection(rows):
    return torch.randn(rows, (q_heads + 2 * kv_heads) * dim).to(torch.bfloat16).to(device)


def caches(pages=8):
    """K and V, [pages, slots, kv_heads, dim] each, in memory that somebody else has used."""
    return torch.full((2, pages, slots, kv_heads, dim), float("nan"), dtype=torch.bfloat16, device=device)


def ints(*lists):
    return [torch.tensor(v, dtype=torch.int32, device=device) for v in lists]


STALE, CLEARED, WRITTEN = 0, 1, 2


def state(cache):
    """[pages, slots]: stale, cleared, or written."""
    stale, zero = cache.isnan().any(-1).any(-1), (cache == 0).all(-1).all(-1)
    return torch.where(stale, STALE, torch.where(zero, CLEARED, WRITTEN)).cpu().numpy()


COLOURS = ListedColormap(["#76767640", "#767676", BLUE, VERMILLION, GREEN, PURPLE])
NAMES = ["stale", "cleared", "request 0", "request 1", "new in this step", "rejected draft"]


def draw(axis, kinds, words, title):
    """Pages as rows, slots as columns; one word a slot."""
    axis.imshow(kinds, cmap=COLOURS, vmin=0, vmax=5, aspect="auto")
    for (page, slot), word in np.ndenumerate(words):
        axis.text(slot, page, word, ha="center", va="center", fontsize=8, color="white" if kinds[page, slot] else GREY)
    axis.set(title=title, xlabel="slot", ylabel="page", xticks=range(kinds.shape[1]), yticks=range(kinds.shape[0]))
    axis.grid(visible=False)
    axis.set_xticks(np.arange(0.5, kinds.shape[1] - 1), minor=True)
    axis.set_yticks(np.arange(0.5, kinds.shape[0] - 1), minor=True)
    axis.grid(visible=True, which="minor", color=GREY, alpha=0.4)
    axis.tick_params(which="minor", length=0)
    axis.label_outer()


def legend(figure, used):
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS(k)) for k in used]
    figure.legend(handles, [NAMES[k] for k in used], loc="outside lower center", ncols=len(used), labelcolor=GREY)


# %% [markdown]
# ## Pages
#
# Request 0 brings a prompt of six tokens into pages 5 and 2, request 1 one token at position 9, in page 7. The block table says which
# page holds which positions; pages need no order. Slots behind the last token of a request become zero, because attention
# kernels read whole pages, and a stale NaN times a weight of zero is a NaN. The number in a slot is the position it holds.

# %%
table = [[5, 2, 0], [3, 4, 7]]
both = caches()
qkv = projection(7)
q = hccupy.rope_norm_store_kv(*both, qkv, cos_sin, *ints([6, 10], [0, 6, 7], table), **norm)


def labelled(cache, owners):
    """(kinds, words) of a cache: owners maps (page, slot) to (kind, word)."""
    kinds = state(cache)
    words = np.full(kinds.shape, "", object)
    words[kinds == CLEARED] = "0"
    for place, (kind, word) in owners.items():
        assert kinds[place] == WRITTEN, place
        kinds[place], words[place] = kind, word
    return kinds, words


def places(pages, positions, kind):
    return {(pages[p // slots], p % slots): (kind, str(p)) for p in positions}


figure, axis = plt.subplots(figsize=(5, 4.2), layout="constrained")
draw(axis, *labelled(both[0], places(table[0], range(6), 2) | places(table[1], [9], 3)), "K after one call for two requests")
legend(figure, [0, 1, 2, 3])
plt.show()

# %% [markdown]
# ## A request walks through its pages
#
# One request with pages 1, 3 and 0: a prompt of six, then token by token. When a page is full the next token opens the next page of the
# table, and the rest of that page is cleared along with it.

# %%
pages, cache = [1, 3, 0], caches(4)
figure, panels = plt.subplots(1, 4, figsize=(11, 2.9), sharey=True, layout="constrained")
length, rows = 0, projection(9)
for axis, new in zip(panels, (6, 1, 1, 1), strict=True):
    step = rows[length : length + new]
    length += new
    hccupy.rope_norm_store_kv(*cache, step, cos_sin, *ints([length], [0, new], [pages]), **norm)
    owners = places(pages, range(length - new), 2) | places(pages, range(length - new, length), 4)
    draw(axis, *labelled(cache[0], owners), f"length {length}")
legend(figure, [0, 1, 2, 4])
plt.show()

# %% [markdown]
# Prefill and decode are the same function: the nine tokens in one call give the same bits.

# %%
once = caches(4)
hccupy.rope_norm_store_kv(*once, rows, cos_sin, *ints([9], [0, 9], [pages]), **norm)
assert torch.equal(once.view(torch.int16), cache.view(torch.int16))

# %% [markdown]
# ## Any layout, through its strides
#
# Engines keep K and V in many ways. The op takes two views with any strides; nothing is copied. The figure shows one page as it lies in
# memory, for two heads and four slots: which head of K or V of which slot stands where.

# %%


def dense():
    both = torch.zeros(2, 8, slots, kv_heads, dim, dtype=torch.bfloat16, device=device)
    return both[0], both[1]


def interleaved():
    both = torch.zeros(8, 2, slots, kv_heads, dim, dtype=torch.bfloat16, device=device)
    return both[:, 0], both[:, 1]


def head_major():
    both = torch.zeros(8, 2, kv_heads, slots, dim, dtype=torch.bfloat16, device=device).transpose(2, 3)
    return both[:, 0], both[:, 1]


def packed():
    both = torch.zeros(8, kv_heads, slots, 2 * dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
    return both[..., :dim], both[..., dim:]


figure, panels = plt.subplots(4, 1, figsize=(11, 4.6), layout="constrained")
for axis, layout in zip(panels, (dense, interleaved, head_major, packed), strict=True):
    key, value = layout()
    hccupy.rope_norm_store_kv(key, value, qkv[:6], cos_sin, *ints([6], [0, 6], [[5, 2, 0]]), **norm)
    assert torch.equal(key[5].view(torch.int16), both[0, 5].view(torch.int16)), layout
    runs = []  # (address in runs of `dim` elements, K or V, slot, head) of page 0
    for kind, cache in ((0, key), (1, value)):
        first = cache.storage_offset()
        runs += [((first + s * cache.stride(1) + h * cache.stride(2)) // dim, kind, s, h) for s in range(slots) for h in range(kv_heads)]
    runs.sort()
    apart = runs[-1][0] - runs[0][0] >= len(runs)  # other pages lie between K and V
    for place, (_, kind, slot, head) in enumerate(runs):
        left = place + 0.5 * (kind if apart else 0.5)
        axis.barh(0, 1, left=left, color=(BLUE, VERMILLION)[kind], alpha=0.7 + 0.3 * head, edgecolor=GREY)
        axis.text(left + 0.5, 0, f"{'KV'[kind]} {slot}.{head}", ha="center", va="center", fontsize=8, color="white")
    axis.set(title=layout.__name__.replace("_", "-") + (": V lies elsewhere" if apart else ""), yticks=[], xticks=[], xlim=(-0.1, len(runs) + 0.6))
    axis.grid(visible=False)
panels[-1].set_xlabel("memory of one page, in the order of its addresses; a field is slot.head of K or V, 64 elements")
plt.show()

# %% [markdown]
# ## FP8
#
# K and V are divided by a scale of the tensor and rounded to e4m3: three bits of mantissa, whole precision from 2^-6 to 448. Between
# these the relative error is at most 1/16. A scale too small cuts large values off; one too large loses small ones, down to
# zero. Below, tokens grow from top to bottom by a factor of two each, 16 of them, which is about all that e4m3 can span.

# %%
grow = 2.0 ** torch.arange(-8, 8, device=device)[:, None]
v = torch.randn(16, kv_heads * dim, device=device) * grow
qkv8 = torch.cat([torch.randn(16, (q_heads + kv_heads) * dim, device=device), v], 1).to(torch.bfloat16)
exact = qkv8[:, -kv_heads * dim :].float()
fits = exact.abs().max().item() / 448
figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
for axis, factor, title in zip(
    panels, (1.0, 1 / 64, 64.0), ("the largest value becomes 448", "scale 64 times too small", "scale 64 times too large"), strict=True
):
    k8, v8 = torch.zeros(2, 4, slots, kv_heads, dim, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.tensor([fits * factor], device=device)
    hccupy.rope_norm_store_kv_fp8(k8, v8, qkv8, cos_sin, *ints([16], [0, 16], [[0, 1, 2, 3]]), **norm, k_scale=scale, v_scale=scale, is_prefill=False)
    back = v8.float().reshape(16, -1) * scale
    error = ((back - exact).abs() / exact.abs().clamp_min(1e-30)).cpu().numpy()[:, :dim]
    image = axis.imshow(error, aspect="auto", cmap="cividis", vmin=0, vmax=0.25, interpolation="nearest")
    axis.set(title=f"{title}\n{(error <= 1 / 16).mean():.0%} of the values within 1/16", xlabel="element of a head of V")
    axis.grid(visible=False)
panels[0].set_ylabel("token, each twice as large")
figure.colorbar(image, label="relative error of V", extend="max")
plt.show()

# %% [markdown]
# Q gets a scale for each token and head (`q_quant="dynamic"`), so it always fits, however large or small a token is:

# %%
wide = torch.cat([torch.randn(16, q_heads * dim, device=device) * grow, qkv8[:, q_heads * dim :].float()], 1).to(torch.bfloat16)
k8, v8 = torch.zeros(2, 4, slots, kv_heads, dim, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
given = (cos_sin, *ints([16], [0, 16], [[0, 1, 2, 3]]))
q8, q_scale, _ = hccupy.rope_norm_store_kv_fp8(k8, v8, wide, *given, k_scale=scale, v_scale=scale, is_prefill=False)
q16 = hccupy.rope_norm_store_kv(*torch.zeros(2, 4, slots, kv_heads, dim, dtype=torch.bfloat16, device=device), wide, *given)
off = (q8.float() * q_scale[:, :, None] - q16.float()).abs().amax(-1) / q16.float().abs().amax(-1)
print(f"scales from {q_scale.min().item():.2g} to {q_scale.max().item():.2g}; error of Q relative to its head: at most {off.max().item():.3f}")

# %% [markdown]
# ## Drafts that are rolled back
#
# With multi-token prediction an engine writes draft tokens and takes some of them back. Nothing has to be undone: the next call says a
# smaller length. Here three drafts are written, the model rejects two, and the next token is written where the first rejected one was.
# The other rejected draft is stale then. `tail="zero"` clears it; `tail="keep"` leaves it for an engine that masks by length.

# %%
pages = [2, 0]
figure, panels = plt.subplots(1, 3, figsize=(10, 2.9), sharey=True, layout="constrained")
for tail, axis in (("zero", panels[1]), ("keep", panels[2])):
    cache = caches(3)
    rows = torch.cat([projection(5)])
    hccupy.rope_norm_store_kv(*cache, rows[:4], cos_sin, *ints([4], [0, 4], [pages]), **norm)
    drafts = projection(3)
    hccupy.rope_norm_store_kv(*cache, drafts, cos_sin, *ints([7], [0, 3], [pages]), **norm)
    if tail == "zero":
        draw(panels[0], *labelled(cache[0], places(pages, range(4), 2) | places(pages, range(4, 7), 4)), "three drafts written\nlength 7")
    hccupy.rope_norm_store_kv(*cache, rows[4:], cos_sin, *ints([6], [0, 1], [pages]), **norm, tail=tail)
    owners = places(pages, range(5), 2) | places(pages, [5], 4)
    if tail == "keep":
        owners |= places(pages, [6], 5)
    draw(axis, *labelled(cache[0], owners), f"one kept, next token written\nlength 6, tail={tail!r}")
legend(figure, [0, 1, 2, 4, 5])
plt.show()

# %% [markdown]
# ## Bad metadata never writes out of bounds
#
# A page that does not exist costs its rows their K, V and Q, and nothing else. `HCCUPY_DEBUG=1` names it:

# %%
bad = ints([6], [0, 6], [[5, 99, 0]])
q = hccupy.rope_norm_store_kv(*caches(), qkv[:6], cos_sin, *bad, **norm)
print("rows with a q:", q.float().abs().sum((1, 2)).ne(0).tolist())
os.environ["HCCUPY_DEBUG"] = "1"
try:
    hccupy.rope_norm_store_kv(*caches(), qkv[:6], cos_sin, *bad, **norm)
except hccupy.MetadataError as error:
    print(error)
del os.environ["HCCUPY_DEBUG"]
