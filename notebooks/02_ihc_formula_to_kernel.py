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
# # iHC: from the formula to the kernel
#
# `ihc_pre` reads all channels of a token, makes `2 * hc` gates from them, and mixes the channels with half of the gates:
#
# $$r = 1/\sqrt{\mathrm{mean}(x^2) + \epsilon},\quad m = r\, W x,\quad
# h = \sigma(m \cdot s + b) + \epsilon_{hc},\quad y = \sum_i h_i x_i$$

# %%
import numpy as np

import hccupy

rng = np.random.default_rng(1)
tokens, hc, hidden = 5, 4, 1024
x = rng.standard_normal((tokens, hc, hidden)).astype(np.float32)
w = (rng.standard_normal((2 * hc, hc * hidden)) / np.sqrt(hc * hidden)).astype(np.float32)
scale, base = np.array([1.2, 0.8], np.float32), rng.standard_normal(2 * hc).astype(np.float32)


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


xf = x.astype(np.float64)
r = 1 / np.sqrt((xf**2).mean((1, 2)) + 1e-5)
mixes = xf.reshape(tokens, -1) @ w.astype(np.float64).T * r[:, None]
h_pre = sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + 1e-6
h_post = 2 * sigmoid(mixes[:, hc:] * scale[1] + base[hc:]) + 1e-6
y, gates = hccupy.ihc_pre(x, w, scale, base)
print("gates differ from fp64 by", np.abs(gates - h_post).max())
assert np.allclose(y, np.einsum("nm,nmh->nh", h_pre, xf), atol=1e-5)

# %% [markdown]
# ## What the kernel has to do
#
# The gates need the whole row before the first output element can be made, and the row should come from memory once. `w` is
# fp32 and as large as a few rows: it has to be used for many tokens. On tensor cores `x` is exact in bf16, and `w` is split
# into three bf16 pieces by cutting off 16 bits at a time. Together they hold every bit of the fp32 weight:

# %%


def cut(v):
    """The upper 16 bits of fp32: a bf16 number, rounded towards zero."""
    return (v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


high = cut(w)
middle = cut(w - high)
low = w - high - middle
assert (cut(low) == low).all() and (high.astype(np.float64) + middle + low == w).all()
print("largest share of each piece:", [float(np.abs(p / w).max()) for p in (high, middle, low)])

# %% [markdown]
# ## One order of the sums
#
# Floating-point sums depend on their order. The kernels fix it by the sizes of the model alone, so a row's bits are the same
# in every batch; the CPU path keeps the same promise:

# %%
for first in range(tokens):
    alone, _ = hccupy.ihc_pre(x[first : first + 1], w, scale, base)
    assert (alone[0] == y[first]).all()

# %% [markdown]
# ## Which kernel runs
#
# A plan is made without a GPU. `python -m hccupy explain` prints the same:

# %%
from hccupy.explain import plan_for

for n in (1, 64, 4096):
    plan = plan_for("ihc_pre", {"tokens": n, "hc": 4, "hidden": 6144}, arch="sm_90a")
    print(f"{n:5d} tokens: {plan.variant}: {plan.launch.why}")
plan = plan_for("ihc_pre", {"tokens": 64, "hc": 4, "hidden": 6144}, arch="sm_80")
print(f"   sm_80: {plan.variant}: {plan.launch.why}")
