"""What the GPU suite records: worst error per op, dtype, framework and output."""

from __future__ import annotations

_worst: dict[tuple[str, str, str, str], dict[str, float]] = {}


def note(op: str, dtype: str, framework: str, output: str, **measures: float) -> None:
    """Keep the largest of each measure (ulps, relative error) for this row; `cases` counts."""
    row = _worst.setdefault((op, dtype, framework, output), {"cases": 0})
    row["cases"] += 1
    for name, value in measures.items():
        row[name] = max(row.get(name, 0.0), float(value))


def merge(others: list[dict[str, object]]) -> None:
    """Take in the rows of another worker."""
    for other in others:
        measures = dict(other)
        key = tuple(str(measures.pop(k)) for k in ("op", "dtype", "framework", "output"))
        row = _worst.setdefault(key, {"cases": 0})  # type: ignore[arg-type]
        row["cases"] += measures.pop("cases")  # type: ignore[operator]
        for name, value in measures.items():
            row[name] = max(row.get(name, 0.0), value)  # type: ignore[type-var]


def rows() -> list[dict[str, object]]:
    """All rows, sorted."""
    return [{"op": o, "dtype": d, "framework": f, "output": y, **m} for (o, d, f, y), m in sorted(_worst.items())]
