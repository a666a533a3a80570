"""Registers and shared memory of every kernel variant on every architecture, and the figures they are held to.

    python -m tests.resources            the table, and what differs from the baseline
    python -m tests.resources --write    take what is found for the baseline of this NVRTC (tests/resources.json)
    python -m tests.resources OP ...     of these ops alone

A row is an op, variant (of rope: and way of sharing rows out) and architecture, the largest of its binaries in test_build.py: of the small
cases, and of what the bench runs. Nothing may spill or use the stack, whichever NVRTC
compiles it. Registers and shared memory are compared only with what the same NVRTC gave: versions differ by a few registers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hccupy import build, cuda
from hccupy.ops import REGISTRY
from hccupy.plan import Plan

BASELINE = Path(__file__).with_name("resources.json")
GROWTH = 8  # registers more than the baseline that pass: one step of their allocation
Row = dict[str, Any]
Table = dict[str, Row]


def name_of(row: Row) -> str:
    return f"{row['op']} {row['variant']} {row['arch']}{' bench' if row.get('bench') else ''}"


def variant_of(made: Plan) -> str:
    """The variant and, of rope, how its warps share the rows."""
    d = made.defines
    if not made.op.startswith("rope"):
        return made.variant
    return made.variant + ("-block" if d["kBulk"] else "-narrow" if d["kTogether"] else "-many" if d["kMany"] else "-few")


def row_of(made: Plan, used: dict[str, int], bench: bool = False) -> Row:
    """What is recorded of one binary."""
    return {"op": made.op, "variant": variant_of(made), "arch": made.arch.name, "bench": bench, **used, "dynamic": made.launch.smem}


def largest(rows: list[Row]) -> Table:
    """One row a variant and architecture."""
    found: Table = {}
    for row in rows:
        mine = found.setdefault(name_of(row), dict.fromkeys(("registers", "shared", "dynamic", "spills", "stack"), 0))
        for key in mine:
            mine[key] = max(mine[key], row[key])
    return found


def version() -> str:
    return ".".join(map(str, cuda.nvrtc_version()))


def baseline() -> dict[str, Table]:
    """{NVRTC version: table}."""
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def complaints(found: Table, held: Table | None) -> list[str]:
    """What is wrong with the rows found; `held`: the baseline of the same NVRTC, if there is one."""
    wrong = [f"{name}: {row['spills']} bytes spilled, {row['stack']} of stack" for name, row in found.items() if row["spills"] or row["stack"]]
    for name, row in found.items():
        if held is None:
            break
        before = held.get(name)
        if before is None:
            wrong.append(f"{name}: not in the baseline")
            continue
        if row["registers"] > before["registers"] + GROWTH:
            wrong.append(f"{name}: {row['registers']} registers, {before['registers']} in the baseline")
        for key in ("shared", "dynamic"):
            if row[key] > before[key]:
                wrong.append(f"{name}: {row[key]} bytes of {key} shared memory, {before[key]} in the baseline")
    return [f"{w}; if it is meant: python -m tests.resources --write" for w in wrong]


def _compile(one: tuple[Plan, bool]) -> Row:
    from .test_build import resources

    made, bench = one
    return row_of(made, resources(build.compile_plan(made, extra=("-Xptxas=-v",))[1]), bench)


def measure(ops: list[str], jobs: int) -> Table:
    from .test_build import every_plan

    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return largest(list(pool.map(_compile, every_plan(ops), chunksize=4)))


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.resources", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ops", nargs="*", default=sorted(REGISTRY), metavar="OP", help="default: all")
    p.add_argument("--write", action="store_true")
    p.add_argument("--jobs", "-j", type=int, default=len(os.sched_getaffinity(0)))
    options = p.parse_args()
    found, whole = measure(options.ops, options.jobs), baseline()
    others = {name: row for name, row in whole.get(version(), {}).items() if name.split()[0] not in options.ops}
    held = {name: row for name, row in whole[version()].items() if name not in others} if version() in whole else None
    print(f"{'NVRTC ' + version():56}{'registers':>10}{'before':>8}{'shared B':>10}{'dynamic B':>10}")
    for name, row in sorted(found.items()):
        before = (held or {}).get(name, {}).get("registers", "-")
        print(f"{name:56}{row['registers']:10}{before:>8}{row['shared']:10}{row['dynamic']:10}")
    gone = sorted((held or {}).keys() - found.keys())
    wrong = complaints(found, held) + [f"{name}: in the baseline, but no longer there" for name in gone]
    for line in wrong:
        print(line)
    spilled = any(row["spills"] or row["stack"] for row in found.values())
    if options.write and not spilled:
        whole[version()] = dict(sorted((others | found).items()))
        BASELINE.write_text(
            "{\n"
            + ",\n".join(f' "{v}": {{\n' + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in t.items()) + "\n }" for v, t in sorted(whole.items()))
            + "\n}\n"
        )
        print(f"{len(found)} rows written to {BASELINE.name}")
        return 0
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
