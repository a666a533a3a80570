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
# Three questions: what do hyper-connections compute, what do they do to a real model, and what does it take to make them as fast as
# memory?
#
# ## The formula
#
# `ihc_pre` reads all channels of a token, makes `2 * hc` gates from them, and mixes the channels with half of the gates:
#
# $$r = 1/\sqrt{\mathrm{mean}(x^2) + \epsilon},\quad m = r\, W x,\quad
# h = \sigma(m \cdot s + b) + \epsilon_{hc},\quad y = \sum_i h_i x_i$$
#
# The other half, times 2, are the gates of `ihc_post`, which gives the block's output back: $x_i \leftarrow x_i + h^{post}_i\, \mathrm{block}(y)$.

# %%
import dataclasses
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import hccupy
from hccupy.bench.plot import BLUE, COLOURS, GREY, MARKERS, STYLE

plt.rcParams.update(STYLE)
rng = np.random.default_rng(1)
tokens, hc, hidden = 5, 4, 1024
x = rng.standard_normal((tokens, hc, hidden)).astype(np.float32)
w = (rng.standard_normal((2 * hc, hc * hidden)) / np.sqrt(hc * hidden)).astype(np.float32)
scale, base = np.array([1.2, 0.8], np.float32), rng.standard_normal(2 * hc).astype(np.float32)


def gates(x, w, scale, base, norm_eps=1e-5):
    """(h_pre, h_post) in fp64, by the formula; no eps on the gates."""
    x, half = x.astype(np.float64), x.shape[1]
    r = 1 / np.sqrt((x**2).mean((1, 2)) + norm_eps)
    mixes = x.reshape(len(x), -1) @ w.astype(np.float64).T * r[:, None]
    logits = mixes * np.repeat(scale, half) + base
    h = 1 / (1 + np.exp(-logits))
    return h[:, :half], 2 * h[:, half:]


h_pre, h_post = gates(x, w, scale, base)
y, got = hccupy.ihc_pre(x, w, scale, base, hc_eps=0.0)
print("gates differ from fp64 by", float(np.abs(got - h_post).max()))
assert np.allclose(y, np.einsum("nm,nmh->nh", h_pre, x), atol=1e-5)

# %% [markdown]
# ## On a real model
#
# SmolLM2-135M has 30 layers, so 60 blocks (attention and MLP). The demo gives it four channels and gates with random weights from a
# seed: no training made them. `hc_scale` says how much of the gate logits gets through. At 0 every pre gate is 1/4 and every post gate 1,
# and the network is the plain residual one. (`make demo` installs the weights.)

# %%
from hccupy.demo.backend import Clock, make_backend
from hccupy.demo.cache import PagedCache
from hccupy.demo.network import HyperNetwork, PlainNetwork
from hccupy.demo.show import idle_cores_only
from hccupy.demo.tokenizer import Tokenizer
from hccupy.demo.weights import find_gguf, open_gguf, read_config, read_weights

backend = make_backend("torch", "cuda") if torch.cuda.is_available() else make_backend("numpy", "cpu")
reader = open_gguf(find_gguf())
config, ids = read_config(reader), Tokenizer(reader).encode("The quick brown fox jumps over the lazy dog, and then it")
weights = read_weights(reader).map(backend.put)


class Recorder(Clock):
    """Calls the network's ops and keeps what stands in front of each block: the channels, and their gates."""

    def __init__(self, backend):
        super().__init__(backend)
        self.channels, self.h_pre, self.h_post = [], [], []

    def __call__(self, name, function, *args, **kwargs):
        result = super().__call__(name, function, *args, **kwargs)
        if name in ("ihc_pre", "ihc_post_pre"):
            channels = backend.host(args[0] if name == "ihc_pre" else result[0]).copy()  # ihc_post_pre works in place
            given = [backend.host(kwargs[k]) for k in ("w", "hc_scale", "hc_base")]
            pre, post = gates(channels, *given, kwargs["norm_eps"])
            assert np.allclose(post, backend.host(result[-1]), rtol=1e-4)  # the op's own
            for kept, value in ((self.channels, channels), (self.h_pre, pre), (self.h_post, post)):
                kept.append(value)
        return result


def forward(network, clock, **options):
    return network(weights, backend, clock, PagedCache(config, backend, clock, 64, "bf16", 16), **options)


seen, logits = {}, {}
with idle_cores_only():
    plain = backend.host(forward(PlainNetwork, Clock(backend)).logits(ids))
    for hc_scale in (0.0, 0.01, 0.1, 1.0):
        clock = Recorder(backend)
        network = forward(HyperNetwork, clock, seed=1)
        network.gates = [dataclasses.replace(g, hc_scale=g.hc_scale * 0 + np.float32(hc_scale)) for g in network.gates]
        logits[hc_scale] = backend.host(network.logits(ids))
        seen[hc_scale] = clock
