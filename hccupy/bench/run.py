"""The bench run: cases in, verified records out."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hccupy

from .. import arch, build, plan
from ..dtypes import BY_NAME
from ..errors import HccupyError, NoGpuError
from ..explain import imagine
from ..ops import REGISTRY
from ..plan import Plan
from ..provenance import record
from ..spec import Bound, Case, OpSpec
from ..warmup import compile_ahead
from . import inputs, peers, timing
from .chain import chain_times
from .plot import plot

CEILING = {"ihc_pre": "read4write1", "ihc_head": "read4write1", "ihc_post": "read5write4", "ihc_post_pre": "read5write5"}


class WrongResultError(HccupyError, AssertionError):
    """A kernel gave a wrong result: nothing is timed."""


def verify(spec: OpSpec, host: dict[str, Any], device: dict[str, Any], index: Any, got: Sequence[Any]) -> None:
    """Compare a device result with the NumPy path on the drawn rows.

    Raises WrongResultError. (The full checks at trust's tolerances are the test suite's.)
    """
    host, device, got = first_request(host, device, got)
    cpu = {k: v.copy() if isinstance(v, np.ndarray) and v.flags.owndata else v for k, v in host.items()}
    want = getattr(hccupy, spec.name)(**cpu)
    want = want if isinstance(want, tuple) else (want,)
    names = [o.name for o in spec.outputs if o.allocate]
    pairs = list(zip(names, got, want, strict=False)) + [(a.name, device[a.name], cpu[a.name]) for a in spec.args if a.mutated]
    for name, g, w in pairs:
        if g is not None and w is not None and (off := differing(g, np.asarray(w), index, LEAST.get(spec.name, CLOSE))) > 1e-4:
            raise WrongResultError(f"{spec.name}: {name}: {off:.2%} of the elements differ from the NumPy path.")


CLOSE = 1e-5  # relative, of float32
LEAST = {"ihc_post_pre": 5e-4}  # its gates follow a y that may round the other way (1.6e-4 at hidden 4096)
ROWS = 2048  # compared at once: 16,384 rows of post_pre in fp32 would be 1.6 GB, thrice


def differing(got: Any, want: Any, index: Any, least: float = CLOSE) -> float:
    """Share of the elements of tensor `got` that differ from NumPy's `want`, whose row index[i] belongs to row i (None: i).

    Two ulps are allowed, or `least`. Compared where `got` is: on the host the largest cases took longer than all their timing.
    """
    import torch

    kind = BY_NAME[want.dtype.name]
    limit = max(2.0 ** -(kind.mantissa - 1), least) if kind.mantissa else 0.0
    wanted = inputs.tensor(want, got.device).float()
    scale = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 0.0
    off, count = 0, int(got.numel())
    for first in range(0, len(got), ROWS):
        a = got[first : first + ROWS].float()
        b = wanted[first : first + ROWS] if index is None else wanted[index[first : first + ROWS]]
        close = b.isfinite() & ((a - b).abs() <= limit * b.abs().clamp_min(0.05 * (scale or 1.0)))
        off += int((~(close | (a == b) | (torch.isnan(a) & torch.isnan(b)))).sum())
    return off / max(count, 1)


def first_request(host: dict[str, Any], device: dict[str, Any], got: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], Sequence[Any]]:
    """Of a large paged call only its first request: the NumPy path takes seconds for 16,384 rows."""
    if "q_index" not in host or len(host["q_index"]) < 3 or len(host["qkv"]) <= 4096:
        return host, device, got
    rows, pages = int(host["q_index"][1]), np.unique(host["block_table"][0])
    cut = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in host.items()}
    cut |= {"qkv": host["qkv"][:rows], "seq_lens": host["seq_lens"][:1], "q_index": host["q_index"][:2]}
    cut["block_table"] = np.searchsorted(pages, host["block_table"][:1]).astype(np.int32)
    here = dict(device)
    for name in ("key_cache", "value_cache"):
        cut[name], here[name] = host[name][pages].copy(), device[name][pages.tolist()]
    q_scale = [None if r is None else r[:1] for r in got[1:]]
    return cut, here, [got[0][:rows], *q_scale]


def touched_bytes(tensors: dict[str, Any], moved: int) -> int:
    """Bytes a call touches, weights included: what must rotate."""
    return moved + sum(int(t.numel() * t.element_size()) for n, t in tensors.items() if n in ("w", "rms_weight", "cos_sin"))


def outputs_for(spec: OpSpec, result: Any) -> dict[str, Any]:
    """Caller-supplied outputs shaped like a result."""
    import torch

    values = result if isinstance(result, tuple) else (result,)
    named = zip([o for o in spec.outputs if o.allocate], values, strict=False)
    return {str(o.keyword): torch.empty_like(v) for o, v in named if o.keyword and v is not None}


def cold_sets(spec: OpSpec, device: dict[str, Any], result: Any, moved: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As many sets of arguments, `device` the first of them, and of outputs shaped like `result` as make a rotation cold."""
    count = timing.sets_for(touched_bytes(device, moved))
    return [device] + [inputs.clone(device) for _ in range(count - 1)], [outputs_for(spec, result) for _ in range(count)]


