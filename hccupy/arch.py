"""GPU architectures: one row each. Numbers that differ between chips of one row are read off the device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

from . import switches
from .errors import ArgumentError, NoGpuError


@dataclass(frozen=True)
class Arch:
    """What plans may depend on."""

    name: str  # NVRTC's -arch word
    cc: tuple[int, int]
    sms: int  # multiprocessors
    smem: int  # bytes of shared memory one block may have (opt-in)
    blocks: int = 32  # that a multiprocessor holds
    clusters: bool = False  # thread-block clusters, programmatic dependent launch
    clusters_of_8: int = 0  # how many clusters of 8 (16) blocks with a multiprocessor each run at once: depends on the die
    clusters_of_16: int = 0
    ptx: bool = False  # newer than NVRTC: build PTX for `name`, let the driver finish

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Is this architecture that one or newer?"""
        return self.cc >= (major, minor)


TABLE = (
    Arch("sm_80", (8, 0), 108, 166912),
    Arch("sm_86", (8, 6), 84, 101376, blocks=16),
    Arch("sm_89", (8, 9), 142, 101376, blocks=24),
    Arch("sm_90a", (9, 0), 132, 232448, clusters=True, clusters_of_8=15, clusters_of_16=7),  # as seen on one H200
    Arch("sm_100a", (10, 0), 148, 232448, clusters=True),
    Arch("sm_103a", (10, 3), 148, 232448, clusters=True),
    Arch("sm_120a", (12, 0), 188, 101376, blocks=24, clusters=True),
)
BY_NAME = {a.name: a for a in TABLE}


def named(name: str) -> Arch:
    """The row of that name; "90a" and "sm_90" mean sm_90a."""
    word = name if name.startswith("sm_") else f"sm_{name}"
    found = BY_NAME.get(word) or BY_NAME.get(word + "a")
    if found is None:
        raise ArgumentError(f"arch: expected one of {', '.join(BY_NAME)}, got {name!r}.")
    return found


def from_capability(major: int, minor: int, supported: tuple[int, ...]) -> Arch:
    """The Arch of a compute capability, given the architectures that NVRTC knows (for example 90, 100, 120).

    Raises NoGpuError for devices older than sm_80 and for an NVRTC that cannot serve the device at all.
    """
    if (major, minor) < (8, 0):
        raise NoGpuError(f"hccupy: expected a GPU of compute capability 8.0 or newer, got {major}.{minor}.")
    rows = [a for a in TABLE if a.cc <= (major, minor) and a.cc[0] == major] or [TABLE[-1]]
    row = rows[-1]
    if major * 10 + minor in supported:
        exact = row.cc == (major, minor)
        return row if exact else replace(row, name=f"sm_{major * 10 + minor}", cc=(major, minor))
    older = [s for s in supported if s <= major * 10 + minor]
    if not older:
        raise NoGpuError(
            f"hccupy: GPU sm_{major * 10 + minor} is older than everything this NVRTC builds for {sorted(supported)}. Install an older nvidia-cuda-nvrtc wheel."
        )
    return replace(row, name=f"compute_{max(older)}", cc=(major, minor), ptx=True)


def of_device(index: int) -> Arch:
    """The Arch of CUDA device `index`, with its own multiprocessor count and shared memory size.

    Without clusters where HCCUPY_LAUNCH=rawkernel, which cannot start them: plans then choose kernels without.
    """
    row = _measured(index)
    return replace(row, clusters=False) if switches.rawkernel() else row


@cache
def _measured(index: int) -> Arch:
    from . import cuda  # here, because importing hccupy must not touch CUDA

    properties = cuda.device_properties(index)
    major, minor = properties["major"], properties["minor"]
    try:
        supported = cuda.nvrtc_archs()
    except NoGpuError:
        if not os.environ.get("HCCUPY_KERNEL_BUNDLE"):
            raise
        supported = (10 * major + minor,)  # no compiler is needed where a bundle serves
    row = from_capability(major, minor, supported)
    here = replace(row, sms=properties["sms"], smem=properties["smem"])
    if row.name != "sm_90a":
        return here
    from . import clusters

    return replace(here, clusters_of_8=clusters.resident(here, index, 8), clusters_of_16=clusters.resident(here, index, 16))
