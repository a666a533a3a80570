"""Apply each fault to a copy of the tree, run the tests that must catch it, say who did."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hccupy.provenance import record

from .table import MUTATIONS, ROOT, Mutation, apply

REPORT = ROOT / "notebooks" / "results" / "mutations.json"
SECONDS = 400  # of one fault's tests: a fault may also be a hang
FOLDERS = ("hccupy", "kernels", "tests")
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def copy_tree(to: Path) -> Path:
    """What the tests need, without what earlier runs left."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    return to


def run_tests(tree: Path, tests: tuple[str, ...], seconds: float = SECONDS) -> tuple[int | None, str]:
    """(exit status, output) of pytest in a tree; None where the time was up."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TEST_PROFILE": "first", "HCCUPY_CACHE_DIR": str(tree / "cache")}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]
    child = subprocess.Popen(words, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return None, ""
    return child.returncode, output


def judge(code: int | None, output: str) -> tuple[str, str]:
    """(caught, missed or error, by what)."""
    if code is None:
        return "caught", f"not done within {SECONDS} s"
    if code < 0 or code in (128 + signal.SIGABRT, 128 + signal.SIGSEGV):
        return "caught", f"the process died ({signal.Signals(-code if code < 0 else code - 128).name})"
    if code == 0:
        return "missed", ""
    found = re.search(r"^FAILED (\S+(?: \S+\])?)", output, re.M)
    if code == 1 and found:
        return "caught", found[1]
    return "error", output[-2000:]  # nothing collected, an import that fails: no test has judged the fault


def examine(tree: Path, mutation: Mutation) -> dict[str, Any]:
    path = tree / mutation.file
    before = path.read_text()
    start = time.perf_counter()
    try:
        path.write_text(apply(mutation, before))
        verdict, by = judge(*run_tests(tree, mutation.tests))
    finally:
        path.write_text(before)
    seconds = round(time.perf_counter() - start, 1)
    return {"id": mutation.id, "file": mutation.file, "kind": mutation.kind, "fault": mutation.fault, "verdict": verdict, "by": by, "seconds": seconds}


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    p.add_argument("--only", default="", metavar="ID,...", help="only these faults; no report unless --output")
    p.add_argument("--output", type=Path, metavar="FILE", help=f"the report (default: {REPORT.relative_to(ROOT)})")
    p.add_argument("--jobs", "-j", type=int, default=len(os.sched_getaffinity(0)))
    options = p.parse_args()
    words = options.only.split(",") if options.only else []
    todo = [m for m in MUTATIONS if not words or m.id in words]
    if words and len(todo) != len(words):
        print(f"no such fault: {', '.join(sorted(set(words) - {m.id for m in todo}))}")
        return 2
    for m in MUTATIONS:
        apply(m, (ROOT / m.file).read_text())
    head = record("none")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hccupy-mutations-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for n in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(n)))
        tree = Path(folder) / "0"
        where = subprocess.run(
            [sys.executable, "-c", "import hccupy; print(hccupy.__file__)"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        if not where.startswith(str(tree)):
            print(f"hccupy is imported from {where.strip()}, not from the copy {tree}")
            return 2
        every = tuple(dict.fromkeys(t for m in todo for t in m.tests))
        code, output = run_tests(tree, every, 10 * SECONDS)
        if code != 0:
            print(f"the tests do not pass without a fault ({code}):\n{output[-4000:]}")
            return 2
        print(f"{len(every)} tests pass without a fault; {len(todo)} faults", flush=True)
        say = threading.Lock()

        def one(mutation: Mutation) -> dict[str, Any]:
            mine = trees.get()
            try:
                row = examine(mine, mutation)
            finally:
                trees.put(mine)
            with say:
                print(
                    f"{row['verdict']:7} {row['seconds']:6.1f} s  {row['id']:28} {row['fault'][:70]:70} {row['by'].splitlines()[-1] if row['by'] else ''}",
                    flush=True,
                )
            return row

        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(one, todo))
    counts = {word: sum(r["verdict"] == word for r in rows) for word in ("caught", "missed", "error")}
    print(
        f"{counts['caught']}/{len(rows)} caught"
        + "".join(f"; {counts[w]} {w}: {', '.join(r['id'] for r in rows if r['verdict'] == w)}" for w in ("missed", "error") if counts[w])
    )
    output_to = options.output or (None if words else REPORT)
    if output_to:
        whole = {**head, "total": len(rows), **counts, "seconds": round(time.perf_counter() - start), "faults": rows}
        output_to.parent.mkdir(parents=True, exist_ok=True)
        output_to.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if counts["caught"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