def standard(spec: OpSpec, case: Case) -> bool:
    """Is this the model of the goals? Peers are timed there only; other sizes and layouts are about our own cliffs."""
    model = next(c for c in spec.cases if c.name.startswith("bench"))
    alike = [{k: v for k, v in c.axes.items() if k != "tokens"} for c in (case, model)]
    return alike[0] == alike[1] and case.dtype == model.dtype and case.options.get("layout") == model.options.get("layout")


def facts_of(spec: OpSpec, case: Case, bound: Bound) -> dict[str, Any]:
    """What a record says of its case, for whoever looks for one."""
    facts: dict[str, Any] = {"op": spec.name, "case": case.name, "dtype": case.dtype}
    facts |= {"tokens": bound.axes["tokens"]} if "tokens" in bound.axes else {}
    facts |= {**case.axes, **{k: v for k, v in case.options.items() if isinstance(v, str | int | float | bool)}}
    facts |= {word: bound.scalars[name] for word, name in (("policy", "qk_norm_policy"), ("tail", "tail")) if name in bound.scalars}
    return facts | ({"norm": bool(case.options.get("norm"))} if any(a.name == "rms_weight" for a in spec.args) else {})


def time_case(
    spec: OpSpec, case: Case, ceilings: dict[str, float], compiled: bool, with_peers: bool, seconds: dict[Any, float], failures: list[str]
) -> list[dict[str, Any]]:
    """Verify one case and time ours, torch and peers. One record each; a peer that cannot is named in `failures`."""
    host, device, index = inputs.make(spec, case)
    function = getattr(hccupy, spec.name)
    first = function(**device)
    verify(spec, host, device, index, first if isinstance(first, tuple) else (first,))
    bound = imagined(spec, case)
    moved = spec.bytes_moved(bound)
    sets, outs = cold_sets(spec, device, first, moved)
    rate = ceilings[CEILING.get(spec.name, "copy")]
    base = {**facts_of(spec, case, bound), "bytes": moved, "floor_us": moved / rate / 1e6, "cold": True, "graph": True, "sets": len(sets)}
    records = []

    def add(name: str, calls: list[Callable[[], Any]]) -> None:
        times = timing.graph_us(calls)
        row: dict[str, Any] = {**base, **times, "gbps": moved / times["us"] / 1e3, "share": base["floor_us"] / times["us"]}
        if name == "hccupy":
            cold = seconds.pop(kind_of(plan.make(spec, bound, arch.of_device(0))), None)
            records.append(row | ({"compile_s": cold} if cold else {}))
        else:  # a peer's time must never be taken for ours: another key
            records.append({**row, "op": f"{spec.name} ({name})", "peer": name})

    add("hccupy", [partial(function, **k, **o) for k, o in zip(sets, outs, strict=True)])
    for name, peer in peers.of(spec, case, compiled, standard(spec, case)).items() if with_peers else ():
        try:
            add(name, [partial(peer, k) for k in sets[: 64 if "torch" in name else None]])
        except Exception as error:  # ours has been measured
            failures.append(f"{spec.name} {case.name} ({name}): {type(error).__name__}: {error}")
    return records


