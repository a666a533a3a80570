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
# # How fast
#
# Every figure here is drawn from the reports under `notebooks/results/`: nothing is timed until the last cell. `python -m hccupy bench`
# makes such a report on a machine with a GPU. It checks every result before it times it, repeats a call over buffers larger than the L2
# cache (weights and activations are cold, as between two layers of a model), captures the calls in a CUDA graph, and keeps the median.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import display

import hccupy
from hccupy.bench import plot

# %matplotlib inline
plt.rcParams.update(plot.STYLE)
here = Path(hccupy.__file__).resolve().parent.parent / "notebooks" / "results" / "h200"
bench, demo = (json.loads((here / f"{name}.json").read_text()) for name in ("bench", "demo"))
print(bench["gpu"], bench["date"], "commit", bench["commit"][:9])
print("plain streaming kernels of the same run, TB/s:", {k: round(v, 2) for k, v in bench["ceilings_tbps"].items()})

# %% [markdown]
# ## Time against tokens
#
# The *floor* is the time in which each input and output passes once at the speed that a plain streaming kernel of the same byte mix
# reached in the same run. Few tokens cost latency; from some hundred on a call is near its floor. *torch eager* is the same formula in
# torch's own kernels, one operation after the other, timed in the same way. The others are vLLM's Triton kernels of HY V4 (no `ihc_post_pre`:
# its two kernels, one after the other) and FlashInfer's fused RoPE, where they were installed. RoPE is decode up to 256 tokens and
# prefill from 512 on.

# %%
display(plot.time_figure(bench))

# %% [markdown]
# ## Share of the floor

# %%
display(plot.share_figure(bench))

# %% [markdown]
# ## The folded norm
#
# Most blocks begin with an RMSNorm. Folded into `ihc_pre` it saves a kernel and a pass over the row. This is what it adds:

# %%
display(plot.norm_figure(bench))

# %% [markdown]
# ## Other sizes
#
# The fastest kernels serve rows of 16 bits with 2 to 8 channels, in steps of 128 columns at most. Others run kernels that serve every size.

# %%
display(plot.sizes_figure(bench))

# %% [markdown]
# ## The tail of a page
#
# `tail="zero"` clears what lies behind the last token of each request. In mid-page the kernel looks and finds it cleared. At a page's
# first slot there is nothing to look at, so the whole page is written; that happens once a page.

# %%
display(plot.tail_figure(bench))

# %% [markdown]
# ## Host time
#
# What a call costs before the GPU starts, with torch tensors.

# %%
display(plot.host_figure(bench))

# %% [markdown]
# ## First call
#
# Kernels are compiled for the sizes of the model, at the first call on a machine, and kept on disk. `hccupy warmup` compiles
# them ahead; `hccupy build` makes a bundle for machines without a compiler.

# %%
display(plot.first_call_figure(bench))

# %% [markdown]
# ## A whole network
#
# The demo's network, decoding one text as torch modules: with `hccupy.nn`, and with the iHC formulas in torch operations.

# %%
display(plot.decode_figure(demo))

# %% [markdown]
# ## Rerun it
#
# On a machine with a GPU this cell times `ihc_post` anew and compares it with the record. The whole bench is `python -m hccupy bench`
# (some minutes), and `make figures` draws this notebook's first two figures for the README.

# %%
if torch.cuda.is_available():
    from hccupy.bench.run import run_bench

    run_bench(["ihc_post"], Path(tempfile.mkdtemp()) / "bench.json", match="ihc_post bench-", with_peers=False, check=here / "bench.json")
else:
    print("no GPU here: the figures above are the record's")
