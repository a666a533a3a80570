"""Step 3: which kernel, built how, started how. Pure: no GPU is needed to make, print or test a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .arch import Arch
from .dtypes import BY_NAME
from .errors import ArgumentError, ShapeError, explain
from .spec import Bound, Launch, OpSpec, Variant

MOST_BLOCKS = 2**31 - 1  # CUDA's limit of grid.x


@dataclass(frozen=True)
class Plan:
    """One kernel launch, ready to build."""

    op: str
    variant: str
    source: str
    entry: str
    arch: Arch
    defines: Mapping[str, int]
    launch: Launch

    @property
    def flags(self) -> tuple[str, ...]:
        """The -D words, sorted, for the compiler and the cache key."""
        return tuple(f"-D{name}={value}" for name, value in sorted(self.defines.items()))


def camel(name: str) -> str:
    """kCamel of a spec name: q_norm_weight -> kQNormWeight."""
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def base_defines(spec: OpSpec, bound: Bound) -> dict[str, int]:
    """What every variant of an op is compiled with: baked axes, dtypes, presence, baked scalars."""
    defines = {camel(a.name): bound.axes[a.name] for a in spec.axes if a.baked}
    for array in spec.arrays:
        present = bound.has(array.name)
        defines[f"{camel(array.name)}Dtype"] = BY_NAME[bound.dtypes[array.name]].code if present else 0
        if getattr(array, "optional", False) or not getattr(array, "allocate", True) or getattr(array, "when", None):
            defines[f"kHas{camel(array.name)[1:]}"] = int(present)
    for s in spec.scalars:
        value = bound.scalars[s.name]
        if s.optional and s.presence:
            defines[f"kHas{camel(s.name)[1:]}"] = int(value is not None)
        if s.baked:
            defines[camel(s.name)] = s.choices.index(value) if s.kind == "choice" else int(value)
    return defines


def launch_of(v: Variant, bound: Bound, arch: Arch) -> tuple[Launch | None, str]:
    """(how a variant would be started, ""), or (None, why it cannot run this)."""
    ok, reason = v.when(bound, arch)
    if not ok:
        return None, reason
    launch = v.launch(bound, arch)
    if launch.cluster > 1 and not arch.clusters:
        return None, "needs thread-block clusters"
    return launch, ""


def candidates(spec: OpSpec, bound: Bound, arch: Arch) -> list[tuple[str, bool, str]]:
    """(variant, can it run this, why not) in order of preference."""
    found = [(v.name, *launch_of(v, bound, arch)) for v in spec.variants]
    return [(name, launch is not None, reason) for name, launch, reason in found]


def make(spec: OpSpec, bound: Bound, arch: Arch) -> Plan:
    """The Plan of the first variant that can run the call.

    Raises ArgumentError, with every variant's reason, where none can.
    """
    reasons = []
    for v in spec.variants:
        launch, reason = launch_of(v, bound, arch)
        if launch is not None:
            if launch.grid[0] > MOST_BLOCKS:
                got = f"{launch.grid[0]:,} blocks for {', '.join(f'{a.name} = {bound.axes[a.name]:,}' for a in spec.axes if not a.baked)}"
                raise ShapeError(explain(spec.name, "grid", f"at most {MOST_BLOCKS:,} blocks", got, "Split the call."))
            return Plan(spec.name, v.name, v.source, v.entry, arch, {**base_defines(spec, bound), **launch.defines}, launch)
        reasons.append(f"{v.name}: {reason}")
    raise ArgumentError(explain(spec.name, "variant", f"a kernel for {arch.name}", "none", "; ".join(reasons)))