def host_times() -> list[dict[str, Any]]:
    """Host time per call, small sizes. Torch tensors: plain (allocating), with out=, bound; then ihc_pre with other arrays.

    The fastest of three passes over all of them: a virtual machine's first seconds cost up to 2 us a call (memory that it has yet to
    get from its host). run_bench takes them again at its end: on one machine bound calls cost 4.9 or 7.0, as the host pleased.
    """
    todo: list[tuple[str, str, Callable[[], Any]]] = []
    for op in ("ihc_pre", "ihc_head", "ihc_post", "ihc_post_pre", "rope_norm_store_kv", "rope_norm_store_kv_fp8"):
        spec = REGISTRY[op]
        case = next(c for c in spec.cases if c.name.startswith("bench"))
        _, device, _ = inputs.make(spec, case)
        function = getattr(hccupy, op)
        outs = outputs_for(spec, function(**device))
        bound = hccupy.bind(op, **device, **outs)
        first = next(device[p.name] for p in spec.args)
        todo += [(op, "plain", partial(function, **device)), (op, "bound", partial(bound, first)), (op, "out", partial(function, **device, **outs))]
    half = next(c for c in REGISTRY["ihc_pre"].cases if c.dtype == "float16" and c.axes["tokens"] <= 64)
    _, device, _ = inputs.make(REGISTRY["ihc_pre"], half)
    for kind, convert in (("cupy", inputs.to_cupy), ("dlpack", inputs.Foreign)):
        other: dict[str, Any] = {k: convert(v) if hasattr(v, "data_ptr") else v for k, v in device.items()}
        todo.append(("ihc_pre", f"plain, {kind}", partial(hccupy.ihc_pre, **other)))
    passes = [[timing.host_us(call, calls=500 if "dlpack" not in how else 100) for _, how, call in todo] for _ in range(3)]
    return [{"op": op, "call": how, "us": us} for (op, how, _), us in zip(todo, map(min, *passes), strict=True)]


