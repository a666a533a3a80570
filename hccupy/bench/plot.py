"""Microseconds and share of the floor against tokens, from a bench report."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def of_the_model(record: dict[str, Any]) -> bool:
    """Is this one of ours at the sizes that figures and tables show?

    bf16, hc 4, hidden 6144; 64 heads, dense, tails cleared, not at a block's first slot.
    """
    sizes = (record.get("hc"), record.get("hidden"), record["dtype"]) in ((4, 6144, "bfloat16"), (None, None, "bfloat16"))
    rope = record.get("q_heads") in (None, 64) and record.get("layout", "dense") == "dense" and record.get("length") != 1025 and record.get("tail") != "keep"
    return "peer" not in record and "tokens" in record and sizes and rope


def series(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Our records by curve: op, with the norm, mode and heads that tell curves apart; each sorted by tokens."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in filter(of_the_model, report["records"]):
        name = r["op"] + (" + norm" if r.get("norm") else "") + (f" {r['mode']}" if "mode" in r else "")
        found.setdefault(name, []).append(r)
    return {n: sorted(rows, key=lambda r: r["tokens"]) for n, rows in found.items() if len(rows) > 1}


def plot(report: dict[str, Any], path: Path) -> bool:
    """Write the figure; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    for name, rows in series(report).items():
        tokens = [r["tokens"] for r in rows]
        left.plot(tokens, [r["us"] for r in rows], marker="o", ms=3, label=name)
        right.plot(tokens, [r["share"] for r in rows], marker="o", ms=3, label=name)
    for axis, title in ((left, "microseconds a call"), (right, "share of the floor: each byte once, at the ceiling of the same run")):
        axis.set(xscale="log", xlabel="tokens", title=title)
        axis.grid(alpha=0.3)
    left.set_yscale("log")
    right.set_ylim(0, None)
    right.axhline(1.0, color="grey", lw=0.8)
    right.legend(fontsize=7)
    left.legend(fontsize=7)
    figure.suptitle(f"hccupy on {report['gpu']}, {report['date']}, commit {report['commit'][:9]}; bf16, hc 4, hidden 6144, 64/8 heads of 128")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
