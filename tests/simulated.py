"""Run an op's real kernel in the CPU simulator: the plan of the pipeline, the parameter order of launch.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from hccupy import arch, check, launch, plan
from hccupy.dtypes import BY_NAME
from hccupy.frameworks import numpy_
from hccupy.spec import OpSpec

from .simulator.sim import Simulated, redzone_array


def simulate(spec: OpSpec, given: dict[str, Any], seed: int = 0, arch_name: str = "sm_80", **build: bool) -> tuple[Any, ...]:
    """Results of the kernel that a GPU of `arch_name` would run; caches in `given` are written in place.

    Outputs lie in red zones and start as NaN: a stray write, an unwritten element or a deadlock raises.
    """
    scalars = {s.name: given.get(s.name, s.default) for s in spec.scalars}
    arrays = {p.name: given[p.name] for p in spec.args if given.get(p.name) is not None}
    outs = {o.name: given[o.keyword] for o in spec.outputs if o.keyword and given.get(o.keyword) is not None}
    metas = {n: numpy_.meta(a) for n, a in {**arrays, **outs}.items()}
    addresses = {n: a.ctypes.data for n, a in {**arrays, **outs}.items()}
    bound = check.bind(spec, metas, scalars, "numpy", addresses | dict.fromkeys({a.name for a in (*spec.args, *spec.outputs)} - metas.keys(), 0))
    lead = check.lead_of(spec, metas)
    for o in spec.outputs:
        if o.name not in outs and bound.has(o.name):
            outs[o.name] = redzone_array(check.out_shape(spec, o, bound, lead), BY_NAME[bound.dtypes[o.name]].np)
    made = plan.make(spec, bound, arch.named(arch_name))
    kernel = Simulated(made.source, made.entry, dict(made.defines), **build)
    slots = [{**arrays, **outs}.get(a.name) for a in (*spec.args, *spec.outputs)]
    start = made.launch
    kernel.launch(start.grid, start.block, start.smem, [*slots, *launch.values(spec, bound)], seed=seed)
    results = []
    for o in spec.outputs:
        if o.allocate:
            a = outs.get(o.name)
            if a is not None and hasattr(a, "check"):
                a.check()
                if a.dtype.itemsize > 1:  # any byte is a valid e4m3 code: there the comparison of values has to tell
                    assert a.unwritten() == 0, f"{spec.name}: {o.name} has elements that were not written"
            results.append(None if a is None else np.asarray(a))
    return tuple(results)