def fastest(*tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each call the fastest time of these tables."""
    return [min(rows, key=lambda row: row["us"]) for rows in zip(*tables, strict=True)]


def imagined(spec: OpSpec, case: Case) -> Bound:
    """What such a call is bound to, from the case alone."""
    sizes: dict[str, Any] = {s.name: case.scalars[s.name] for s in spec.scalars if s.name in case.scalars}
    weights = ("q_norm_weight", "k_norm_weight")  # float32 in the inputs
    sizes |= {a.name: "float32" if a.name in weights else True for a in spec.args if a.optional and (case.options.get("norm") or a.name in weights)}
    if "new" in case.options:
        sizes |= {"tokens": sum(case.options["new"]), "requests": len(case.options["new"])}
    return imagine(spec, {**case.axes, **sizes}, case.dtype)


def plans_of(todo: Sequence[tuple[OpSpec, Case]]) -> list[Plan]:
    """The kernels of these cases, each once."""
    made = [plan.make(spec, imagined(spec, case), arch.of_device(0)) for spec, case in todo]
    return list({build.identity(p): p for p in made}.values())


def kind_of(made: Plan) -> tuple[Any, ...]:
    """What decides how long a kernel takes to compile."""
    return made.op, made.variant, *(made.defines.get(d) for d in ("kHc", "kHasRmsWeight", "kBulk", "kMany", "kSteps", "kVec"))


def compile_seconds(plans: Sequence[Plan]) -> dict[Any, float]:
    """Seconds of a cold compile by kind, one kernel each, one after the other, NVRTC's own cache off."""
    found = {}
    for kind, made in {kind_of(p): p for p in plans}.items():
        start = time.perf_counter()
        build.compile_plan(made, ("--no-cache",))
        found[kind] = time.perf_counter() - start
    return found


def run_bench(ops: Sequence[str], output: Path, *, match: str = "", compiled: bool = False, with_peers: bool = True, check: Path | None = None) -> int:
    """Run, print, write bench.json and bench.csv beside it. Exit status: 1 where a result is wrong or --check finds a slower case.

    A case whose result is wrong is not timed; the report's "failures" name it. Raises NoGpuError without a GPU or torch.
    """
    try:
        import torch
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise NoGpuError(f"bench: expected torch and rich, got {error}. Install 'hccupy[bench,torch]'.") from error
    if not torch.cuda.is_available():
        raise NoGpuError("bench: expected a CUDA GPU, got none. It measures kernels only; the CPU path has no bench.")
    console = Console()
    todo = [(REGISTRY[o], c) for o in ops for c in REGISTRY[o].cases if c.name.startswith("bench") and match in f"{o} {c.name}"]
    todo.sort(key=lambda pair: not standard(*pair))  # the goals first: a run may be cut short
    plans = plans_of(todo)
    compile_ahead(plans, None)
    seconds = compile_seconds(plans)  # each stands in the first record of its kind
    report: dict[str, Any] = {**record(torch.cuda.get_device_name()), "ceilings_tbps": timing.ceilings(), "peers": peers.versions() if with_peers else {}}
    report |= {"host": [], "chain": [], "records": [], "failures": []}
    if not match:
        report["host"], report["chain"] = host_times(), chain_times()
    columns = (TextColumn("{task.description:40s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(todo))
        for spec, case in todo:
            progress.update(bar, description=f"{spec.name} {case.name}")
            try:
                report["records"] += time_case(spec, case, report["ceilings_tbps"], compiled, with_peers, seconds, report["failures"])
            except Exception as error:  # one wrong or impossible case must not cost the others their record
                report["failures"].append(f"{spec.name} {case.name}: {type(error).__name__}: {error}")
            write(report, output)  # after each case: a run that is stopped keeps what it measured
            torch.cuda.empty_cache()
            progress.advance(bar)
    if report["host"]:
        report["host"] = fastest(report["host"], host_times())
        write(report, output)
    plot(report, output)
    show(console, report)
    for failure in report["failures"]:
        console.print(f"FAILED {failure}", style="red")
    slower = compare(console, report["records"], check) if check else 0
    return 1 if report["failures"] else slower


def write(report: dict[str, Any], output: Path) -> None:
    """The report as JSON, its records as CSV beside it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for r in report["records"] for k in r}))
        writer.writeheader()
        writer.writerows(report["records"])


def show(console: Any, report: dict[str, Any]) -> None:
    """The table: microseconds, GB/s, share of the floor, times the best peer, host microseconds."""
    from rich.table import Table

    words = ", ".join(f"{k} {v:.2f}" for k, v in report["ceilings_tbps"].items())
    table = Table(title=f"{report['gpu']}, ceilings in TB/s: {words}")
    for heading in ("op", "case", "us", "p20-p80", "GB/s", "of floor", "best peer us", "x faster"):
        table.add_column(heading, justify="left" if heading in ("op", "case") else "right")
    for r in report["records"]:
        if "peer" in r:
            continue
        others = [p["us"] for p in report["records"] if p.get("peer") and p["op"].startswith(r["op"] + " (") and p["case"] == r["case"]]
        best = min(others, default=None)
        table.add_row(
            r["op"], r["case"], f"{r['us']:.2f}", f"{r['us_p20']:.2f}-{r['us_p80']:.2f}", f"{r['gbps']:.0f}", f"{r['share']:.2f}",
            f"{best:.2f}" if best else "-", f"{best / r['us']:.1f}" if best else "-",
        )  # fmt: skip
    console.print(table)
    for c in report["chain"]:
        console.print(f"layer of matmuls and post_pre, {c['tokens']} tokens, dependent launch {'on' if c['pdl'] else 'off'}: {c['us_per_layer']:.2f} us")
    for h in report["host"]:
        console.print(f"host {h['op']} {h['call']}: {h['us']:.1f} us")


def compare(console: Any, records: list[dict[str, Any]], earlier: Path, allowed: float = 1.10) -> int:
    """1 where a case is more than 10 % slower than in an earlier record (run-to-run spread is up to 7 %)."""
    before = {(r["op"], r["case"]): r["us"] for r in json.loads(earlier.read_text())["records"]}
    slower = [(r, before[r["op"], r["case"]]) for r in records if r["us"] > allowed * before.get((r["op"], r["case"]), float("inf"))]
    for r, old in slower:
        console.print(f"slower: {r['op']} {r['case']}: {old:.2f} -> {r['us']:.2f} us", style="red")
    print(f"{len(slower)} of {len(records)} cases slower than {earlier}", file=sys.stderr)
    return 1 if slower else 0
