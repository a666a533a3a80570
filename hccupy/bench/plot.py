"""Figures from a bench report: two for the README, written by `make figures`, the rest for notebooks/04_benchmarks.ipynb.

Grey words on no background are readable in light and dark; the colours are Okabe and Ito's, and every series has a marker of its
own. Each SVG holds the digest of what it was drawn from, so that a test can tell whether it is up to date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GREY = "#767676"  # 4.5 : 1 against white, 4.2 : 1 against GitHub's dark pages
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS, MARKERS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY), "osD^vP"
MAKERS = ("hccupy", "torch eager", "hpc-ops", "FlashInfer", "vLLM Triton", "torch.compile")  # a colour each, the same in every panel
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color"), GREY),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.markersize": 5,
    "figure.dpi": 80,
    "svg.fonttype": "none",
    "svg.hashsalt": "hccupy",
}
FLOOR = "floor: each byte once"
OPS = ("ihc_pre", "ihc_post", "ihc_post_pre", "rope_norm_store_kv", "rope_norm_store_kv_fp8")
Report = dict[str, Any]
Rows = list[dict[str, Any]]


# ---- what is drawn ----------------------------------------------------------------------------------------------


def of_the_model(record: dict[str, Any]) -> bool:
    """Is this one of ours at the sizes that figures and tables show?

    bf16, hc 4, hidden 6144; 64 heads, dense, tails cleared, not at a block's first slot.
    """
    return "peer" not in record and the_models(record)


def the_models(record: dict[str, Any]) -> bool:
    """As of_the_model, ours or a peer's."""
    sizes = (record.get("hc"), record.get("hidden"), record["dtype"]) in ((4, 6144, "bfloat16"), (None, None, "bfloat16"))
    rope = record.get("q_heads") in (None, 64) and record.get("layout", "dense") == "dense" and record.get("length") != 1025 and record.get("tail") != "keep"
    return "tokens" in record and sizes and rope


def lines(report: Report, op: str, norm: bool = False) -> dict[str, Rows]:
    """Records of an op by who made them ("hccupy" first, then the peers of the record), sorted by tokens."""
    found: dict[str, Rows] = {"hccupy": []}
    for r in report["records"]:
        if r["op"].split(" (")[0] == op and the_models(r) and bool(r.get("norm")) == norm:
            found.setdefault(r.get("peer", "hccupy"), []).append(r)
    return {name: sorted(rows, key=lambda r: r["tokens"]) for name, rows in found.items() if rows}


def measured(report: Report) -> list[str]:
    """The ops of OPS that have a curve in this report."""
    return [op for op in OPS if len(lines(report, op).get("hccupy", ())) > 1]


