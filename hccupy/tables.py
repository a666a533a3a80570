"""What the README says in figures, from the specs and the committed reports: python -m hccupy.tables, or make figures.

It also draws the reports' figures and writes bench.csv. A test compares everything with what is committed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import switches
from .bench.plot import FIGURES, figure_file, lines, measured, of_the_model, plot
from .bench.run import write
from .ops import REGISTRY
from .spec import Arg, OpSpec
from .version import __version__

RESULTS = Path("notebooks/results/h200")  # the reports that the README quotes
SIZES = (1, 16, 64, 256, 1024, 4096, 16384)
Report = dict[str, Any]


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


def status(tests: Report, bench: Report, demo: Report, guards: Report) -> str:
    """The README's status: what the committed reports say."""
    parts = (suite(tests), times(bench), rivals(bench), host(bench), others(bench), safety(guards), decoding(demo))
    return "\n\n".join(filter(None, parts))


def suite(tests: Report) -> str:
    """The GPU suite in a sentence."""
    counts = tests["counts"]
    ulps = max(float(r["ulps"]) for r in tests["worst"] if "ulps" in r and r["dtype"] != "float32")
    gates = max(float(r["relative"]) for r in tests["worst"] if "relative" in r and r["op"].startswith("ihc"))
    return (
        f"Version {__version__}, alpha. {tests['gpu']}, {tests['date']}: GPU suite {counts['passed']} passed, {counts['failed'] + counts['error']} failed, "
        f"{counts['skipped']} skipped; worst error of 16-bit results {ulps:.2f} ulp, of gates {gates:.1e} relative to fp64."
    )


def times(bench: Report) -> str:
    """Microseconds of the model's sizes."""
    text = [
        f"Microseconds a call on {bench['gpu']} ({bench['date']}; CUDA graph of consecutive calls with programmatic dependent launch, "
        "cold L2, median; bf16, hc 4, hidden 6144; RoPE with 64/8 heads of 128, decode at length 1041), and TB/s at the largest size, "
        "each input and output counted once:",
        "",
        "| op | " + " | ".join(map(str, SIZES)) + " | TB/s |",
        "|---|" + "---|" * (len(SIZES) + 1),
    ]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for r in filter(of_the_model, bench["records"]):
        if r["op"] not in ("store_kv", "zero_kv_tail"):
            rows.setdefault(f"`{r['op']}`" + (" + norm" if r.get("norm") else ""), {})[r["tokens"]] = r
    for name, row in rows.items():
        cells = [f"{row[n]['us']:.1f}" if n in row else "" for n in SIZES]
        text.append(f"| {name} | " + " | ".join(cells) + f" | {row[max(row)]['gbps'] / 1e3:.2f} |")
    missing = [f"`{op}`" for op in REGISTRY if op not in {r["op"] for r in bench["records"]}]
    return "\n".join(text) + (f"\n\nNot in this record yet: {', '.join(missing)}." if missing else "")


def rivals(bench: Report) -> str:
    """The best other kernel of the record by op and size; nothing where torch eager, which the figure shows, is the only one."""
    found = {op: {name: rows for name, rows in lines(bench, op).items() if name != "hccupy"} for op in measured(bench)}
    if {name for peers in found.values() for name in peers} <= {"torch eager"}:
        return ""
    releases = bench.get("peers", {})
    words = ", ".join(f"{name} {release}" for name, release in releases.items())
    words += "; vLLM has no post_pre: its two kernels" if "vLLM Triton" in releases else ""
    rows = [f"The best other kernel that was timed in the same run, in microseconds{f' ({words})' if words else ''}:", ""]
    rows += ["| op | " + " | ".join(map(str, SIZES)) + " |", "|---|" + "---|" * len(SIZES)]
    for op, peers in found.items():
        best: dict[int, tuple[float, str]] = {}
        for name, records in peers.items():
            for r in records:
                best[r["tokens"]] = min(best.get(r["tokens"], (r["us"], name)), (r["us"], name))
        if best:
            rows.append(f"| `{op}` | " + " | ".join(f"{best[n][0]:.1f} {best[n][1]}" if n in best else "" for n in SIZES) + " |")
    return "\n".join(rows)