for hc_scale, found in logits.items():
    print(f"hc_scale {hc_scale:4}: largest logit difference to the plain network {np.abs(found - plain).max():8.4f} (largest logit {np.abs(plain).max():.1f})")
if backend.exact:
    assert (logits[0.0] == plain).all()

# %% [markdown]
# ### The gates, layer by layer
#
# At `hc_scale` 1, averaged over the prompt's tokens. Each column is a block; attention and MLP take turns. Every block weighs the
# channels in its own way (above) and gives its result back in another (below).

# %%
clock = seen[1.0]
figure, panels = plt.subplots(2, 1, figsize=(10, 3.8), sharex=True, layout="constrained")
for axis, values, title, span in (
    (panels[0], clock.h_pre, "pre: what a block reads of each channel", 0.5),
    (panels[1], clock.h_post, "post: what each channel takes of a block", 2),
):
    image = axis.imshow(np.array(values).mean(1).T, aspect="auto", cmap="cividis", vmin=0, vmax=span)
    axis.set(title=title, ylabel="channel", yticks=range(4))
    axis.grid(visible=False)
    figure.colorbar(image, ax=axis, label="gate")
panels[1].set_xlabel("block (attention and MLP of 30 layers)")
plt.show()

# %% [markdown]
# The same for single tokens: gates depend on what a token's channels hold, so each token has its own.

# %%
figure, axis = plt.subplots(figsize=(10, 3), layout="constrained")
image = axis.imshow(np.array(clock.h_post)[:, :, 0].T, aspect="auto", cmap="cividis", vmin=0, vmax=2)
axis.set(xlabel="block (attention and MLP of 30 layers)", ylabel="token of the prompt", title="post gate of channel 0, token by token")
axis.grid(visible=False)
figure.colorbar(image, ax=axis, label="gate")
plt.show()

# %% [markdown]
# ### What the channels hold
#
# All channels start as copies of the embedding. At `hc_scale` 0 each of them stays the residual of the plain network, to the last bit. So the
# run at 0 says how far the others have drifted from it: the distance of a channel from the plain residual, relative to the latter, for
# the median token and channel.

# %%
plain_residual = seen[0.0].channels
assert all((c == c[:, :1]).all() for c in plain_residual)  # four equal channels


def drift(channels, plain):
    """rms(channel - plain) / rms(plain) over the width: [tokens, channels]."""
    return np.sqrt(((channels - plain) ** 2).mean(2) / (plain**2).mean(2))


figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
for number, hc_scale in enumerate((0.01, 0.1, 1.0)):
    median = [np.median(drift(c, p)) for c, p in zip(seen[hc_scale].channels, plain_residual, strict=True)]
    axis.plot(range(1, 60), median[1:], color=COLOURS[number], marker=MARKERS[number], markevery=6, label=f"hc_scale {hc_scale}")
