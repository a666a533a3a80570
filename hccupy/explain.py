"""Questions that need no arrays: can an op run such sizes, and with which plan?"""

from __future__ import annotations

from typing import Any

from . import arch as arches
from . import check, cuda, plan
from .arch import Arch
from .arrays import Meta, row_major
from .errors import ArgumentError, DtypeError, HccupyError, ShapeError, explain
from .ops import get
from .spec import Arg, Bound, OpSpec


def imagine(spec: OpSpec, sizes: dict[str, Any], dtype: str = "bfloat16") -> Bound:
    """The Bound of a call with contiguous arrays of such sizes on CUDA. `sizes` holds axes, scalars, and True (or
    a dtype's name) for optional arrays that are given.

    Raises the argument errors of the op, and ArgumentError for words the op does not know.
    """
    known = {a.name for a in spec.axes} | {p.name for p in spec.params} | set(spec.imagine)
    for name in sizes:
        if name not in known:
            raise ArgumentError(
                explain(spec.name, name, "an axis, scalar or optional array of the op", "an unknown word", f"Known: {', '.join(sorted(known))}.")
            )
    if not any(dtype in p.dtypes for p in spec.args):
        words = ", ".join(dict.fromkeys(d for p in spec.args for d in p.dtypes if not d.startswith("=")))
        raise DtypeError(explain(spec.name, "dtype", f"one of {words}", repr(dtype)))
    axes: dict[str, int] = {}
    for name in (*(a.name for a in spec.axes), *spec.imagine):
        if name in sizes:
            value = sizes[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ShapeError(explain(spec.name, name, "a length (an integer >= 0)", repr(value)))
            axes[name] = value
    for name, expression in spec.imagine.items():
        if name not in axes:
            try:
                axes[name] = check.size_of(expression, axes)
            except NameError as error:
                raise ShapeError(explain(spec.name, str(error.name), "a size", "none", f"Give {error.name}=...")) from error
    missing = [a.name for a in spec.axes if a.name not in axes]
    if missing:
        raise ShapeError(explain(spec.name, ", ".join(missing), "sizes", "none", "Give name=value for each."))
    scalars = {s.name: sizes.get(s.name, s.default) for s in spec.scalars}
    metas: dict[str, Meta] = {}
    for p in spec.args:
        given = sizes.get(p.name)
        if p.optional and not given:
            continue
        shape = tuple(check.size_of(e, axes) for e in p.axes)
        metas[p.name] = Meta(shape, row_major(shape), given if isinstance(given, str) else _dtype(p, metas, dtype), ("cuda", 0))
    return check.bind(spec, metas, scalars, "numpy", dict.fromkeys(metas, 0))


def _dtype(p: Arg, metas: dict[str, Meta], dtype: str) -> str:
    choices = [metas[d[1:]].dtype if d.startswith("=") else d for d in p.dtypes]
    return dtype if dtype in choices else choices[0]


def supports(op: str, *, dtype: str = "bfloat16", arch: str | None = None, **sizes: Any) -> tuple[bool, str]:
    """Can `op` run such sizes? (True, which kernel) or (False, why not).

    `sizes`: axes (hc=4, hidden=6144; tokens and the like default to 1), scalars, and name=True for optional arrays.
    arch: "sm_90a" and so on; None asks about the GPU of this machine, or the CPU path where there is none.

    >>> supports("ihc_pre", hc=9, hidden=6144)[0]
    False
    """
    spec = get(op)
    try:
        bound = imagine(spec, sizes, dtype)
        target = arches.named(arch) if arch else here()
        if target is None:
            return True, "the NumPy path (no usable GPU here)"
        made = plan.make(spec, bound, target)
    except HccupyError as error:
        return False, str(error)
    return True, f"{made.variant} on {target.name}: {made.launch.why}"


def here() -> Arch | None:
    """The architecture of the current GPU, or None where there is no usable one."""
    try:
        if cuda.cupy().cuda.runtime.getDeviceCount() > 0:
            return arches.of_device(cuda.current_device())
    except Exception:  # no CuPy, no driver, no device: the CPU path serves
        return None
    return None


def plan_for(op: str, sizes: dict[str, Any], dtype: str = "bfloat16", arch: str | None = None) -> plan.Plan:
    """The Plan of a call of such sizes.

    Raises the op's argument errors; ArgumentError where no arch is named and none is here.
    """
    spec = get(op)
    bound = imagine(spec, sizes, dtype)
    target = arches.named(arch) if arch else here()
    if target is None:
        raise ArgumentError("explain: expected --arch (no usable GPU here), got none. Try --arch sm_90a.")
    return plan.make(spec, bound, target)
