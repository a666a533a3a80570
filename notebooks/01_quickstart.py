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
# # Quickstart
#
# Hyper-connections keep `hc` residual channels instead of one. Around every attention and MLP block stand two small ops:
# **pre** computes gates from the channels and mixes them into the block's input; **post** adds the block's output back to
# every channel. After the last layer **head** merges the channels. This notebook runs on the CPU path, with no GPU; the
# same calls run CUDA kernels when the arrays are on a GPU.

# %%
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import hccupy

rng = np.random.default_rng(0)
tokens, hc, hidden = 6, 4, 256
x = rng.standard_normal((tokens, hc, hidden)).astype(ml_dtypes.bfloat16)
w = (rng.standard_normal((2 * hc, hc * hidden)) / np.sqrt(hc * hidden)).astype(np.float32)
hc_scale = np.array([1.0, 1.0], np.float32)
hc_base = np.concatenate([np.full(hc, -np.log(hc - 1)), np.zeros(hc)]).astype(np.float32)

# %% [markdown]
# ## pre → block → post → head

# %%
y, h_post = hccupy.ihc_pre(x, w, hc_scale, hc_base)
block = np.tanh(y.astype(np.float32)).astype(y.dtype)  # stands for attention or an MLP
x_next = hccupy.ihc_post(block, x, h_post)
merged = hccupy.ihc_head(x_next, w[:hc], hc_scale[:1], hc_base[:hc])
print("block input", y.shape, y.dtype, "| gates", h_post.shape, h_post.dtype)
print("next channels", x_next.shape, "| merged", merged.shape)

# %% [markdown]
# A row's bits do not depend on the batch it is in:

# %%
alone, _ = hccupy.ihc_pre(x[2:3], w, hc_scale, hc_base)
assert (alone[0] == y[2]).all()

# %% [markdown]
# ## The gates
#
# `h_post` says how strongly each channel takes the block's output up. With `hc_scale = 0` every gate would be 1 and the
# network would be the plain residual one.

# %%
figure, axis = plt.subplots(figsize=(5, 3))
image = axis.imshow(h_post, vmin=0, vmax=2, cmap="viridis", aspect="auto")
axis.set(xlabel="channel", ylabel="token", title="h_post", xticks=range(hc))
figure.colorbar(image)
plt.show()

# %% [markdown]
# ## The same call with torch tensors
#
# Tensors go in and out without a copy, and outputs are tensors.

# %%
import torch

xt = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
yt, ht = hccupy.ihc_pre(xt, torch.from_numpy(w), torch.from_numpy(hc_scale), torch.from_numpy(hc_base))
assert yt.dtype is torch.bfloat16
assert (yt.view(torch.int16).numpy() == y.view(np.int16)).all()

# %% [markdown]
# ## RoPE, QK-norm and the paged KV cache
#
# One call rotates and normalises Q and K and writes K and V into their pages. Two requests: a prompt of five tokens, and
# one decode step at position 17. Blocks of 8 slots may lie anywhere in the cache.

# %%
q_heads, kv_heads, head_dim, block_size = 8, 2, 64, 8
positions = 64
angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
key_cache = np.zeros((10, block_size, kv_heads, head_dim), ml_dtypes.bfloat16)
value_cache = np.zeros_like(key_cache)
seq_lens = np.array([5, 18], np.int32)  # lengths after this call
q_index = np.array([0, 5, 6], np.int32)  # prefix sum of the new tokens
block_table = np.array([[7, 0, 0], [2, 9, 4]], np.int32)
qkv = rng.standard_normal((6, (q_heads + 2 * kv_heads) * head_dim)).astype(ml_dtypes.bfloat16)
ones = np.ones(head_dim, np.float32)

q = hccupy.rope_norm_store_kv(
    key_cache,
    value_cache,
    qkv,
    cos_sin,
    seq_lens,
    q_index,
    block_table,
    q_norm_weight=ones,
    k_norm_weight=ones,
    qk_norm_policy="norm_then_rope",
)
print("q", q.shape, q.dtype)
written = np.argwhere(key_cache.astype(np.float32).any((2, 3)))
print("slots written (block, slot):", [tuple(int(v) for v in s) for s in written])

# %% [markdown]
# ## Errors say what to mend

# %%
try:
    hccupy.ihc_pre(x, w.T.copy(), hc_scale, hc_base)
except hccupy.ShapeError as error:
    print(error)
