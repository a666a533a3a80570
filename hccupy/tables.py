"""Markdown tables generated from the specs, for the README (a test compares them)."""

from __future__ import annotations

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
