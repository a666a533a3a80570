"""compute-sanitizer over every op and kernel variant: memcheck, racecheck, initcheck, synccheck.

    python -m tests.sanitize --report notebooks/results/h200/sanitizer.json

A small set of calls, each compared with its reference, by CuPy and torch with their caching allocators off. Kernels are compiled first,
in many processes, with line numbers (which change no instruction). The four tools run side by side. A finding is told with
its call, kernel and lines; the exit status is 0 only if every call was right and every finding is one of ALLOWED.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hccupy import arch, build, check, plan
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY
from hccupy.plan import Plan
from hccupy.provenance import record
from hccupy.spec import Case

from . import ihc_checks, rope_cases
from .adapters import GPU, Adapter
from .test_plan import bound_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Allowed:
    """Findings that were looked into: which, and why they are none."""

    tool: str
    op: str
    variant: str
    functions: frozenset[str]  # the writer and the reader; a finding that names any other is not covered
    reason: str

    def covers(self, tool: str, finding: dict[str, Any]) -> bool:
        named = frozenset(finding["functions"])
        return (tool, finding["op"], finding["variant"]) == (self.tool, self.op, self.variant) and bool(named) and named <= self.functions


_WARP = (
    "32 lanes write shared memory, __syncwarp, then one lane arrives on the transaction barrier that the readers wait for. racecheck does not follow the "
    "warp barrier to the one lane's arrival; with an arrival of all 32 lanes it reports nothing (kernels/NOTES.md)."
)
_IDLE = (
    "Lanes that have no octet in a step read another lane's of the same warp and token, whose z may stand there already, and use nothing of it "
    "(StreamApply::octet in kernels/common/sm90_stream_apply.cuh)."
)
_STREAM = {
    ("ihc_pre", "ihc_head", "ihc_post_pre"): ((("store_partials", "push_sums"), _WARP), (("mix_token", "load", "apply_tiles_norm"), _IDLE)),
    ("ihc_post_pre",): ((("multiply_tiles", "load"), _WARP), (("multiply_tiles", "mix_token"), _WARP)),
}
ALLOWED = tuple(
    Allowed("racecheck", op, "sm90_stream", frozenset(functions), reason) for ops, found in _STREAM.items() for op in ops for functions, reason in found
)


# ---- the calls --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call: how its arguments are made, and the comparison with the reference."""

    name: str
    op: str
    make: Callable[[np.random.Generator], dict[str, Any]]
    framework: str = "cupy"

    def arguments(self) -> dict[str, Any]:
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())))

    @functools.cache  # noqa: B019
    def plan(self, target: arch.Arch) -> Plan:
        spec = REGISTRY[self.op]
        return plan.make(spec, bound_of(spec, self.arguments()), target)


def _ihc(op: str, label: str, tokens: int, hc: int, hidden: int, dtype: str, norm: bool = False, framework: str = "cupy") -> Call:
    spec = REGISTRY[op]
    case = Case(label, {"tokens": tokens, "hc": hc, "hidden": hidden}, spec.cases[0].scalars, dtype, {"norm": norm and op != "ihc_post"})
    return Call(f"{op} {label}", op, lambda rng: spec.make_inputs(case, rng), framework)


def _rope(label: str, fp8: dict[str, Any] | None, framework: str = "cupy", **words: Any) -> Call:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        given = rope_cases.build(rng, **{"block_size": 16, "policy": "norm_then_rope", **words})
        given["block_table"][0, -1] = -1  # a bad page, if anybody looks
        return given if fp8 is None else rope_cases.fp8(given, **fp8)

    op = "rope_norm_store_kv" + ("" if fp8 is None else "_fp8")
    return Call(f"{op} {label}", op, make, framework)