def host(bench: Report) -> str:
    """Host time and first-call time in two sentences."""
    calls = {(h["op"], h["call"]): h["us"] for h in bench["host"]}
    words = [f"`{op}` {calls[op, 'plain']:.0f} / {calls[op, 'out']:.0f} / {calls[op, 'bound']:.0f}" for op in ("ihc_pre", "ihc_post", "rope_norm_store_kv")]
    text = f"Host time a call with torch tensors, in microseconds (allocating / `out=` / `hccupy.bind`): {', '.join(words)}."
    compiled = sorted(r["compile_s"] for r in bench["records"] if "compile_s" in r)
    if compiled:
        text += f"\nCold compile of a kernel, NVRTC's own cache off: median {compiled[len(compiled) // 2]:.2f} s, longest {compiled[-1]:.2f} s"
        text += " (`hccupy warmup` or a bundle hides it)."
    return text


def others(bench: Report, tokens: int = 16384) -> str:
    """Share of the floor at the other sizes of the record, the slowest first."""
    shares = {}
    for r in bench["records"]:
        if "peer" not in r and r["op"] == "ihc_pre" and r["tokens"] == tokens and not r["norm"] and not of_the_model(r):
            dtype = "" if r["dtype"] == "bfloat16" else f", {r['dtype']}"
            shares[f"hc {r['hc']}, hidden {r['hidden']}{dtype}"] = r["share"]
    words = [f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda row: row[1])]
    return f"Other sizes are not all that near to memory speed. Share of the floor at {tokens:,} tokens, `ihc_pre`, slowest first: {'; '.join(words)}."


def safety(guards: Report) -> str:
    """What the checks of pages and positions cost."""
    how: dict[str, dict[tuple[Any, ...], float]] = {}
    for r in guards["records"]:
        how.setdefault(r["how"], {})[r["op"], r["mode"], r["tokens"], r["q_heads"]] = r["us"]
    most = max(us / how["guards compiled out"][case] for case, us in how["as it is"].items())
    return f"The kernels' checks of pages and positions cost at most {max(most - 1, 0):.1%} (`guards.json`: compiled in and out)."


def decoding(demo: Report) -> str:
    """The demo's decoding rates as a table."""
    rates = {r["how"]: r["tokens_per_s"] for r in demo["decode"]}
    same = "the same tokens" if all(r["same"] for r in demo["decode"]) else "not the same tokens everywhere"
    rows = [f"SmolLM2-135M as an iHC network on {demo['gpu']}, fp32 weights, decoded tokens a second ({same}):"]
    rows += ["", "| network | eager | compiled | compiled, one CUDA graph a token |", "|---|---|---|---|"]
    for name in dict.fromkeys(how.split(", ")[0] for how in rates):
        rows.append(f"| {name} | " + " | ".join(f"{rate:.0f}" for how, rate in rates.items() if how.startswith(name)) + " |")
    return "\n".join(rows)


def pictures(bench: Report, file: Path, root: Path) -> str:
    """The two figures, with what they say for those who cannot see them."""
    return "\n\n".join(f"![{say(bench)}]({figure_file(file, name).relative_to(root)})" for name, (_, say) in FIGURES.items())


def sections(root: Path) -> dict[str, str]:
    """The generated parts of the README by name."""
    results = root / RESULTS
    tests, bench, demo, guards = (json.loads((results / f"{name}.json").read_text()) for name in ("tests", "bench", "demo", "guards"))
    return {
        "figures": pictures(bench, results / "bench.json", root),
        "ops": op_table(),
        "switches": switches.table(),
        "status": status(tests, bench, demo, guards),
    }


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with each part between its two comments, <!-- name ... --> and <!-- /name -->.

    Raises ValueError where a page lacks them.
    """
    for name, text in parts.items():
        found = re.findall(rf"<!-- {name}\b[^\n]*-->\n.*?<!-- /{name} -->", page, re.S)
        if len(found) != 1:
            raise ValueError(f"expected <!-- {name} --> and <!-- /{name} --> once, got {len(found)} times")
        page = page.replace(found[0], f"{found[0].splitlines()[0]}\n{text}\n<!-- /{name} -->")
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the README's generated parts, the figures and bench.csv from the reports."""
    parser = argparse.ArgumentParser(prog="python -m hccupy.tables", description=main.__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the repository (default: here)")
    root = parser.parse_args(arguments).root
    file = root / RESULTS / "bench.json"
    bench = json.loads(file.read_text())
    write(bench, file)
    readme = root / "README.md"
    readme.write_text(filled(readme.read_text(), sections(root)))
    for path in (readme, *plot(bench, file)):
        print(path)


if __name__ == "__main__":
    main()