axis.set(yscale="log", xlabel="block", ylabel="distance from the plain residual", title="Channels drift as far as the gates let them")
axis.legend(labelcolor=GREY, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# At `hc_scale` 1 the channels hold different things: the cosine between each channel and the plain residual, for the median token.

# %%
cosine = [np.median((c * p).sum(2) / np.sqrt((c**2).sum(2) * (p**2).sum(2)), axis=0) for c, p in zip(clock.channels, plain_residual, strict=True)]
figure, axis = plt.subplots(figsize=(10, 2.2), layout="constrained")
image = axis.imshow(np.array(cosine).T, aspect="auto", cmap="cividis", vmin=np.floor(10 * np.min(cosine)) / 10, vmax=1)
axis.set(xlabel="block (attention and MLP of 30 layers)", ylabel="channel", yticks=range(4), title="likeness to the plain residual, hc_scale 1")
axis.grid(visible=False)
figure.colorbar(image, label="cosine")
plt.show()

# %% [markdown]
# ## From the formula to the kernel
#
# The gates need the whole row before the first output element can be made, and the row should come from memory once. What else has to be
# read is `w`: fp32, as large as a few rows. How often it is fetched decides between the designs. Megabytes for 16,384 tokens, hc 4,
# hidden 6144, bf16:

# %%
n, hc, hidden = 16384, 4, 6144
rows, weight = n * (hc + 1) * hidden * 2 / 1e6, 2 * hc * hc * hidden * 4 / 1e6
print(f"rows in and out, from memory               {rows:9,.0f}")
for design, fetches in (
    ("one token a block", n),
    ("4 tokens a block", n // 4),
    ("8 tokens a tile, on tensor cores", n // 8),
    ("kept on the chip, 15 clusters of 8 blocks", 15),
):
    print(f"w from L2, {design:42s}{fetches * weight:9,.0f}")

# %% [markdown]
# ### Tensor cores without losing bits
#
# On tensor cores `x` is exact in bf16, and `w` is split into three bf16 pieces by cutting off 16 bits at a time. Together they hold every
# bit of the fp32 weight:

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
# ### One order of the sums
#
# Floating-point sums depend on their order. The kernels fix it by the sizes of the model alone, so a row's bits are the same
# in every batch; the CPU path keeps the same promise:

# %%
for first in range(tokens):
    alone, _ = hccupy.ihc_pre(x[first : first + 1], w, scale, base, hc_eps=0.0)
    assert (alone[0] == y[first]).all()

# %% [markdown]
# ### Four kernels, measured
#
# Each design in multiples of its own floor: the time in which the bytes of rows in and out pass at the speed of memory. The first and
# last are from the committed bench report at hidden 6144. The two in the middle serve every width and were measured at hidden 4100, where
# the last one does not go (`kernels/NOTES.md`, "tensor cores in clusters").

# %%
root = Path(hccupy.__file__).resolve().parent.parent
notes = (root / "kernels" / "NOTES.md").read_text()
bench = json.loads((root / "notebooks" / "results" / "h200" / "bench.json").read_text())


def noted(quote, *numbers):
    """Numbers of a sentence that stands in kernels/NOTES.md, word for word."""
    assert quote in notes, quote
    assert all(str(number) in quote for number in numbers), quote
    return numbers


def recorded(tokens, **facts):
    """The one record of ihc_pre at hc 4, hidden 6144, bf16."""
    facts = {"tokens": tokens, "hc": 4, "hidden": 6144, "dtype": "bfloat16", "norm": False, "peer": None, **facts}
    op = "ihc_pre" if facts["peer"] is None else f"ihc_pre ({facts['peer']})"
    (found,) = [r for r in bench["records"] if r["op"] == op and all(r.get(k) == v for k, v in facts.items())]
    return found


portable, clusters, floor = noted("| hc 4, hidden 4100, bf16 | 13.9 -> 7.7 | 14.2 -> 11.0 | 607 -> 408 (156) |", 607, 408, 156)
eager, ours = recorded(16384, peer="torch eager"), recorded(16384)
steps = {
    "the formula in torch, one kernel an operation": eager["us"] / eager["floor_us"],
    "portable: 4 tokens share each fetch of w, fp32 FMAs": portable / floor,
    "tensor cores: 8 tokens in a cluster of 8 blocks": clusters / floor,
    "sm_90a: w stays on the chip, rows stream past it": ours["us"] / ours["floor_us"],
}
figure, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
axis.barh(list(steps), list(steps.values()), color=BLUE)
for row, value in enumerate(steps.values()):
    axis.text(value, row, f" {value:.1f}", va="center")
axis.axvline(1, color=GREY, ls="--", lw=1.2)
axis.invert_yaxis()
axis.grid(visible=False, axis="y")
axis.set(xlabel="time in multiples of the floor (ihc_pre, 16,384 tokens, H200)", title="From many passes to one")
plt.show()

# %% [markdown]
# ### The small steps
#
# What made the last kernel itself faster at 256 tokens, one change after the other. Each pair was measured in one run, before and
# after; runs on other machines and days differ by a few per cent, which is why a pair does not begin where the last one ended. The
# sentences are from `kernels/NOTES.md`, which also has everything that did not work.

# %%
small = {
    "copies asked for by one elected lane": noted("gave 0.1 (4.68 -> 4.58,\n  9.45 -> 9.33)", 9.45, 9.33),
    "13 of 15 clusters run: two of the next grid fit beside them": noted("13 of 15 at 256 tokens (two of the next grid get in): 9.33 -> 8.72", 9.33, 8.72),
    "barriers made by one lane, not by several in a loop": noted("pre 128 7.13 -> 6.45, 256 9.31 -> 8.42", 9.31, 8.42),
    "weights unit by unit instead of all at once": noted("Unit by unit instead of all at once: 256 tokens 8.59 -> 8.17", 8.59, 8.17),
    "L2 asked for the first round of rows before the wait": noted("none 5.0, one round 4.6; 256 8.26, 8.11", 8.26, 8.11),
}
last = recorded(256)["us"]
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
for row, (before, after) in enumerate(small.values()):
    axis.annotate("", (after, row), (before, row), arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 2})
    axis.text(before + 0.03, row, f"{before} → {after}", va="center", fontsize=9)
axis.axvline(last, color=GREY, ls="--", lw=1.2)
axis.text(last, len(small) - 0.4, f" {last:.2f}: the committed report", fontsize=9, color=GREY)
most = max(before for before, _ in small.values())
axis.set(
    xlim=(min(last, 8.1) - 0.2, most + 0.6),
    ylim=(len(small) - 0.2, -0.6),
    xlabel="µs a call (ihc_pre, 256 tokens, hc 4, hidden 6144, bf16, H200)",
    title="Five changes, each measured before and after",
)
axis.set_yticks(range(len(small)), list(small))
axis.grid(visible=False, axis="y")
plt.show()

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