@functools.cache
def calls() -> list[Call]:
    """Every variant of every op on sm_90a, and odd shapes; few rows, because the tools take 10 to 1,000 times as long."""
    found = []
    for op in ("ihc_pre", "ihc_head", "ihc_post_pre"):
        found += [
            _ihc(op, "cluster", 5, 4, 4096, "bfloat16", op != "ihc_head"),
            _ihc(op, "stream", 72, 4, 4096, "bfloat16", op == "ihc_head", "torch"),
            _ihc(op, "stream of 2 blocks", 72, 2, 1024, "bfloat16", op != "ihc_head"),
            _ihc(op, "stream of 4 blocks, short columns", 40, 4, 2880, "float16", op != "ihc_post_pre", "torch"),
            _ihc(op, "stream of 16 blocks", 40, 4, 8192, "bfloat16", True),
            _ihc(op, "8 channels of 2048", 24, 8, 2048, "bfloat16", True),
            _ihc(op, "tensor of 8 channels", 11, 8, 1024, "bfloat16", True),
            _ihc(op, "tensor of 4100", 3, 4, 4100, "bfloat16", False, "torch"),
            _ihc(op, "portable", 7, 3, 257, "float16", True),
            _ihc(op, "portable tiles", 300, 2, 72, "bfloat16"),
        ]
    found += [_ihc("ihc_post", "bf16", 9, 4, 6144, "bfloat16"), _ihc("ihc_post", "odd", 7, 3, 257, "float32", framework="torch")]
    found.append(_ihc("ihc_post", "streaming stores", 700, 4, 6144, "bfloat16"))
    one = {"q_heads": 64, "kv_heads": 8, "dim": 128}
    many = 600
    for fp8 in (None, {}):
        found += [
            _rope("few", fp8, lengths=(40,), new=(1,), **one),
            _rope("few, two units", fp8, "torch", lengths=(40, 17, 3, 9, 33, 20, 19, 5, 1), new=(1,) * 9, **one),
            _rope("row a block", fp8, lengths=(33,) * 40, new=(1,) * 40, **one),
            _rope("row a block, two by two", fp8, "torch", lengths=(200,), new=(200,), padding=3, **one),
            _rope("many", fp8, lengths=(many, 40), new=(many, 1), **one),
            _rope("many rows a warp", fp8, lengths=(2200,), new=(2200,), **one),
            _rope("narrow", fp8, lengths=(many, 40), new=(many, 1), padding=2, q_heads=8, kv_heads=1, dim=128),
            _rope("partial, interleaved", fp8, lengths=(11, 9), new=(3, 1), padding=2, dim=72, rotary=36, rope_style="interleaved", q_heads=5, kv_heads=1),
            _rope("192 and 128", fp8, "torch", lengths=(11, 9), new=(3, 1), dim=192, v_dim=128, null_block=0),
        ]
    found.append(
        _rope("decode, static q", {"q_quant": "static", "q_scale_inv": np.array([71.0], np.float32), "is_prefill": False}, lengths=(40, 17), new=(1, 1), **one)
    )

    def store(tokens: int, kind: Any) -> Callable[[np.random.Generator], dict[str, Any]]:
        def make(rng: np.random.Generator) -> dict[str, Any]:
            slots = rng.permutation(tokens + 64)[:tokens] - 8
            src = rng.integers(0, 255, (tokens, 2, 72 * np.dtype(kind).itemsize)).astype(np.uint8).view(kind)
            return {"cache": rope_cases.sentinel((tokens // 16 + 2, 16, 2, 72), kind), "src": src, "slot_mapping": slots}

        return make

    def tail(requests: int) -> Callable[[np.random.Generator], dict[str, Any]]:
        def make(rng: np.random.Generator) -> dict[str, Any]:
            given = REGISTRY["zero_kv_tail"].make_inputs(
                Case("tail", {"requests": requests, "kv_heads": 2, "head_dim": 64, "v_head_dim": 72, "block_size": 16}, {}, "bfloat16"), rng
            )
            return given | {"seq_lens": np.minimum(given["seq_lens"], 16 * given["block_table"].shape[1] + 5)}

        return make

    found += [Call("store_kv few", "store_kv", store(33, np.float32)), Call("store_kv many", "store_kv", store(1100, np.uint8), "torch")]
    found += [Call("zero_kv_tail few", "zero_kv_tail", tail(5)), Call("zero_kv_tail many", "zero_kv_tail", tail(600), "torch")]
    return found


def compare(call: Call, given: dict[str, Any], on: Adapter) -> None:
    """Run the call on `on` and compare everything it writes with fp64 (store_kv, zero_kv_tail: with the CPU path, bit for bit)."""
    from .adapters import CPU

    spec = REGISTRY[call.op]
    if call.op.startswith("ihc"):
        # Into poison that was copied there: initcheck does not see that bulk copies write, so to it a new y would stay uninitialised.
        bound = bound_of(spec, given)
        lead = given["x"].shape[:1]
        outs = {str(o.keyword): on.put(ihc_checks.poison(check.out_shape(spec, o, bound, lead), BY_NAME[bound.dtypes[o.name]].np)) for o in spec.outputs}
        ihc_checks.verify(spec, given, ihc_checks.call(call.op, given, on, **outs), on)
        return
    copies = lambda: {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    got = vars(rope_cases.call(on, call.op, copies()))
    if not call.op.startswith("rope"):
        for name, w in vars(rope_cases.call(CPU[0], call.op, copies())).items():
            assert rope_cases.same(got[name], w), f"{call.name} {name}"
        return
    from . import soak_reference

    put = CPU[1].put
    words = {s.name: s.default for s in spec.scalars} | {k: put(v) for k, v in given.items()}
    want = {n: put(given[n].copy()) for n in ("key_cache", "value_cache")}
    back = {n: put(v) for n, v in got.items()}
    soak_reference.rope(words, want, back)
    for n, w in want.items():
        soak_reference.equal(n, soak_reference.integers(back[n]), soak_reference.integers(w))


def coverage(target: arch.Arch) -> tuple[dict[str, list[str]], list[str]]:
    """(variants that the calls reach, variants of that architecture that they miss)."""
    reached: dict[str, set[str]] = {}
    for call in calls():
        reached.setdefault(call.op, set()).add(call.plan(target).variant)
    missing = [f"{op} {v.name}" for op, spec in REGISTRY.items() for v in spec.variants if v.name not in reached.get(op, ())]
    return {op: sorted(names) for op, names in sorted(reached.items())}, missing


# ---- compiling, with line numbers -------------------------------------------------------------------------------


def with_lines() -> None:
    """Kernels of this process carry line numbers. The machine code is the same."""
    plain = build.options
    build.options = lambda made: (*plain(made), "-lineinfo")  # type: ignore[assignment]


def _compile(made: Plan) -> None:
    build.binary(made)


def compile_all(target: arch.Arch, some: list[Call]) -> int:
    made = {build.identity(p): p for p in (c.plan(target) for c in some)}
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), len(made)), mp_context=multiprocessing.get_context("spawn"), initializer=with_lines) as pool:
        list(pool.map(_compile, made.values()))
    return len(made)


# ---- under a tool -----------------------------------------------------------------------------------------------


def child(match: str, first: int) -> int:
    """What runs under the tool, from call number `first` on: each call with its name before it, so that findings can be told apart."""
    import cupy

    with_lines()
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    here = arch.of_device(0)
    adapters = {a.name: a for a in GPU}
    wrong = 0
    for call in [c for c in calls() if match in c.name][first:]:
        given = call.arguments()
        print(f"== call {call.op} {call.plan(here).variant} : {call.name}", flush=True)
        try:
            compare(call, given, adapters[call.framework])
        except Exception as error:
            wrong += 1
            print(f"== wrong {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            if type(error).__module__.startswith("cupy_backends"):  # the context is gone; a new process goes on behind this call
                os._exit(1)
        cupy.cuda.runtime.deviceSynchronize()
    print(f"== done {wrong}", flush=True)
    return int(wrong > 0)


INFORMATION = re.compile(
    r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Target application|Process |No attachable|If you|Error: process didn't terminate|Error: No attachable|$"
)


def parse(text: str) -> dict[str, Any]:
    """Calls, findings (each kind once, with its count), the summary line, and what was wrong, from the output of a tool and `child`."""
    calls_seen: list[str] = []
    findings: dict[tuple[Any, ...], dict[str, Any]] = {}
    wrong: list[str] = []
    summary, done, current, block = "", False, ("", "", "before the first call"), []

    def close() -> None:
        if not block:
            return
        whole = " ".join(block)
        lines = sorted(set(re.findall(r"[\w./-]+\.cuh?:\d+", whole)))
        functions = sorted(set(re.findall(r"access at (?:[\w ]+ )?(?:\w+(?:<[^>]*>)?::)*(\w+)(?:<[^>]*>)?\(", whole)))
        severity = "warning" if block[0].startswith("Warning") else "error"
        key = (*current[:2], severity, re.sub(r"0x[0-9a-f]+|\d+", "#", block[0]), tuple(lines))
        row = findings.setdefault(
            key,
            {
                "op": current[0],
                "variant": current[1],
                "call": current[2],
                "severity": severity,
                "functions": functions,
                "lines": lines,
                "count": 0,
                "text": [t[:240] for t in block[:4]],
            },
        )
        row["count"] += 1
        block.clear()

    for line in text.splitlines():
        if line.startswith("== "):
            close()
            word, _, rest = line[3:].partition(" ")
            if word == "call":
                kind, _, name = rest.partition(" : ")
                current = (*kind.split(" ", 1), name)
                calls_seen.append(name)
            elif word == "wrong":
                wrong.append(f"{current[2]}: {rest}")
            elif word == "done":
                done = True
        elif line.startswith("========="):
            words = line[9:].removeprefix(" ").rstrip()
            if "SUMMARY" in words:
                summary = words
            if words.startswith(" ") and block:
                block.append(words.strip())
            else:
                close()
                if not INFORMATION.match(words):
                    block.append(words)
    close()
    return {"calls": len(calls_seen), "done": done, "wrong": wrong, "summary": summary, "findings": list(findings.values())}


def command(tool: str, match: str, first: int = 0) -> list[str]:
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "33", "--print-limit", "200", "--show-backtrace", "device"]
    words += ["--report-api-errors", "no"] if tool == "memcheck" else []  # frameworks probe for what is not there
    return [*words, sys.executable, "-m", "tests.sanitize", "--child", "--match", match, "--first", str(first)]


def judge(tool: str, code: int, text: str, seconds: float) -> dict[str, Any]:
    """What one tool found; `ok` if that is nothing, or nothing that is not allowed."""
    found = parse(text)
    for finding in found["findings"]:
        finding["allowed"] = any(a.covers(tool, finding) for a in ALLOWED)
    unexplained = [f for f in found["findings"] if not f["allowed"]]
    ok = found["done"] and not found["wrong"] and not unexplained and (code == 0 or (code == 33 and bool(found["findings"])))
    if not ok and not unexplained and not found["wrong"]:
        found["tail"] = text.splitlines()[-15:]
    return {"ok": ok, "exit": code, "seconds": round(seconds, 1), **found}


def under(tool: str, match: str, seconds: float, log: Path | None) -> dict[str, Any]:
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
    env["NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS"] = "100000000"  # past 75 it stopped, in the last of the calls with clusters; once past a million
    start = time.perf_counter()
    text, code = "", 0
    number = len([c for c in calls() if match in c.name])
    while True:
        first = text.count("\n== call ")
        run = subprocess.Popen(
            command(tool, match, first), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
        try:
            more, _ = run.communicate(timeout=max(seconds - (time.perf_counter() - start), 1))
            code = max(code, run.returncode, key=lambda c: (c not in (0, 33), c))
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            text, code = text + "\n" + run.communicate()[0], -1
            break
        text += "\n" + more
        now = text.count("\n== call ")
        if "\n== done" in more or now == first or now >= number:
            break
    if log:
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{tool}.txt").write_text(text[-4_000_000:])
    found = judge(tool, code, text, time.perf_counter() - start)
    allowed = sum(f["allowed"] for f in found["findings"])
    print(
        f"{tool:10} {'ok' if found['ok'] else 'NOT OK':7} {found['seconds']:6.1f} s, {found['calls']} calls, {len(found['findings'])} kinds of finding ({allowed} allowed); {found['summary']}",
        flush=True,
    )
    for f in [f for f in found["findings"] if not f["allowed"]][:10]:
        print(f"  {f['count']} x {f['severity']} in {f['call']} ({f['variant']}): {' | '.join(f['text'])[:400]}", flush=True)
    for w in found["wrong"][:10] + found.get("tail", []):
        print(f"  {w}", flush=True)
    return found


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--report", type=Path, metavar="FILE")
    p.add_argument("--tools", default=",".join(TOOLS), metavar="TOOL,...")
    p.add_argument("--match", default="", help="only calls whose name holds this text")
    p.add_argument("--seconds", type=float, default=480, help="limit of one tool (default: %(default)s)")
    p.add_argument("--serial", action="store_true", help="one tool after another")
    p.add_argument("--log", type=Path, metavar="DIR", help="keep what the tools printed")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.child:
        return child(options.match, options.first)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        return 2
    import cupy

    here = arch.of_device(0)
    some = [c for c in calls() if options.match in c.name]
    start = time.perf_counter()
    with_lines()
    count = compile_all(here, some)
    print(f"{count} kernels for {here.name} compiled in {time.perf_counter() - start:.1f} s", flush=True)
    tools = options.tools.split(",")
    with ThreadPoolExecutor(1 if options.serial else len(tools)) as pool:
        found = dict(zip(tools, pool.map(lambda tool: under(tool, options.match, options.seconds, options.log), tools), strict=True))
    reached, missing = coverage(here)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False).stdout.split("Version")[-1].split("\n")[0].strip()
    ok = all(f["ok"] for f in found.values()) and not (missing and here.name == "sm_90a" and not options.match)
    whole = {
        **record(name), "ok": ok, "compute_sanitizer": version, "calls": len(some), "kernels": count, "variants": reached, "variants_missed": missing,
        "allowed": [{"tool": a.tool, "op": a.op, "variant": a.variant, "functions": sorted(a.functions), "reason": a.reason} for a in ALLOWED], "tools": found,
    }  # fmt: skip
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{'ok' if ok else 'NOT OK'}: {len(some)} calls, {count} kernels, variants missed: {', '.join(missing) or 'none'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
