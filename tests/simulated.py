"""Run an op's real kernel in the CPU simulator: the plan of the pipeline, the parameter order of launch.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hccupy import arch, check, launch, plan
from hccupy.dtypes import BY_NAME
from hccupy.frameworks import numpy_
from hccupy.ops import REGISTRY
from hccupy.spec import OpSpec

from .adapters import Adapter, _whole
from .simulator.sim import KERNELS, RedzoneArray, Simulated, redzone_array


def simulate(
    spec: OpSpec,
    given: dict[str, Any],
    seed: int = 0,
    arch_name: str = "sm_80",
    kernels: Path = KERNELS,
    previous: dict[str, np.ndarray] | None = None,
    **build: bool,
) -> tuple[Any, ...]:
    """Results of the kernel that a GPU of `arch_name` would run; caches in `given` are written in place.

    Outputs lie in red zones and start as NaN: a stray write, an unwritten element or a deadlock raises.
    `previous`: what arguments that are only read hold until the grid before this one has ended.
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
    if all(bound.axes[a] for a in spec.empty):
        made = plan.make(spec, bound, arch.named(arch_name))
        kernel = Simulated(kernels / made.source, made.entry, dict(made.defines), **build)
        slots = [{**arrays, **outs}.get(a.name) for a in (*spec.args, *spec.outputs)]
        start = made.launch
        assert not any(a.mutated and a.name in (previous or {}) for a in spec.args), "the kernel writes it"
        earlier = [(arrays[name], old) for name, old in (previous or {}).items()]
        kernel.launch(start.grid, start.block, start.smem, [*slots, *launch.values(spec, bound)], seed=seed, previous=earlier)
    for a in (*arrays.values(), *outs.values()):
        if getattr(a, "_zone", None) is not None:
            a.check()
    results = []
    for o in spec.outputs:
        if o.allocate:
            a = outs.get(o.name)
            if a is not None and hasattr(a, "unwritten") and a.dtype.itemsize > 1:  # any byte is a valid e4m3 code: there the comparison of values has to tell
                assert a.unwritten() == 0, f"{spec.name}: {o.name} has elements that were not written"
            results.append(None if a is None else np.asarray(a))
    return tuple(results)


@dataclass(frozen=True)
class SimulatedAdapter(Adapter):
    """NumPy arrays, between red zones, on a GPU of `arch_name` that the simulator plays."""

    name: str = "numpy"
    device: str = "simulated"
    arch_name: str = "sm_80"
    seed: int = 1
    build: dict[str, bool] = field(default_factory=dict)

    def put(self, a: Any) -> Any:
        """A copy between red zones, with the same strides; what lies in one already stays."""
        if not isinstance(a, np.ndarray) or isinstance(a, RedzoneArray) or a.nbytes > 1 << 20:  # zones of large tables take seconds
            return a
        if a.size == 0 or a.flags.c_contiguous:
            return redzone_array(a.shape, a.dtype, a)
        whole, offset = _whole(a)
        zoned = redzone_array(whole.shape, whole.dtype, whole)
        return np.lib.stride_tricks.as_strided(zoned[offset:], a.shape, a.strides, subok=True)

    def op(self, name: str) -> Callable[..., Any]:
        """The op, run by its kernel."""
        spec = REGISTRY[name]

        def run(**given: Any) -> Any:
            results = simulate(spec, given, self.seed, self.arch_name, **self.build)
            return results[0] if len(results) == 1 else results or None

        return run
