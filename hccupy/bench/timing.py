"""How a kernel is timed: a CUDA graph of many calls over buffers larger than L2, replayed; the median replay over the calls.

Warm buffers flatter short kernels (everything sits in L2), so weights and activations rotate over COLD_BYTES.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import arch, build, cuda
from ..plan import Plan
from ..spec import Launch, ceil_div

COLD_BYTES = 320 << 20  # over five times the H200's 60 MB L2
MOST_SETS = 512
REPLAYS = 21
GRAPH_US = 2000.0  # calls of a graph: a replay costs 3 to 4 us beside them (H200, RoPE at 4096 rows: 46.5 us a call by a graph of 2, 44.4 by one of 64)
WARM_SECONDS = 0.1  # the first op measured showed 2 us too much after 50 calls


def sets_for(touched: int) -> int:
    """How many buffer sets of `touched` bytes make a rotation cold."""
    return max(2, min(MOST_SETS, ceil_div(COLD_BYTES, max(touched, 1))))


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> dict[str, float]:
    """Microseconds a call: p20, p50, p80 over the replays of one graph holding every call, in as many rounds as fill GRAPH_US; how many calls that was."""
    import torch

    for call in calls[:2]:
        call()  # plans, kernels and allocators are warm before the capture
    torch.cuda.synchronize()
    began = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    taken = (time.perf_counter() - began) * 1e6
    calls = [*calls] * max(1, round(GRAPH_US / taken))
    graph = torch.cuda.CUDAGraph()
    keep = []
    with torch.cuda.graph(graph):
        for call in calls:
            keep.append(call())
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / len(calls) for start, end in events)
    del keep
    pick = [times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8)]
    return {"us": pick[1], "us_p20": pick[0], "us_p80": pick[2], "calls": len(calls)}


def host_us(call: Callable[[], Any], calls: int = 1000, rounds: int = 9) -> float:
    """Host microseconds a call: the fastest round's mean, the queue never full (the device is idle again each round)."""
    import torch

    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        call()
    means = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return min(means)


def ceilings() -> dict[str, float]:
    """Measured TB/s of plain streaming kernels: read, read4write1, copy, read5write4 (post), read5write5 (post_pre)."""
    import torch

    device = torch.cuda.current_device()
    here = arch.of_device(device)
    found = {}
    for name, reads, writes in (("read", 1, 0), ("read4write1", 4, 1), ("copy", 1, 1), ("read5write4", 5, 4), ("read5write5", 5, 5)):
        count = (1 << 31) // (reads + writes) // 16 // 768 * 768  # whole rows of ceiling.cu; half of it reads 1 % less, its tail
        launch = Launch((ceil_div(count, 256), 1, 1), (256, 1, 1))
        plan = Plan("ceiling", name, "ceiling.cu", "ceiling", here, {"kReads": reads, "kWrites": writes}, launch)
        kernel = build.function(plan, device)
        source = torch.randint(-(2**31), 2**31 - 1, (reads, count * 4), dtype=torch.int32, device="cuda")
        target = torch.empty(max(writes, 1), count * 4, dtype=torch.int32, device="cuda")
        times = []
        with cuda.on_stream(torch.cuda.current_stream().cuda_stream):
            for _ in range(12):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(4):
                    kernel(launch.grid, launch.block, (source.data_ptr(), target.data_ptr(), count))
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 4)
        found[name] = (reads + writes) * count * 16 / statistics.median(times[2:]) / 1e9
        del source, target
    return found
