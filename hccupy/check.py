"""Step 2: bind axes from shapes and say what is wrong. The only file that raises argument errors.

`bind` gets the facts of every array (nothing is read from the arrays themselves) and returns a Bound, or raises an
error that names op, argument, what was expected, what came, and how to mend it.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from . import overlap
from .arrays import Meta, row_major
from .dtypes import BY_NAME
from .errors import ArgumentError, DeviceError, DtypeError, FrameworkError, LayoutError, ShapeError, explain
from .spec import Arg, Bound, OpSpec, Out, Scalar

FP32_MAX = 3.4028234663852886e38


def bind(spec: OpSpec, metas: Mapping[str, Meta], scalars: Mapping[str, Any], framework: str, addresses: Mapping[str, int]) -> Bound:
    """All checks of one call. `metas` holds every array given: parameters under their names, outputs under theirs.

    Raises the errors of errors.py. Aliasing is checked per call (addresses change), by `check_overlap`.
    """
    scalars = {p.name: scalar(spec, p, scalars[p.name]) for p in spec.scalars}
    for p in spec.args:
        if p.name not in metas and not p.optional:
            raise FrameworkError(explain(spec.name, p.name, "an array", "None", f"Pass {p.name} [{', '.join(p.axes)}]."))
    device = _one_device(spec, metas)
    axes, lead = _axes(spec, metas)
    dtypes = _dtypes(spec, metas)
    strides, aligned = {}, {}
    for p in spec.args:
        if p.name in metas:
            strides[p.name], aligned[p.name] = layout(spec, p, metas[p.name], lead, addresses[p.name])
    if spec.derive is not None:
        spec.derive(axes, scalars)
    _limits(spec, axes)
    bound = Bound(spec.name, axes, scalars, dtypes, strides, aligned, framework, device)
    for rule in spec.rules:
        rule(bound)
    _outputs(spec, bound, metas, lead, addresses)
    return bound


# ---- scalars ----------------------------------------------------------------------------------------------------


def scalar(spec: OpSpec, p: Scalar, value: Any) -> Any:
    """`value` as the plain Python value of its kind."""

    def bad(expected: str) -> ArgumentError:
        return ArgumentError(explain(spec.name, p.name, expected, f"{value!r}", f"The default is {p.default!r}."))

    if value is None and p.optional:
        return None
    if p.kind == "choice":
        if not isinstance(value, str) or value not in p.choices:
            raise bad("one of " + ", ".join(map(repr, p.choices)))
        return value
    if p.kind == "bool":
        if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
            raise bad("True or False")
        return bool(value)
    if p.kind == "int":
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not -(2**31) <= int(value) < 2**31:
            raise bad("a 32-bit integer")
        if p.low is not None and value < p.low:
            raise bad(f"an integer >= {p.low:g}")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise bad("a number on the host")
    try:
        number = float(value)
    except OverflowError:  # an int of 400 digits
        number = math.inf
    if not abs(number) <= FP32_MAX:
        raise bad("a number that is finite in fp32")
    if p.low is not None and number < p.low:
        raise bad(f"a number >= {p.low:g}")
    return number


# ---- devices, dtypes --------------------------------------------------------------------------------------------


def _one_device(spec: OpSpec, metas: Mapping[str, Meta]) -> tuple[str, int]:
    """The device of the first array, which all must share."""
    first = next(p.name for p in spec.args if p.name in metas)
    device = metas[first].device
    for name, meta in metas.items():
        if meta.device != device:
            hint = f"Move {_keyword(spec, name)} to that device."
            where = f"{device[0]}:{device[1]}, where {first} is"
            raise DeviceError(explain(spec.name, _keyword(spec, name), where, f"{meta.device[0]}:{meta.device[1]}", hint))
    return device


def _keyword(spec: OpSpec, name: str) -> str:
    """An output under the name the caller used for it."""
    return next((o.keyword for o in spec.outputs if o.name == name and o.keyword), name)


def _dtypes(spec: OpSpec, metas: Mapping[str, Meta]) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    for p in spec.args:
        if p.name not in metas:
            continue
        got = metas[p.name].dtype
        allowed = tuple(dtypes[d[1:]] if d.startswith("=") else d for d in p.dtypes)
        if got not in allowed:
            same = [d[1:] for d in p.dtypes if d.startswith("=")]
            expected = " or ".join(dict.fromkeys(allowed)) + (f" (the dtype of {', '.join(same)})" if same else "")
            raise DtypeError(explain(spec.name, p.name, expected, got, f"Convert {p.name} before the call."))
        dtypes[p.name] = got
    return dtypes


# ---- shapes -----------------------------------------------------------------------------------------------------


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<axis>", "eval")


def size_of(expression: str, axes: Mapping[str, int]) -> int:
    """The length an axis expression ("2*hc") stands for."""
    return int(eval(_compiled(expression), {"__builtins__": {}}, dict(axes)))  # our own words, never the caller's


def _known(expression: str, axes: Mapping[str, int]) -> bool:
    return all(name in axes for name in _compiled(expression).co_names)


def _pattern(p: Arg | Out) -> str:
    return f"[{', '.join(p.axes)}]" if isinstance(p.axes, tuple) else "[...]"


def _split(spec: OpSpec, p: Arg, meta: Meta) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """(leading shape, the other axes' lengths); the leading shape is None for arguments without one."""
    rank = len(p.axes)
    if p.lead and len(meta.shape) >= rank - 1:
        cut = len(meta.shape) - (rank - 1)
        return meta.shape[:cut], meta.shape[cut:]
    if p.lead or len(meta.shape) != rank:
        wanted = f"{'at least ' if p.lead else ''}{rank - 1 if p.lead else rank} axes {_pattern(p)}"
        raise ShapeError(explain(spec.name, p.name, wanted, f"shape {list(meta.shape)}", "Reshape it to those axes."))
    return None, meta.shape


def _axes(spec: OpSpec, metas: Mapping[str, Meta]) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Axis sizes from the shapes of the parameters, and the leading shape they share."""
    known = {a.name for a in spec.axes}
    axes: dict[str, int] = {}
    origin: dict[str, str] = {}
    lead: tuple[int, ...] | None = None
    split = {p.name: _split(spec, p, metas[p.name]) for p in spec.args if p.name in metas}
    for p in spec.args:
        if p.name not in metas:
            continue
        front, rest = split[p.name]
        sizes = rest
        if front is not None:
            if lead is not None and front != lead:
                expected = f"leading shape {list(lead)} (from {origin['lead']})"
                raise ShapeError(explain(spec.name, p.name, expected, f"{list(front)}", f"{p.name} is {_pattern(p)}."))
            if lead is None:
                lead, origin["lead"] = front, p.name
            sizes = (math.prod(front), *rest)
        for name, size in zip(p.axes, sizes, strict=True):
            if name in known or name.isidentifier():
                if name not in axes:
                    axes[name], origin[name] = size, p.name
                elif axes[name] != size:
                    sizes_known = tuple(size_of(e, axes) for e in p.axes) if all(_known(e, axes) for e in p.axes) else ()
                    raise _mismatch(spec, p, metas[p.name], f"{name} = {axes[name]} (from {origin[name]})", sizes_known)
    for p in spec.args:
        if p.name not in metas:
            continue
        front, rest = split[p.name]
        sizes = rest if front is None else (math.prod(front), *rest)
        expected_sizes = tuple(size_of(e, axes) for e in p.axes)
        if sizes != expected_sizes:
            words = ", ".join(f"{e} = {s}" for e, s in zip(p.axes, expected_sizes, strict=True))
            raise _mismatch(spec, p, metas[p.name], f"[{words}]", expected_sizes)
    return axes, lead


def _mismatch(spec: OpSpec, p: Arg, meta: Meta, expected: str, sizes: tuple[int, ...] = ()) -> ShapeError:
    transposed = len(sizes) == 2 and tuple(reversed(sizes)) == meta.shape
    hint = f"It looks transposed: pass {p.name}.T made contiguous." if transposed else f"{p.name} is {_pattern(p)}."
    return ShapeError(explain(spec.name, p.name, expected, f"shape {list(meta.shape)}", hint))


def _limits(spec: OpSpec, axes: Mapping[str, int]) -> None:
    for a in spec.axes:
        size = axes[a.name]
        if a.choices and size not in a.choices:
            words = ", ".join(map(str, a.choices))
            raise ShapeError(explain(spec.name, a.name, f"one of {words}", str(size), "Other lengths have no kernel."))
        if not a.low <= size <= a.high:
            raise ShapeError(explain(spec.name, a.name, f"{a.low} to {a.high}", str(size), f"{a.name}: {a.meaning}."))


# ---- layout -----------------------------------------------------------------------------------------------------


def layout(spec: OpSpec, p: Arg | Out, meta: Meta, lead: tuple[int, ...] | None, address: int) -> tuple[tuple[int, ...], int]:
    """(strides in elements of the flattened array, alignment in bytes up to 16).

    Strides of axes of length 1 are reported as 0: nobody may use them.
    """
    name = _keyword(spec, p.name)
    shape, strides = meta.shape, meta.strides
    if p.lead and lead is not None:
        cut = len(lead)
        token = _merged(shape[:cut], strides[:cut])
        if token is None:
            hint = "Make it contiguous (.contiguous(), numpy.ascontiguousarray)."
            expected = f"leading axes {list(shape[:cut])} that fold into one stride"
            raise LayoutError(explain(spec.name, name, expected, f"strides {list(strides)}", hint))
        shape, strides = (math.prod(shape[:cut]), *shape[cut:]), (token, *strides[cut:])
    packed = 1
    loose: list[int] = []
    names = p.axes if isinstance(p.axes, tuple) else ("?",) * len(shape)
    for axis, size, stride in reversed(list(zip(names, shape, strides, strict=True))):
        if size <= 1:
            loose.append(0)
            continue
        if axis not in p.strides and stride != packed and 0 not in shape:
            free = ", ".join(p.strides) or "none"
            hint = f"Axes that may have any stride: {free}. Make {name} contiguous, or slice other axes."
            raise LayoutError(explain(spec.name, name, f"stride {packed} on axis {axis}", f"{stride}", hint))
        loose.append(stride)
        packed = packed * size
    flat = tuple(reversed(loose))
    itemsize = BY_NAME[meta.dtype].itemsize
    if address % itemsize and meta.device[0] == "cuda":
        got = f"address {address:#x}"
        raise LayoutError(explain(spec.name, name, f"an address that is a multiple of {itemsize} bytes", got, "Copy it to its own array."))
    return flat, alignment(address, [s * itemsize for s in flat[:-1]])


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one stride with which the leading axes can be walked, or None."""
    pairs = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if not pairs or 0 in shape:
        return 0
    for (_, outer), (n, inner) in itertools.pairwise(pairs):
        if outer != n * inner:
            return None
    return pairs[-1][1]


def alignment(address: int, byte_strides: list[int]) -> int:
    """The largest power of two up to 16 that divides the address and every stride."""
    bits = address | 16
    for s in byte_strides:
        bits |= abs(s)
    return bits & -bits


# ---- outputs, overlap -------------------------------------------------------------------------------------------


def out_shape(spec: OpSpec, o: Out, bound: Bound, lead: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape the caller sees: the leading shape restored."""
    if callable(o.axes):
        return o.axes(bound)
    sizes = tuple(size_of(e, bound.axes) for e in o.axes)
    return (*lead, *sizes[1:]) if o.lead and lead is not None else sizes


def out_dtype(o: Out, bound: Bound) -> str:
    """The dtype name of an output."""
    if callable(o.dtype):
        return o.dtype(bound)
    return bound.dtypes[o.dtype[1:]] if o.dtype.startswith("=") else o.dtype


def lead_of(spec: OpSpec, metas: Mapping[str, Meta]) -> tuple[int, ...] | None:
    """The leading shape of the call, or None where the op has none."""
    for p in spec.args:
        if p.lead and p.name in metas:
            return metas[p.name].shape[: len(metas[p.name].shape) - (len(p.axes) - 1)]
    return None


def _outputs(spec: OpSpec, bound: Bound, metas: Mapping[str, Meta], lead: tuple[int, ...] | None, addresses: Mapping[str, int]) -> None:
    """Check caller-supplied outputs and add every output's facts to `bound`."""
    dtypes: Any = bound.dtypes
    strides: Any = bound.strides
    aligned: Any = bound.aligned
    for p in spec.args:
        if p.mutated and p.name in metas:
            _writable(spec, p.name, metas[p.name])
    for o in spec.outputs:
        wanted = o.when is None or o.when(bound)
        meta = metas.get(o.name)
        if meta is None:
            if wanted and o.allocate:
                shape = out_shape(spec, o, bound, lead)
                dtypes[o.name] = out_dtype(o, bound)
                fresh = Meta(shape, row_major(shape), dtypes[o.name], bound.device)
                strides[o.name], aligned[o.name] = layout(spec, o, fresh, lead, 0)
            continue
        if not wanted:
            raise ArgumentError(explain(spec.name, _keyword(spec, o.name), "None in this mode", "an array", f"{o.name} is not produced."))
        shape, dtype = out_shape(spec, o, bound, lead), out_dtype(o, bound)
        keyword = _keyword(spec, o.name)
        if meta.shape != shape:
            raise ShapeError(explain(spec.name, keyword, f"shape {list(shape)}", f"{list(meta.shape)}", f"{keyword} is {_pattern(o)}."))
        if meta.dtype != dtype:
            raise DtypeError(explain(spec.name, keyword, dtype, meta.dtype, f"Allocate {keyword} with that dtype."))
        _writable(spec, keyword, meta)
        dtypes[o.name] = dtype
        strides[o.name], aligned[o.name] = layout(spec, o, meta, lead, addresses[o.name])


def _writable(spec: OpSpec, name: str, meta: Meta) -> None:
    if meta.readonly:
        raise LayoutError(explain(spec.name, name, "a writable array", "a read-only one", "Copy it first."))
    if overlap.covers_itself(meta.shape, meta.strides):
        got = f"shape {list(meta.shape)} with strides {list(meta.strides)}"
        raise LayoutError(explain(spec.name, name, "an array whose elements do not overlap", got, "Make it contiguous."))


def check_overlap(spec: OpSpec, written: str, other: str, a: tuple[int, Meta], b: tuple[int, Meta]) -> None:
    """Raise LayoutError where a written array shares an element with another array of the call.

    An output may *be* an input its spec lists as alias (same address, shape and strides): an update in place.
    """
    (pa, ma), (pb, mb) = a, b
    out = next((o for o in spec.outputs if o.name == written), None)
    if out is not None and other in out.alias and (pa, ma.shape, ma.strides) == (pb, mb.shape, mb.strides):
        return
    if overlap.shared((pa, ma.shape, ma.strides, BY_NAME[ma.dtype].itemsize), (pb, mb.shape, mb.strides, BY_NAME[mb.dtype].itemsize)):
        names = f"{_keyword(spec, written)} and {_keyword(spec, other)}"
        allowed = f" (only out={' or '.join(out.alias)} itself may be updated in place)" if out is not None and out.alias else ""
        raise LayoutError(explain(spec.name, names, f"arrays that share no element{allowed}", "two that overlap", "Pass a separate buffer."))
