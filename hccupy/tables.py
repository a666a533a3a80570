"""Markdown for the README, generated from the specs and the committed reports (a test compares them)."""

from __future__ import annotations

from typing import Any

from .bench.plot import of_the_model
from .ops import REGISTRY
from .spec import Arg, OpSpec


def _array(p: Arg) -> str:
    text = f"{p.name}[{', '.join(p.axes)}]"
    return f"{text}?" if p.optional else text


def op_row(spec: OpSpec) -> str:
    """One row: name, what it computes, arrays, results."""
    arrays = ", ".join(f"**{_array(p)}**" if p.mutated else _array(p) for p in spec.args)
    results = ", ".join(f"{o.name}[{', '.join(o.axes)}]" if isinstance(o.axes, tuple) else o.name for o in spec.outputs if o.allocate)
    first = next(p for p in spec.args if not p.dtypes[0].startswith("="))
    kinds = ", ".join({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}.get(d, d) for d in first.dtypes)
    return f"| `{spec.name}` | {spec.summary} | {arrays} | {results or 'in place'} | {kinds} |"


def op_table() -> str:
    """The README's table of ops. Bold arrays are written in place; `?` marks optional ones."""
    head = "| op | what it computes | arrays | results | dtypes |\n|---|---|---|---|---|"
    return "\n".join([head, *(op_row(spec) for spec in REGISTRY.values())])


def status(tests: dict[str, Any], bench: dict[str, Any], demo: dict[str, Any]) -> str:
    """The README's status: what the committed reports of the GPU suite, the bench and the demo say."""
    counts = tests["counts"]
    ulps = max(float(r["ulps"]) for r in tests["worst"] if "ulps" in r and r["dtype"] != "float32")
    gates = max(float(r["relative"]) for r in tests["worst"] if "relative" in r and r["op"].startswith("ihc"))
    measured = {r["op"] for r in bench["records"]}
    lines = [
        f"Version 0.1, alpha. {tests['gpu']}, {tests['date']}: GPU suite {counts['passed']} passed, {counts['failed'] + counts['error']} failed, "
        f"{counts['skipped']} skipped; worst error of 16-bit results {ulps:.2f} ulp, of gates {gates:.1e} relative to fp64.",
        "",
        f"Microseconds a call on {bench['gpu']} ({bench['date']}; CUDA graph of consecutive calls with programmatic dependent launch, "
        "cold L2, median; bf16, hc 4, hidden 6144; RoPE with 64/8 heads of 128, decode at length 1041), and TB/s at the largest size, "
        "each input and output counted once:",
        "",
    ]
    sizes = [1, 16, 64, 256, 1024, 4096, 16384]
    lines += ["| op | " + " | ".join(map(str, sizes)) + " | TB/s |", "|---|" + "---|" * (len(sizes) + 1)]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for r in filter(of_the_model, bench["records"]):
        if r["op"] in ("store_kv", "zero_kv_tail"):
            continue
        name = f"`{r['op']}`" + (" + norm" if r.get("norm") else "")
        rows.setdefault(name, {})[r["tokens"]] = r
    for name, row in rows.items():
        cells = [f"{row[n]['us']:.1f}" if n in row else "" for n in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row[max(row)]['gbps'] / 1e3:.2f} |")
    missing = [f"`{op}`" for op in REGISTRY if op not in measured]
    if missing:
        lines += ["", f"Not in this record yet: {', '.join(missing)}."]
    host = {(h["op"], h["call"]): h["us"] for h in bench["host"]}
    words = [f"`{op}` {host[op, 'plain']:.0f} / {host[op, 'out']:.0f} / {host[op, 'bound']:.0f}" for op in ("ihc_pre", "ihc_post", "rope_norm_store_kv")]
    lines += ["", f"Host time a call with torch tensors, in microseconds (allocating / `out=` / `hccupy.bind`): {', '.join(words)}."]
    compiled = [r["compile_s"] for r in bench["records"] if "compile_s" in r]
    if compiled:
        lines.append(f"Cold compile of a kernel, NVRTC's own cache off: median {sorted(compiled)[len(compiled) // 2]:.2f} s, longest {max(compiled):.2f} s.")
    rates = {r["how"]: r["tokens_per_s"] for r in demo["decode"]}
    same = "the same tokens" if all(r["same"] for r in demo["decode"]) else "not the same tokens everywhere"
    lines += ["", f"SmolLM2-135M as an iHC network on {demo['gpu']}, fp32 weights, decoded tokens a second ({same}):"]
    lines += ["", "| network | eager | compiled | compiled, one CUDA graph a token |", "|---|---|---|---|"]
    for name in dict.fromkeys(how.split(", ")[0] for how in rates):
        lines.append(f"| {name} | " + " | ".join(f"{rate:.0f}" for how, rate in rates.items() if how.startswith(name)) + " |")
    lines += ["", "Reports: `tests.json`, `bench.json`, `bench.png`, `guards.json`, `demo.json` under `notebooks/results/h200/`."]
    return "\n".join(lines)
