"""JAX: every op as a traceable function, eager or under jax.jit, on CUDA and on the CPU.

Calls go through jax.experimental.buffer_callback: JAX allocates the results, hands over their buffers and its stream, and
the pipeline's own plan, kernel and reference do the rest. Mutated caches are inputs aliased to results: donate them
(jax.jit(..., donate_argnums=...)) and no copy is made. vmap runs the elements one after the other; a gradient is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from . import arch, check, cuda, launch, plan, switches
from .arrays import Meta, row_major, view
from .dtypes import BY_NAME
from .errors import ArgumentError, FrameworkError, explain
from .frameworks import dlpack_
from .ops import get
from .spec import Arg, Bound, OpSpec


def on_cuda(spec: OpSpec, given: Sequence[Any]) -> bool:
    """Is the first array (a tracer counts by the default backend) on a GPU?"""
    name, array = next((p.name, v) for p, v in zip(spec.params, given, strict=True) if isinstance(p, Arg))
    if isinstance(array, jax.core.Tracer):
        return str(jax.default_backend()) == "gpu"
    return view(spec.name, name, array)[1].device[0] == "cuda"


def concrete(given: Sequence[Any]) -> bool:
    """Is no argument a tracer of jit?"""
    return not any(isinstance(v, jax.core.Tracer) for v in given)


def run(spec: OpSpec, given: Sequence[Any]) -> Any:
    """An op on JAX arrays, eager or traced. Returns the outputs, then the updated caches.

    Raises the op's argument errors.
    """
    arrays, scalars, present = [], [], []
    for p, value in zip(spec.params, given, strict=True):
        if isinstance(p, Arg):
            present.append(value is not None)
            if value is not None:
                if not isinstance(value, jax.Array):
                    raise FrameworkError(
                        explain(spec.name, p.name, "a JAX array like the first argument", type(value).__name__, "Convert it with jnp.asarray.")
                    )
                arrays.append(value)
        else:
            scalars.append(check.scalar(spec, p, value))
    if spec.debug is not None and concrete(given) and switches.on("HCCUPY_DEBUG"):
        _debug(spec, given)
    results = _jitted(spec.name, tuple(present), tuple(scalars))(*arrays)
    return results[0] if len(results) == 1 else tuple(results)


def refuse_outs(spec: OpSpec, outs: Sequence[Any]) -> None:
    """JAX arrays cannot be written: an `out=` is an error."""
    for o, value in zip(spec.outputs, outs, strict=True):
        if value is not None:
            raise ArgumentError(explain(spec.name, o.keyword or o.name, "None with JAX arrays", "an array", "JAX arrays are immutable: use the returned ones."))


def _debug(spec: OpSpec, given: Sequence[Any]) -> None:
    """HCCUPY_DEBUG=1: look at the metadata on the host first. Inside jax.jit there are no values to look at."""
    metas = {p.name: view(spec.name, p.name, v)[1] for p, v in zip(spec.params, given, strict=True) if isinstance(p, Arg) and v is not None}
    scalars = {p.name: v for p, v in zip(spec.params, given, strict=True) if not isinstance(p, Arg)}
    bound = check.bind(spec, metas, scalars, "jax", dict.fromkeys(metas, 0))
    b = SimpleNamespace(axes=bound.axes, **bound.scalars, **{a.name: None for a in spec.arrays})
    for p, value in zip(spec.params, given, strict=True):
        if p.name in metas and metas[p.name].dtype in ("int32", "int64"):
            setattr(b, p.name, np.asarray(value))
    if spec.debug is not None:
        spec.debug(b)


@lru_cache(maxsize=4096)
def _jitted(name: str, present: tuple[bool, ...], scalars: tuple[Any, ...]) -> Any:
    traced = jax.custom_jvp(partial(_traced, get(name), present, scalars))

    def refuse(primals: Any, tangents: Any) -> Any:
        mend = "No gradient flows through hccupy's ops: give them jax.lax.stop_gradient(...) of what is differentiated."
        raise ArgumentError(explain(name, "gradient", "a call that is not differentiated", "one under jax.grad or jax.jvp", mend))

    traced.defjvp(refuse)
    return jax.jit(traced)


def _traced(spec: OpSpec, present: tuple[bool, ...], scalars: tuple[Any, ...], *arrays: Any) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    names = [p.name for p, there in zip(spec.args, present, strict=True) if there]
    metas = {n: Meta(tuple(a.shape), row_major(a.shape), np.dtype(a.dtype).name, ("cuda", 0)) for n, a in zip(names, arrays, strict=True)}
    values = dict(zip((s.name for s in spec.scalars), scalars, strict=True))
    bound = check.bind(spec, metas, values, "jax", dict.fromkeys(metas, 0))
    lead = check.lead_of(spec, metas)
    shapes: list[Any] = []
    made = [o for o in spec.outputs if o.allocate and bound.has(o.name)]
    for o in made:
        shapes.append(jax.ShapeDtypeStruct(check.out_shape(spec, o, bound, lead), BY_NAME[bound.dtypes[o.name]].np))
    aliases = {}
    for p in spec.args:
        if p.mutated and p.name in metas:
            aliases[names.index(p.name)] = len(shapes)
            shapes.append(jax.ShapeDtypeStruct(metas[p.name].shape, BY_NAME[metas[p.name].dtype].np))
    order = names, [o.name for o in made], [p.name for p in spec.args if p.mutated and p.name in metas]
    callback = partial(_callback, spec, bound, order, _Launchers(spec, bound, lead))
    call = buffer_callback(callback, tuple(shapes), input_output_aliases=aliases, command_buffer_compatible=True, vmap_method="sequential")
    results = list(call(*arrays))
    heads = [results.pop(0) if o.name in order[1] else None for o in spec.outputs if o.allocate]
    return tuple(heads + results)


class _Launchers:
    """The kernel of a traced call, built at its first run on each device (XLA's warm-up run, before any capture)."""

    def __init__(self, spec: OpSpec, bound: Bound, lead: tuple[int, ...] | None) -> None:
        self.spec, self.bound, self.lead = spec, bound, lead or ()
        self.by_device: dict[int, launch.Start] = {}
        self.lock = threading.Lock()

    def on(self, device: int) -> launch.Start:
        """The launcher of `device`, which must be current."""
        with self.lock:
            if device not in self.by_device:
                made = plan.make(self.spec, self.bound, arch.of_device(device))
                self.by_device[device] = launch.launcher(self.spec, made, self.bound, device)
            return self.by_device[device]


def _callback(spec: OpSpec, bound: Bound, order: Any, launchers: _Launchers, ctx: Any, outs: Any, *args: Any) -> None:
    """What XLA calls: buffers in, results written in place. An aliased cache is its result buffer (XLA copied or donated it)."""
    names, made, mutated = order
    buffers = dict(zip(names, args, strict=True))
    buffers.update(zip([*made, *mutated], outs, strict=True))
    if not all(bound.axes[a] for a in spec.empty):
        return
    slots = [a.name for a in spec.arrays]
    kind = next(iter(buffers.values())).__dlpack_device__()[0]
    if int(kind) in dlpack_.CPU_KINDS:
        views: dict[str, Any] = {n: dlpack_.to_numpy(dlpack_.Foreign(buffers[n])) if n in buffers else None for n in slots}
        for a in spec.arrays:
            if a.lead and views[a.name] is not None:
                v = views[a.name]
                views[a.name] = v.reshape(bound.axes["tokens"], *v.shape[len(launchers.lead) :])
        spec.reference(SimpleNamespace(axes=bound.axes, **bound.scalars, **views))
        return
    pointers = [_pointer(buffers[n]) if n in buffers else 0 for n in slots]
    launchers.on(cuda.current_device())(pointers, ctx.stream)


def _pointer(buffer: Any) -> int:
    """Device address of a buffer; only the pointer is read, so no stream has to wait."""
    return int(dlpack_.Capsule(buffer.__dlpack__()).ptr)
