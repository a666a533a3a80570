"""What the kernels' checks of pages, positions and prefix sums cost: the RoPE kernels with them and without, timed in turns.

    python -m tests.guards --report notebooks/results/h200/guards.json

The metadata of these cases is good, so the results must be equal to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hccupy
from hccupy import build, run
from hccupy.bench import inputs, timing
from hccupy.bench.run import cold_sets, facts_of, imagined
from hccupy.ops import REGISTRY
from hccupy.provenance import record

from .adapters import MARK
from .mutations.table import replaced

FILE = "common/rope_place.cuh"
# What is in the file exactly once, and what is left of it.
GUARDS = (
    ("  if (h.request < 0 || !holds_row(h.request, h.first, h.end, token, m.tokens)) return row;\n", ""),
    ("  if (!holds_row(h.request, h.first, h.end, row, m.tokens)) h.request = -1;\n", ""),
    ("  if (h.seq_len < 0 || position >= static_cast<unsigned int>(m.positions)) return row;\n", ""),
    ("    if (column < m.max_blocks) row.column = column;\n", "    row.column = column;\n"),
    ("row.stored = !null && page >= 0 && page < m.num_blocks;", "row.stored = !null;"),
)
OPS = ("rope_norm_store_kv", "rope_norm_store_kv_fp8")
CASES = ("bench-64-8-decode-64-at-1041", "bench-64-8-decode-256-at-1041", "bench-64-8-prefill-4096")
ROUNDS, REPLAYS = 4, 6


def without(files: dict[str, bytes]) -> dict[str, bytes]:
    """The kernels' sources with the guards taken out.

    Raises ValueError where one is not there exactly once.
    """
    text = files[FILE].decode()
    for guard, rest in GUARDS:
        text = replaced(text, guard, rest, f"kernels/{FILE}; change GUARDS in tests/guards.py")
    return files | {FILE: text.encode()}


@contextlib.contextmanager
def kernels(files: dict[str, bytes]) -> Iterator[None]:
    """Calls that are bound inside run kernels of these sources."""

    def fresh() -> None:
        build.sources_digest.cache_clear()
        run.forget()

    kept, build.sources = build.sources, lambda: files  # type: ignore[assignment]
    fresh()
    try:
        yield
    finally:
        build.sources = kept
        fresh()


def results(device: dict[str, Any], outs: dict[str, Any], call: Any) -> list[Any]:
    """The bits of everything that a call writes, which holds something else before."""
    written = [t.view(torch.uint8) for t in (*outs.values(), device["key_cache"], device["value_cache"])]
    for t in written:
        t.fill_(MARK)
    call()
    return [t.clone() for t in written]


def compare(op: str, name: str) -> list[dict[str, Any]]:
    """One record with the guards, one without."""
    spec = REGISTRY[op]
    case = next(c for c in spec.cases if c.name == name)
    _, device, _ = inputs.make(spec, case)
    bound = imagined(spec, case)
    moved = spec.bytes_moved(bound)
    sets, outs = cold_sets(spec, device, getattr(hccupy, op)(**device), moved)
    calls, wrote = {}, []
    for how, files in (("as it is", build.sources()), ("guards compiled out", without(build.sources()))):
        with kernels(files):
            calls[how] = [hccupy.bind(op, **k, **o) for k, o in zip(sets, outs, strict=True)]
        wrote.append(results(sets[0], outs[0], calls[how][0]))
    if not all(map(torch.equal, *wrote)):
        raise SystemExit(f"{op} {name}: the results differ without the guards")
    times: dict[str, list[float]] = {how: [] for how in calls}
    for _ in range(ROUNDS):
        for how, todo in calls.items():
            times[how].append(timing.graph_us(todo, REPLAYS)["us"])
    facts = facts_of(spec, case, bound)
    return [{**facts, "how": how, "us": statistics.median(us), "tbps": moved / statistics.median(us) / 1e6} for how, us in times.items()]


def main() -> int:
    """Time every case, write the report. Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, metavar="FILE")
    report_file = parser.parse_args().report
    method = f"CUDA graph, cold L2, median of {ROUNDS} rounds of {REPLAYS} replays, with and without in turns; results equal to the bit"
    report = {**record(torch.cuda.get_device_name()), "method": method, "records": [r for op in OPS for name in CASES for r in compare(op, name)]}
    for r in report["records"]:
        print(f"{r['op']} {r['case']} {r['how']}: {r['us']:.2f} us")
    if report_file:
        report_file.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
