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
# # Recorded benchmarks
#
# The figures come from the reports under `notebooks/results/`; nothing is timed here. `python -m hccupy bench` makes such a
# report on a machine with a GPU: CUDA graphs, buffers larger than L2, medians, every result verified before it is timed.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

import hccupy

here = Path(hccupy.__file__).resolve().parent.parent / "notebooks" / "results" / "h200"
bench = json.loads((here / "bench.json").read_text())
print(bench["gpu"], bench["date"], "commit", bench["commit"][:9])
print("plain streaming kernels of the same run, TB/s:", {k: round(v, 2) for k, v in bench["ceilings_tbps"].items()})

# %%
from hccupy.bench.plot import series

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
for name, rows in series(bench).items():
    tokens = [r["tokens"] for r in rows]
    left.plot(tokens, [r["us"] for r in rows], marker="o", ms=3, label=name)
    right.plot(tokens, [r["gbps"] / 1e3 for r in rows], marker="o", ms=3, label=name)
left.set(xscale="log", yscale="log", xlabel="tokens", title="microseconds a call")
right.set(xscale="log", xlabel="tokens", title="TB/s, each input and output counted once")
left.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## Host time
#
# What a call costs before the GPU starts, with torch tensors: allocating its outputs, with `out=`, and bound.

# %%
for h in bench["host"]:
    print(f"{h['op']:24s} {h['call']:6s} {h['us']:6.1f} us")
