"""How many thread-block clusters a GPU runs at once when each block takes a multiprocessor. Dies differ: ask, never assume."""

from __future__ import annotations

import ctypes

from . import build, cuda
from .arch import Arch
from .plan import Plan
from .spec import Launch


def probe(arch: Arch, size: int) -> Plan:
    """The kernel that is asked about; bundles hold it too."""
    launch = Launch((size, 1, 1), (256, 1, 1), arch.smem - 8192, cluster=size)
    return Plan("clusters", "probe", "ceiling.cu", "ceiling", arch, {"kReads": 1, "kWrites": 1}, launch)


def resident(arch: Arch, device: int, size: int) -> int:
    """Clusters of `size` blocks, each with nearly all shared memory of a multiprocessor; 0 where none fits.

    The device must be current.
    """
    plan = probe(arch, size)
    function = build.function(plan, device).kernel.ptr
    config = cuda.launch_config(plan.launch)
    count = ctypes.c_int(0)
    code = cuda.driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config))
    return count.value if code == 0 else 0
