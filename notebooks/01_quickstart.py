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
# every channel. After the last layer **head** merges the channels.
#
# Every cell runs where the tensors are: on a GPU with the CUDA kernels, on the CPU with NumPy. The outputs kept in this file are
# those of the CPU.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import hccupy
from hccupy.bench.plot import STYLE

plt.rcParams.update(STYLE)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokens, hc, hidden = 6, 4, 256
x = torch.randn(tokens, hc, hidden).to(torch.bfloat16).to(device)
w = (torch.randn(2 * hc, hc * hidden) / (hc * hidden) ** 0.5).to(device)
hc_scale = torch.ones(2, device=device)
hc_base = torch.tensor([-np.log(hc - 1)] * hc + [0.0] * hc, dtype=torch.float32, device=device)

# %% [markdown]
# ## pre → block → post → head

# %%
y, h_post = hccupy.ihc_pre(x, w, hc_scale, hc_base)
block = torch.tanh(y)  # stands for attention or an MLP
x_next = hccupy.ihc_post(block, x, h_post)
merged = hccupy.ihc_head(x_next, w[:hc], hc_scale[:1], hc_base[:hc])
print("block input", tuple(y.shape), y.dtype, "| gates", tuple(h_post.shape), h_post.dtype)
print("next channels", tuple(x_next.shape), "| merged", tuple(merged.shape))

# %% [markdown]
# Between two blocks `ihc_post_pre` does both in one pass over memory, here in place and with the next block's RMSNorm folded in:

# %%
channels = x.clone()
norm = torch.ones(hidden, device=device)
channels, z, h_next = hccupy.ihc_post_pre(block, channels, h_post, w, hc_scale, hc_base, rms_weight=norm, out=channels)
assert torch.equal(channels, x_next)

# %% [markdown]
# A row's bits do not depend on the batch it is in:

# %%
alone, _ = hccupy.ihc_pre(x[2:3], w, hc_scale, hc_base)
assert torch.equal(alone[0], y[2])

# %% [markdown]
# ## The gates
#
# `h_post` says how strongly each channel takes the block's output up. With `hc_scale = 0` every gate would be 1 and the
# network would be the plain residual one.

# %%
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
image = axis.imshow(h_post.cpu(), vmin=0, vmax=2, cmap="cividis", aspect="auto")
axis.set(xlabel="channel", ylabel="token", title="how much of the block each channel takes", xticks=range(hc))
axis.grid(visible=False)
figure.colorbar(image, label="gate")
plt.show()

# %% [markdown]
# ## Other arrays
#
# NumPy, CuPy, JAX and DLPack arrays go in and out in the same way, without a copy. Results are arrays of the framework that came in.

# %%
given = [t.cpu().float().numpy() for t in (x, w, hc_scale, hc_base)]
y_numpy, h_numpy = hccupy.ihc_pre(*given)
print(type(y_numpy).__name__, y_numpy.dtype, "gates differ by", float(np.abs(h_numpy - h_post.cpu().numpy()).max()))

# %% [markdown]
# ## RoPE, QK-norm and the paged KV cache
#
# One call rotates and normalises Q and K and writes K and V into their pages. Two requests: a prompt of five tokens, and
# one decode step at position 17. Pages of 8 slots may lie anywhere in the cache.

# %%
q_heads, kv_heads, head_dim, block_size, positions = 8, 2, 64, 8, 64
angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
key_cache, value_cache = torch.zeros(2, 10, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device=device)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=device)


qkv = torch.randn(6, (q_heads + 2 * kv_heads) * head_dim).to(torch.bfloat16).to(device)
ones = torch.ones(head_dim, device=device)
q = hccupy.rope_norm_store_kv(
    key_cache,
    value_cache,
    qkv,
    cos_sin,
    ints(5, 18),  # lengths after this call
    ints(0, 5, 6),  # prefix sum of the new tokens
    ints([7, 0, 0], [2, 9, 4]),  # pages of each request
    q_norm_weight=ones,
    k_norm_weight=ones,
    qk_norm_policy="norm_then_rope",
)
print("q", tuple(q.shape), q.dtype)
print("slots written (page, slot):", [tuple(s) for s in key_cache.abs().sum((2, 3)).nonzero().tolist()])

# %% [markdown]
# ## Questions without arrays, and errors that say what to mend

# %%
print(hccupy.supports("ihc_pre", hc=4, hidden=6144, arch="sm_90a"))
print(hccupy.supports("ihc_pre", hc=9, hidden=6144, arch="sm_90a"))
try:
    hccupy.ihc_pre(x, w.T, hc_scale, hc_base)
except hccupy.ShapeError as error:
    print(error)
