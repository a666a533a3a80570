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
# `rope_norm_store_kv` takes a fused projection `qkv`, normalises and rotates Q and K, returns Q, and writes K and V into pages.

# %%
import ml_dtypes
import numpy as np

import hccupy

rng = np.random.default_rng(2)
q_heads, kv_heads, dim, block = 8, 2, 64, 4
angles = np.arange(64)[:, None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
norm = {"q_norm_weight": np.ones(dim, np.float32), "k_norm_weight": np.ones(dim, np.float32), "qk_norm_policy": "norm_then_rope"}


def projection(rows):
    return rng.standard_normal((rows, (q_heads + 2 * kv_heads) * dim)).astype(ml_dtypes.bfloat16)


def caches(pages=8):
    stale = np.full((2, pages, block, kv_heads, dim), np.nan)  # memory that somebody else has used
    return stale.astype(ml_dtypes.bfloat16)


def meta(*lists):
    return [np.array(v, np.int32) for v in lists]


def written(cache):
    """One letter a slot: # written, 0 cleared, . stale."""
    values = cache.astype(np.float32)
    return [" ".join("." if np.isnan(s).any() else "0" if not s.any() else "#" for s in page) for page in values]


# %% [markdown]
# ## A prompt and a decode step
#
# Request 0 brings six tokens into pages 5 and 2, request 1 one token at position 9, in page 7. Slots behind the last token
# of a request become zero, because attention kernels read whole pages and a stale NaN times zero is a NaN.

# %%
both = caches()
qkv = projection(7)
q = hccupy.rope_norm_store_kv(*both, qkv, cos_sin, *meta([6, 10], [0, 6, 7], [[5, 2, 0], [3, 4, 7]]), **norm)
for page, slots in enumerate(written(both[0])):
    print(page, slots)

# %% [markdown]
# ## Prefill and decode are the same function
#
# The prompt token by token gives the same bits:

# %%
step = caches()
for i in range(6):
    qi = hccupy.rope_norm_store_kv(*step, qkv[i : i + 1], cos_sin, *meta([i + 1], [0, 1], [[5, 2, 0]]), **norm)
    assert (qi[0] == q[i]).all()
assert (step[:, 5].view(np.uint16) == both[:, 5].view(np.uint16)).all()

# %% [markdown]
# ## Any layout, through its strides
#
# Here K and V share the last axis of one buffer, head-major, as some engines keep them. Nothing is copied:

# %%
packed = np.zeros((8, kv_heads, block, 2 * dim), ml_dtypes.bfloat16)
key, value = packed.transpose(0, 2, 1, 3)[..., :dim], packed.transpose(0, 2, 1, 3)[..., dim:]
hccupy.rope_norm_store_kv(key, value, qkv[:6], cos_sin, *meta([6], [0, 6], [[5, 2, 0]]), **norm)
assert (key[5].view(np.uint16) == both[0, 5].view(np.uint16)).all()
print("strides of K in elements:", [s // 2 for s in key.strides])

# %% [markdown]
# ## FP8
#
# K and V are divided by a scale of the tensor, Q gets a scale for each token and head:

# %%
fp8 = np.zeros((2, 8, block, kv_heads, dim), ml_dtypes.float8_e4m3fn)
q8, q_scale, _ = hccupy.rope_norm_store_kv_fp8(
    *fp8,
    qkv[:6],
    cos_sin,
    *meta([6], [0, 6], [[5, 2, 0]]),
    **norm,
    k_scale=np.array([0.02], np.float32),
    v_scale=np.array([0.02], np.float32),
    is_prefill=False,
)
back = q8.astype(np.float32) * q_scale[:, :, None]
print("largest error of Q, relative to its head:", float((np.abs(back - q[:6].astype(np.float32)).max(-1) / np.abs(back).max(-1)).max()))

# %% [markdown]
# ## Bad metadata never writes out of bounds
#
# A page that does not exist costs its rows their K, V and Q, and nothing else. `HCCUPY_DEBUG=1` names it:

# %%
import os

bad = meta([6], [0, 6], [[5, 99, 0]])
q = hccupy.rope_norm_store_kv(*caches(), qkv[:6], cos_sin, *bad, **norm)
print("rows with a q:", q.astype(np.float32).any((1, 2)))
os.environ["HCCUPY_DEBUG"] = "1"
try:
    hccupy.rope_norm_store_kv(*caches(), qkv[:6], cos_sin, *bad, **norm)
except hccupy.MetadataError as error:
    print(error)
del os.environ["HCCUPY_DEBUG"]
