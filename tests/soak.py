"""A soak: random calls of every op for minutes, each compared with fp64 on the device and with itself.

    python -m tests.soak --minutes 8 --seed 1 --report notebooks/results/h200/soak_1.json

Ops, shapes, dtypes, cache layouts, bad pages, alignments, frameworks (torch, CuPy), bound calls, outputs given (between red zones) or not,
updates in place, side streams with late inputs, several threads at once, CUDA graphs replayed on changed inputs. Every call is made
twice: the bits must be the same. Exit status 0 only with no difference.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hccupy import arch
from hccupy.provenance import record

from .soak_models import Model, compile_one, models, plans_of
from .soak_reference import Difference
from .soak_trial import Trial

MOST_KEPT = 16 << 30  # bytes


class Soak:
    """Random calls, from several threads; what was called and what differed."""

    def __init__(self, found: list[Model], device: str, seed: int) -> None:
        self.models, self.device, self.seed = found, device, seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.worst: dict[str, float] = {}
        self.differences: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.cuda = device != "cpu"

    def many(self, rng: np.random.Generator, until: float, alone: bool) -> None:
        """Calls on a stream of their own until the time is up."""
        stream = torch.cuda.Stream() if self.cuda else None
        generator = torch.Generator(self.device)
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            while time.perf_counter() < until and len(self.differences) < 20:
                number = int(rng.integers(2**62))
                self.one(number, generator, alone)

    def one(self, number: int, generator: Any, alone: bool) -> None:
        rng = np.random.default_rng(number)
        generator.manual_seed(number)
        model = self.models[int(rng.integers(len(self.models)))]
        op = model.ops()[int(rng.integers(len(model.ops())))]
        told = f"{op} {model.words}"
        try:
            variant, way, worst = Trial(self.device, model, op, rng, generator, alone).run()
        except Exception as error:
            text = str(error) if isinstance(error, Difference) else "".join(traceback.format_exception(error)[-4:])
            with self.lock:
                self.differences.append({"number": number, "alone": alone, "call": told, "difference": text[:1500]})
                print(f"DIFFERENCE {told}: {text[:600]}", flush=True)
            return
        with self.lock:
            self.counts[f"{op} {variant} {way}"] += 1
            self.worst[op] = max(self.worst.get(op, 0.0), worst)


def give_memory_back() -> None:
    """torch and CuPy keep what each of 32 streams has freed: 126 GB after 8 minutes, and nothing was left for a second run beside it."""
    import cupy

    pool = cupy.get_default_memory_pool()
    if torch.cuda.memory_reserved() + pool.total_bytes() > MOST_KEPT:
        torch.cuda.empty_cache()
        pool.free_all_blocks()


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=8)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--report", type=Path, metavar="FILE")
    p.add_argument("--threads", type=int, default=4)
    p.add_argument("--models", type=int, default=30, help="how many sets of baked sizes (default: %(default)s)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the NumPy path, to try the soak itself")
    p.add_argument("--again", type=int, metavar="NUMBER", help="only the call of that number, as a report names it (same --seed and --models)")
    options = p.parse_args()
    start = time.perf_counter()
    found = models(np.random.default_rng(options.seed), options.models, options.device)
    soak = Soak(found, options.device, options.seed)
    name, compiled = "none", 0
    if soak.cuda:
        torch.zeros(1, device="cuda")
        name = torch.cuda.get_device_name()
        todo = plans_of(found, arch.of_device(torch.cuda.current_device()))
        compiled = len(todo)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, todo, chunksize=2))
        print(f"{compiled} kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)
    if options.again is not None:
        soak.one(options.again, torch.Generator(options.device), True)
        return int(bool(soak.differences))
    begin = time.perf_counter()
    end, turn = begin + 60 * options.minutes, 0
    sequence = np.random.SeedSequence(options.seed)
    while time.perf_counter() < end and len(soak.differences) < 20:
        turn += 1
        until = min(time.perf_counter() + 3, end)
        seeds = sequence.spawn(options.threads)
        if soak.cuda:
            give_memory_back()
        if turn % 3 == 0:  # alone: CUDA graphs, which other threads' allocations would break
            soak.many(np.random.default_rng(seeds[0]), until, True)
            continue
        threads = [threading.Thread(target=soak.many, args=(np.random.default_rng(s), until, False)) for s in seeds]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    calls = sum(soak.counts.values())
    whole = {
        **record(name), "ok": not soak.differences and calls > 0, "seed": options.seed, "minutes": round((time.perf_counter() - begin) / 60, 2), "threads": options.threads,
        "calls": calls, "kernels_compiled_ahead": compiled, "differences": soak.differences, "worst_ulps": {k: round(v, 3) for k, v in sorted(soak.worst.items())},
        "by_op_variant_way": dict(sorted(soak.counts.items())), "models": [{"kind": m.kind, **m.words} for m in found],
    }  # fmt: skip
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(whole, indent=1) + "\n")
    print(
        f"{'ok' if whole['ok'] else 'NOT OK'}: {calls} calls, each twice, in {whole['minutes']} minutes, {len(soak.differences)} differences; worst ulps {whole['worst_ulps']}"
    )
    return 0 if whole["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