def digest(report: Report) -> str:
    """Of everything that the two figures are drawn from: the records, and this file."""
    drawn = [report["gpu"], report["date"], [lines(report, op) for op in OPS]]
    text = json.dumps(drawn, sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


GRAPHS = "CUDA graphs, cold L2, medians"
MODEL = f"bf16, hc 4, hidden 6144; RoPE with 64/8 heads of 128; {GRAPHS}"


# ---- drawing ----------------------------------------------------------------------------------------------------


def canvas(width: float, height: float, panels: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """A figure in this style and its panels in a row."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure((width, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, **options)[0]
    return figure, list(axes)


def by_tokens(axis: Any, ticks: Sequence[int] = (1, 16, 256, 4096)) -> None:
    """A logarithmic axis of tokens with plain numbers."""
    axis.set(xscale="log", xlabel="tokens")
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axis.minorticks_off()


def curve(axis: Any, rows: Rows, value: str | Callable[[dict[str, Any]], float], number: int, label: str) -> None:
    """One series against tokens."""
    values = [r[value] if isinstance(value, str) else value(r) for r in rows]
    axis.plot([r["tokens"] for r in rows], values, color=COLOURS[number], marker=MARKERS[number], lw=1.8, label=label)


def titled(figure: Any, words: str, report: Report, how: str) -> Any:
    """The message above; below where it is from and how it was measured."""
    figure.suptitle(words, color=GREY, fontsize=12)
    figure.supxlabel(f"{report['gpu']}, {report['date']}, commit {report['commit'][:9]}; {how}", color=GREY, fontsize=8)
    return figure


def time_message(report: Report) -> str:
    """How much faster than the best peer of the record: where the lead is smallest, and where it is largest."""
    ratios, names = [], set()
    for op in measured(report):
        found = lines(report, op)
        ours = {r["case"]: r["us"] for r in found.pop("hccupy")}
        names |= set(found)
        for case, us in ours.items():
            others = [r["us"] for rows in found.values() for r in rows if r["case"] == case]
            ratios += [min(others) / us] if others else []
    if not ratios:
        return "Microseconds a call"
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as {min(names) if len(names) == 1 else 'the best other kernel of the record'}"


def time_figure(report: Report) -> Any:
    """Microseconds a call against tokens: ours, the peers of the record, and the floor of the bytes."""
    ops = [op for op in measured(report) if op == "rope_norm_store_kv" or len(lines(report, op)) > 1]
    figure, axes = canvas(13, 3.6, len(ops), sharey=True)
    for axis, op in zip(axes, ops, strict=True):
        found = lines(report, op)
        for name, rows in found.items():
            curve(axis, rows, "us", MAKERS.index(name) if name in MAKERS else len(MAKERS) - 1, name)
        floor = [r for r in found["hccupy"] if r["floor_us"] > 0.1]
        axis.plot([r["tokens"] for r in floor], [r["floor_us"] for r in floor], color=GREY, ls="--", lw=1.2, label=FLOOR)
        by_tokens(axis)
        axis.set(yscale="log", title=op)
        axis.set_yticks([0.1, 1, 10, 100, 1000, 10000], ["0.1", "1", "10", "100", "1,000", "10,000"])
        axis.minorticks_off()
    axes[0].set_ylabel("µs a call")
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    entries[FLOOR] = entries.pop(FLOOR)  # last
    figure.legend(entries.values(), entries, loc="outside right center", fontsize=9, labelcolor=GREY)
    return titled(figure, time_message(report), report, MODEL)


def share_message(report: Report) -> str:
    """How near to memory speed the largest calls come."""
    last = [lines(report, op)["hccupy"][-1] for op in measured(report)]
    shares = [r["share"] for r in last]
    return f"At {last[0]['tokens']:,} tokens calls run at {min(shares):.0%} to {max(shares):.0%} of memory speed"


def share_figure(report: Report) -> Any:
    """Share of the floor against tokens: where a call is as fast as its bytes."""
    figure, (axis,) = canvas(8, 4)
    for number, op in enumerate(measured(report)):
        curve(axis, lines(report, op)["hccupy"], lambda r: 100 * r["share"], number, op)
    by_tokens(axis, (1, 16, 64, 256, 1024, 4096, 16384))
    axis.axhline(100, color=GREY, ls="--", lw=1.2)
    axis.text(1, 101, "the ceiling of plain streaming kernels, same run", fontsize=8, color=GREY, va="bottom")
    axis.set(ylabel="share of the memory floor, %", ylim=(0, 112))
    axis.legend(fontsize=9, labelcolor=GREY)
    return titled(figure, share_message(report), report, MODEL)


def norm_figure(report: Report) -> Any:
    """What folding the next RMSNorm in costs, in per cent of the call without it."""
    figure, (axis,) = canvas(8, 3.2)
    most = 0.0
    for number, op in enumerate(o for o in ("ihc_pre", "ihc_head", "ihc_post_pre") if lines(report, o, norm=True)):
        plain = {r["tokens"]: r["us"] for r in lines(report, op)["hccupy"]}
        rows = [r for r in lines(report, op, norm=True)["hccupy"] if r["tokens"] in plain]
        extra = {r["tokens"]: 100 * (r["us"] / plain[r["tokens"]] - 1) for r in rows}
        most = max(most, *extra.values())
        curve(axis, rows, lambda r, extra=extra: extra[r["tokens"]], number, op)  # type: ignore[misc]
    by_tokens(axis, (1, 16, 64, 256, 1024, 4096, 16384))
    axis.set(ylabel="extra time, %", ylim=(0, None))
    axis.legend(labelcolor=GREY)
    return titled(figure, f"The folded RMSNorm adds at most {most:.0f} % to a call", report, MODEL)


def dots(groups: dict[str, dict[str, list[float]]], xlabel: str, title: str, report: Report, how: str, **options: Any) -> Any:
    """A row a group, a colour and marker a series; values along x."""
    figure, (axis,) = canvas(8, 0.9 + 0.34 * len(groups) + 0.5)
    names = list(dict.fromkeys(name for series in groups.values() for name in series))
    for number, name in enumerate(names):
        points = [(value, row) for row, series in enumerate(groups.values()) for value in series.get(name, ())]
        axis.scatter(*zip(*points, strict=True), color=COLOURS[number], marker=MARKERS[number], s=34, label=name, zorder=3)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.set(xlabel=xlabel, **options)
    if len(names) > 1:
        axis.legend(fontsize=9, labelcolor=GREY, loc="center left", bbox_to_anchor=(1, 0.5))
    return titled(figure, title, report, how)


def host_figure(report: Report) -> Any:
    """Host microseconds of a call with torch tensors: allocating, out=, bound."""
    words = {"plain": "allocates its outputs", "out": "out=", "bound": "hccupy.bind"}
    groups: dict[str, dict[str, list[float]]] = {}
    for h in sorted((h for h in report["host"] if h["call"] in words), key=lambda h: list(words).index(h["call"])):
        groups.setdefault(h["op"], {})[words[h["call"]]] = [h["us"]]
    return dots(groups, "host µs a call", "What a call costs before the GPU starts", report, "torch tensors, the fastest of several passes", xlim=(0, None))


def first_call_figure(report: Report) -> Any:
    """Seconds of a cold compile, one dot a kind of kernel."""
    groups: dict[str, dict[str, list[float]]] = {}
    for r in report["records"]:
        if "compile_s" in r:
            groups.setdefault(r["op"], {}).setdefault("cold compile", []).append(r["compile_s"])
    return dots(groups, "seconds", "A first call compiles its kernel, once a machine", report, "NVRTC, its own cache off", xlim=(0, None))


def sizes_figure(report: Report, tokens: int = 16384) -> Any:
    """Share of the floor at other widths, channel counts and dtypes."""
    groups: dict[str, dict[str, list[float]]] = {}
    for r in report["records"]:
        if "peer" not in r and r.get("tokens") == tokens and not r.get("norm") and "hc" in r:
            name = f"hc {r['hc']}, hidden {r['hidden']}, {r['dtype']}"
            groups.setdefault(name, {})[r["op"]] = [100 * r["share"]]
    return dots(groups, f"share of the memory floor at {tokens:,} tokens, %", "Other sizes: where the fast kernels end", report, GRAPHS, xlim=(0, 110))


def tail_figure(report: Report) -> Any:
    """Decode at a page's first slot and in its middle, tails cleared or kept."""
    groups: dict[str, dict[str, list[float]]] = {}
    for r in report["records"]:
        if "peer" not in r and r.get("mode") == "decode" and r.get("q_heads") == 64 and r.get("layout") == "dense":
            where = "first slot of a page" if r["length"] % r["block_size"] == 1 else "mid-page"
            tail = ", tail kept" if r["tail"] == "keep" else ""
            fp8 = " fp8" if r["op"].endswith("fp8") else ""
            groups.setdefault(f"{r['tokens']} request{'s' if r['tokens'] > 1 else ''}{fp8}", {}).setdefault(where + tail, []).append(r["us"])
    return dots(groups, "µs a call", "Clearing a page's tail costs where the page is new", report, MODEL, xlim=(0, None))


def decode_figure(demo: dict[str, Any]) -> Any:
    """Decoded tokens a second of the demo's networks on a GPU."""
    figure, (axis,) = canvas(8, 0.6 + 0.34 * len(demo["decode"]) + 0.5)
    rates = [r["tokens_per_s"] for r in demo["decode"]]
    axis.barh([r["how"] for r in demo["decode"]], rates, color=[BLUE if r["fused"] else VERMILLION for r in demo["decode"]])
    for row, rate in enumerate(rates):
        axis.text(rate, row, f" {rate:.0f}", va="center", color=GREY, fontsize=9)
    axis.invert_yaxis()
    axis.set(xlabel="decoded tokens a second")
    axis.grid(visible=False, axis="y")
    figure.suptitle("SmolLM2-135M as an iHC network: one CUDA graph a token", color=GREY, fontsize=12)
    figure.supxlabel(f"{demo['gpu']}, {demo['date']}, commit {demo['commit'][:9]}; fp32 weights, batch 1", color=GREY, fontsize=8)
    return figure


# ---- files ------------------------------------------------------------------------------------------------------

FIGURES: dict[str, tuple[Callable[[Report], Any], Callable[[Report], str]]] = {
    "time": (time_figure, time_message),
    "share": (share_figure, share_message),
}


def figure_file(report_file: Path, name: str) -> Path:
    """Where a figure of a report lies: bench.json -> bench-time.svg."""
    return report_file.with_name(f"{report_file.stem}-{name}.svg")


def plot(report: Report, report_file: Path) -> list[Path]:
    """Write the two figures beside a report; none where matplotlib is not installed or no op has two sizes."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    if not measured(report):
        return []
    written = []
    for name, (draw, _) in FIGURES.items():
        path = figure_file(report_file, name)
        with mpl.rc_context(STYLE):
            draw(report).savefig(path, metadata={"Date": None, "Description": f"data {digest(report)}"})
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        written.append(path)
    return written
