"""The simulator finds what it promises to find: every fault here is put into a small kernel on purpose."""

from __future__ import annotations

import ctypes
import shutil

import ml_dtypes
import numpy as np
import pytest

from .simulator.sim import SCHEDULES, Simulated, SimulatorError, redzone_array

pytestmark = pytest.mark.skipif(any(shutil.which(tool) is None for tool in ("g++", "readelf", "addr2line")), reason="needs g++ and binutils")

SEEDS = range(2 * len(SCHEDULES))  # every schedule with two orders


@pytest.fixture
def compiled(tmp_path):
    """Compile kernel text; **options go to Simulated."""

    def build(text, entry="kernel", defines=None, **options):
        source = tmp_path / "kernel.cu"
        source.write_text(text)
        return Simulated(source, entry, defines, **options)

    return build


def raised(kernel, *args, **kwargs):
    """The text of the error, or "" when the launch went well."""
    try:
        kernel.launch(*args, **kwargs)
    except SimulatorError as error:
        return str(error)
    return ""


# ---- barriers and schedules ---------------------------------------------------------------------------------------

REDUCTION = """
#ifndef kFirst
#define kFirst __syncthreads()
#endif
#ifndef kSecond
#define kSecond __syncthreads()
#endif
// Two sums in a row through the same scratch: a barrier before reading it, and one before writing it again.
__device__ float block_sum(float value, float* scratch) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    kFirst;
    float sum = 0.0f;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += scratch[warp];
    return sum;
}
extern "C" __global__ void __launch_bounds__(256) kernel(const float* __restrict__ x, float* __restrict__ y, int width) {
    __shared__ float scratch[8];
    float value = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) value += x[static_cast<long long>(blockIdx.x) * width + i];
    const float sum = block_sum(value, scratch);
    kSecond;
    const float count = block_sum(1.0f, scratch);
    y[blockIdx.x * blockDim.x + threadIdx.x] = sum / count;
}
"""


def reduction_is_right(kernel, seed):
    x = redzone_array((3, 300), np.float32, np.arange(900).reshape(3, 300))
    y = redzone_array((3, 256), np.float32)
    kernel.launch(3, 256, 0, [x, y, 300], seed=seed)
    y.check()
    return np.array_equal(y, np.repeat(np.asarray(x).sum(1) / 256, 256).reshape(3, 256))


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("watch", [False, True])
def test_a_right_reduction_passes_everything(compiled, sanitize, watch):
    kernel = compiled(REDUCTION, sanitize=sanitize, watch=watch)
    assert all(reduction_is_right(kernel, seed) for seed in SEEDS)


@pytest.mark.parametrize("missing", ["kFirst", "kSecond"])
def test_a_missing_barrier_shows_under_some_schedule(compiled, missing):
    kernel = compiled(REDUCTION, defines={missing: "(void)0"})
    assert not all(reduction_is_right(kernel, seed) for seed in SEEDS)


@pytest.mark.parametrize("missing", ["kFirst", "kSecond"])
@pytest.mark.parametrize("seed", range(len(SCHEDULES)))
def test_a_missing_barrier_is_a_race_under_every_schedule(compiled, missing, seed):
    kernel = compiled(REDUCTION, defines={missing: "(void)0"}, watch=True)
    with pytest.raises(SimulatorError, match=r"race: byte \d+ of static shared memory at .*kernel.cu:\d+"):
        reduction_is_right(kernel, seed)


def test_a_barrier_does_not_wait_for_threads_that_returned(compiled):
    kernel = compiled("""
        extern "C" __global__ void kernel(int* y) {
            if (threadIdx.x >= 40) return;
            const int here = __syncthreads_count(threadIdx.x < 3);
            y[threadIdx.x] = here + 10 * __syncthreads_or(threadIdx.x == 7) + 100 * __syncthreads_and(threadIdx.x < 40);
        }""")
    y = redzone_array(40, np.int32)
    for seed in SEEDS:
        kernel.launch(1, 64, 0, [y], seed=seed)
        assert (y == 113).all()


def test_a_deadlock_names_who_waits_where(compiled):
    kernel = compiled("""extern "C" __global__ void kernel() {
            if (threadIdx.x < 16) __syncthreads();
            else __syncwarp();
        }""")
    error = raised(kernel, 1, 32)
    assert "deadlock" in error and "thread (0, 0, 0) waits at" in error and "kernel.cu:2 for the block" in error
    assert "thread (16, 0, 0) waits at" in error and "kernel.cu:3 with mask 0xffffffff" in error


def test_lanes_of_a_warp_at_different_barriers(compiled):
    kernel = compiled("""extern "C" __global__ void kernel() {
            if (threadIdx.x < 16) __syncthreads();
            else
                __syncthreads();
        }""")
    assert "lanes of one warp meet at different barriers" in raised(kernel, 1, 32)


def test_lanes_of_a_warp_at_different_operations(compiled):
    kernel = compiled("""extern "C" __global__ void kernel() {
            if (threadIdx.x < 16) __syncwarp();
            else __ballot_sync(0xffffffffu, 1);
        }""")
    assert "lanes of one warp meet at different operations" in raised(kernel, 1, 32)


def test_every_schedule_is_another_order_and_repeats(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(int* next, int* order) {
            order[atomicAdd(next, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
        }""")
    orders = {}
    for _ in range(2):
        for schedule in SCHEDULES:
            order = redzone_array(256, np.int32)
            kernel.launch(4, 64, 0, [redzone_array(1, np.int32, 0), order], seed=3, schedule=schedule)
            assert sorted(order) == list(range(256))
            assert np.array_equal(orders.setdefault(schedule, order), order)
    assert len({order.tobytes() for order in orders.values()}) == len(SCHEDULES)
    assert list(orders["forward"]) == list(range(256))
    assert list(orders["reverse"]) == list(range(255, -1, -1))


# ---- warps --------------------------------------------------------------------------------------------------------


def test_shuffles_and_votes(compiled):
    kernel = compiled("""
        extern "C" __global__ void kernel(int* i, float* f, long long* l, unsigned* v) {
            const int t = threadIdx.x;
            i[t] = __shfl_xor_sync(0xffffffffu, t, 5);
            i[32 + t] = __shfl_sync(0xffffffffu, t, 3, 8);
            f[t] = __shfl_down_sync(0xffffffffu, 0.5f * t, 4);
            f[32 + t] = __shfl_up_sync(0xffffffffu, 0.5f * t, 4, 16);
            l[t] = __shfl_sync(0xffffffffu, (static_cast<long long>(t) << 40) + 1, 31 - t);
            v[t] = __ballot_sync(0xffffffffu, t % 3 == 0);
            v[32 + t] = __any_sync(0xffffffffu, t == 9) + 2 * __all_sync(0xffffffffu, t != 9) + 4 * (__activemask() == ~0u);
            // Two halves of a warp, each on its own.
            if (t < 16) for (int k = 0; k < 3; ++k) i[64 + t] = __shfl_xor_sync(0x0000ffffu, t + k, 1);
            else i[64 + t] = __shfl_xor_sync(0xffff0000u, t, 1);
        }""")
    t = np.arange(32)
    for seed in SEEDS:
        i, f = redzone_array(96, np.int32), redzone_array(64, np.float32)
        long, v = redzone_array(32, np.int64), redzone_array(64, np.uint32)
        kernel.launch(1, 32, 0, [i, f, long, v], seed=seed)
        assert np.array_equal(i[:32], t ^ 5) and np.array_equal(i[32:64], t // 8 * 8 + 3)
        assert np.array_equal(f[:32], np.where(t < 28, t + 4, t) / 2)
        assert np.array_equal(f[32:], np.where(t % 16 >= 4, t - 4, t) / 2)
        assert np.array_equal(long, ((31 - t).astype(np.int64) << 40) + 1)
        assert (v[:32] == sum(1 << k for k in range(0, 32, 3))).all() and (v[32:] == 5).all()
        assert np.array_equal(i[64:], (t ^ 1) + np.where(t < 16, 2, 0))


def test_the_mask_must_name_the_caller(compiled):
    kernel = compiled('extern "C" __global__ void kernel() { __shfl_xor_sync(0xffffu, 1, 1); }')
    assert "the mask 0x0000ffff does not name the calling lane" in raised(kernel, 1, 32)


def test_a_lane_that_returned_gives_poison(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(float* y) {
            if (threadIdx.x >= 16) return;
            y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 16);
        }""")
    y = redzone_array(16, np.float32, 0)
    kernel.launch(1, 32, 0, [y])
    assert np.isnan(y).all()


def test_shuffles_do_not_order_memory(compiled):
    text = """extern "C" __global__ void kernel(int* y) {
            __shared__ int a[32];
            a[threadIdx.x] = threadIdx.x;
            ORDER;
            y[threadIdx.x] = a[threadIdx.x ^ 1];
        }"""
    y = redzone_array(32, np.int32)
    compiled(text, defines={"ORDER": "__syncwarp()"}, watch=True).launch(1, 32, 0, [y])
    assert "race" in raised(compiled(text, defines={"ORDER": "__shfl_sync(~0u,0,0)"}, watch=True), 1, 32, 0, [y])


# ---- memory -------------------------------------------------------------------------------------------------------

DYNAMIC = """
namespace inner {
__device__ void fill(int limit) {
    extern __shared__ __align__(16) float local_name[];
    for (int i = threadIdx.x; i < limit; i += blockDim.x) local_name[i] = static_cast<float>(i);
}
}
extern __shared__ uint4 shared_bytes[];
extern "C" __global__ void kernel(float* y, int limit, int read) {
    inner::fill(limit);
    __syncthreads();
    const float* shared = reinterpret_cast<const float*>(shared_bytes);
    y[blockIdx.x * blockDim.x + threadIdx.x] = shared[read - threadIdx.x];
}
"""


def test_dynamic_shared_memory(compiled):
    kernel = compiled(DYNAMIC)
    y = redzone_array((2, 64), np.float32)
    kernel.launch(2, 64, 400, [y, 100, 99], seed=1)
    assert np.array_equal(y, [99 - np.arange(64)] * 2)
    kernel.launch(2, 64, 400, [y, 50, 99])  # each block begins with poison
    assert np.isnan(y[:, :50]).all() and not np.isnan(y[:, 50:]).any()
    assert "write past the end of dynamic shared memory: byte 400 of 400" in raised(kernel, 2, 64, 400, [y, 101, 99])
    assert "dynamic shared memory: at most" in raised(kernel, 1, 64, 233 * 1024, [y, 100, 99])
    watched = compiled(DYNAMIC, watch=True)
    assert "byte 400 of dynamic shared memory" in raised(watched, 2, 64, 400, [y, 100, 100])


OUTSIDE = """
extern "C" __global__ void kernel(const float* x, float* y, int rows, long long y_stride, int bug) {
    const int row = blockIdx.x, column = threadIdx.x;
    float value = x[row * 32 + column];
    if (bug == 1 && row == rows - 1) value += x[row * 32 + column + 1];
    y[row * y_stride + column] = value;
    if (bug == 2 && row == 0 && column == 0) y[-1] = 1.0f;
    if (bug == 3 && row == 0 && column == 0) y[(rows - 1) * y_stride + 33] = 1.0f;
    if (bug == 4 && row == 0 && column == 0) y[33] = 1.0f;
}
"""


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (2, "the first 4 bytes before the array"),
        (3, "the first 5 bytes past the end of the array"),
        (4, "the first in a gap, 132 bytes from the start of the array"),
    ],
)
def test_redzone_finds_writes_outside(compiled, bug, found):
    kernel = compiled(OUTSIDE)
    x = redzone_array((3, 32), np.float32, 1)
    y = redzone_array((3, 32), np.float32, strides=(40, 1))
    kernel.launch(3, 32, 0, [x, y, 3, 40, 0])
    y.check()
    assert (y == 1).all() and y.unwritten() == 0
    kernel.launch(3, 32, 0, [x, y, 3, 40, bug])
    with pytest.raises(AssertionError, match=found):
        y.check()


@pytest.mark.parametrize("bug", [1, 2, 3, 4])
def test_watch_finds_every_access_outside(compiled, bug):
    kernel = compiled(OUTSIDE, watch=True)
    x = np.ones((3, 32), np.float32)
    y = redzone_array((3, 32), np.float32, strides=(40, 1))
    kernel.launch(3, 32, 0, [x, y, 3, 40, 0])
    assert "out of bounds" in raised(kernel, 3, 32, 0, [x, y, 3, 40, bug])
    y.check()  # the access did not happen


def test_unwritten_elements_are_counted():
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int32, np.int64):
        y = redzone_array((4, 8), dtype, strides=(9, 1), shift=1)
        assert y.unwritten() == 32 and y.ctypes.data % 256 == y.itemsize
        y[1:] = 0
        assert y.unwritten() == 8
        y.check()
    assert np.isnan(redzone_array(4, ml_dtypes.bfloat16).astype(np.float32)).all()
    redzone_array((0, 8), np.float32).check()


def test_races_between_blocks_and_atomics(compiled):
    kernel = compiled(
        """
        extern "C" __global__ void kernel(float* y, unsigned* counter, int bug) {
            __shared__ bool last;
            if (threadIdx.x == 0) {
                y[bug == 1 ? 1 : 1 + blockIdx.x] = 1.0f;
                __threadfence();
                if (bug != 2 || blockIdx.x % 2) last = atomicAdd(counter, 1u) == gridDim.x - 1;
                else last = (*counter += 1) == gridDim.x;
            }
            __syncthreads();
            if (last && threadIdx.x == 0) {
                float sum = 0.0f;
                for (unsigned i = 0; i < gridDim.x; ++i) sum += y[1 + i];
                y[0] = sum;
            }
        }""",
        watch=True,
    )
    for seed in SEEDS:
        y = redzone_array(9, np.float32)
        kernel.launch(8, 64, 0, [y, redzone_array(1, np.uint32, 0), 0], seed=seed)
        assert y[0] == 8
    for bug in (1, 2):
        error = raised(kernel, 8, 64, 0, [redzone_array(9, np.float32), redzone_array(1, np.uint32, 0), bug], seed=1)
        assert "race" in error and "of another block" in error


def test_atomics(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(int* y, unsigned* u) {
            const int t = threadIdx.x;
            atomicAdd(y, 1); atomicMin(y + 1, t - 5); atomicMax(y + 2, t); atomicOr(u, 1u << t);
            if (atomicCAS(y + 3, 0, 7) == 0) atomicExch(y + 4, 9);
        }""")
    y, u = redzone_array(5, np.int32, 0), redzone_array(1, np.uint32, 0)
    kernel.launch(1, 32, 0, [y, u], seed=2)
    assert list(y) == [32, -5, 31, 7, 9] and u[0] == 0xFFFFFFFF


# ---- faults -------------------------------------------------------------------------------------------------------


def test_the_sanitizer_finds_what_a_gpu_would_wrap_or_refuse(compiled):
    text = """struct Pair { int a[2], b; };
        extern "C" __global__ void kernel(const float* x, float* y, int stride, int bug) {
            Pair pair = {};
            if (bug == 1) y[0] = x[static_cast<int>(threadIdx.x) * stride == 7 ? 1 : 0];
            if (bug == 2) *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(x + threadIdx.x);
            if (bug == 3) y[0] = static_cast<float>(pair.a[threadIdx.x]);
            if (bug == 4) y[0] = static_cast<float>(1 << threadIdx.x * stride);
        }"""
    kernel = compiled(text, sanitize=True)
    x, y = redzone_array(64, np.float32, 1), redzone_array(64, np.float32)
    kernel.launch(1, 32, 0, [x, y, 2**30, 0])
    assert "kernel.cu:4:" in raised(kernel, 1, 32, 0, [x, y, 2**30, 1])
    for bug, found in enumerate(["signed overflow in a multiplication", "misaligned access", "index outside the array", "shift by more bits"], 1):
        assert found in raised(kernel, 1, 32, 0, [x, y, 2**30 if bug == 1 else 2, bug])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("*static_cast<volatile int*>(nullptr) = 1;", "access through a null pointer"),
        ("*reinterpret_cast<volatile int*>(16ull << 40) = 1;", "not mapped"),
        ("volatile int zero = 0; zero = 7 / zero;", "division by zero"),
        ("__trap();", "__trap()"),
        ("volatile char big[200000]; big[0] = 1;", "of stack"),
        ("volatile int forever = 1; while (forever) {}", "time limit"),
        ("volatile int forever = 1; while (forever) __nanosleep(100);", "time limit"),
        ("__syncthreads(); if (threadIdx.x == 7) __trap();", "thread (7, 0, 0)"),
    ],
)
def test_a_fault_ends_the_launch_and_not_the_process(compiled, body, found):
    kernel = compiled(f'extern "C" __global__ void kernel() {{ if (threadIdx.x >= 7) {{ }} {body} }}')
    assert found in raised(kernel, 2, 32, seconds=0.2)
    good = compiled('extern "C" __global__ void good(int* y) { y[threadIdx.x] = 1; }', entry="good")
    y = redzone_array(32, np.int32)
    good.launch(1, 32, 0, [y])
    assert (y == 1).all()


def test_a_waiting_loop_lets_others_run(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(int* y) {
            __shared__ int flag;
            if (threadIdx.x == 0) flag = 0;
            __syncthreads();
            if (threadIdx.x == 1) while (atomicAdd(&flag, 0) == 0) __nanosleep(10);
            if (threadIdx.x == 33) atomicExch(&flag, 5);
            if (threadIdx.x == 1) y[0] = atomicAdd(&flag, 0);
        }""")
    for seed in SEEDS:
        y = redzone_array(1, np.int32)
        kernel.launch(1, 64, 0, [y], seed=seed)
        assert y[0] == 5


# ---- the interface ------------------------------------------------------------------------------------------------


PREVIOUS = """
#include "common/ptx.cuh"
extern "C" __global__ void kernel(const int* x, int stride, int* y) {
    int* to = y + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    const auto see = [x, stride] { return *static_cast<const volatile int*>(x + threadIdx.x % 3 * stride); };
    const int early = see();
    if (threadIdx.x >= 32) __syncthreads();  // others come later
    const int later = see();
    if (threadIdx.x < 32) __syncthreads();
    if (threadIdx.x != 5) hccupy::wait_for_previous_grid();
    else while (see() != 12) cuda_sim::yield();
    to[0] = early;
    to[1] = later;
    to[2] = see();
    to[3] = 0;
    if (kTrap && blockIdx.x == 1) __trap();
}"""


@pytest.mark.parametrize("watch", [False, True])
def test_the_previous_grid_ends_when_no_thread_can_go_on_without(compiled, watch):
    """Threads see the earlier elements up to there, in each block; what lies between them stays as it is."""
    kernel = compiled(PREVIOUS, defines={"kTrap": 0}, watch=watch)
    for seed in range(len(SCHEDULES)):
        whole = np.arange(20, 29, dtype=np.int32).reshape(3, 3)
        x, y = whole[:, 1], redzone_array((2, 64, 4), np.int32)
        x[...] = 10, 11, 12
        kernel.launch(2, 64, 0, [x, 3, y], seed=seed, previous=[(x, np.array([0, 1, 2], np.int32))])
        y.check()
        want = np.arange(64) % 3
        for k, first in enumerate((0, 0, 10)):
            assert np.array_equal(y[:, :, k], np.tile(want + first, (2, 1)))
        assert whole.tolist() == [[20, 10, 22], [23, 11, 25], [26, 12, 28]]


def test_arrays_are_real_again_whatever_happens(compiled):
    kernel = compiled(PREVIOUS, defines={"kTrap": 1})
    x, y = redzone_array(3, np.int32, [10, 11, 12]), redzone_array((2, 64, 4), np.int32)
    earlier = np.array([0, 1, 2], np.int32)
    with pytest.raises(SimulatorError, match="trap"):
        kernel.launch(2, 64, 0, [x, 1, y], previous=[(x, earlier)])
    assert list(x) == [10, 11, 12]
    with pytest.raises(SimulatorError, match="cannot have been"):
        kernel.launch(2, 64, 0, [x, 1, y], previous=[(x, earlier[:2])])
    with pytest.raises(SimulatorError, match="no parameter"):
        kernel.launch(2, 64, 0, [x, 1, y], previous=[(earlier, earlier)])


def test_a_build_error_carries_the_compiler_log(compiled):
    with pytest.raises(SimulatorError, match=r"kernel.cu:1:.*nonsense"):
        compiled('extern "C" __global__ void kernel() { nonsense(); }')


def test_system_headers_are_not_there(compiled):
    with pytest.raises(SimulatorError, match="printf"):
        compiled('extern "C" __global__ void kernel() { printf("no"); }')


def test_dims_and_indices(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(int* y) {
            const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
            y[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
        }""")
    y = redzone_array((2 * 3 * 2, 4 * 3 * 5), np.int32)
    for seed in SEEDS:
        y[...] = 0
        kernel.launch((2, 3, 2), (4, 3, 5), 0, [y], seed=seed)
        assert np.array_equal(y, np.add.outer(np.arange(12) * 1000, np.arange(60)))
    for grid, block in ((0, 1), ((1, 65536), 1), (1, 1025), (1, (32, 33))):
        with pytest.raises(SimulatorError, match=r"grid|block"):
            kernel.launch(grid, block, 0, [y])


def test_parameters_are_checked_against_the_kernel(compiled):
    kernel = compiled("""struct Three { int a, b, c; };
        extern "C" __global__ void kernel(int* y, long long stride, float eps, const Three three, unsigned char small) {
            y[0] = static_cast<int>(stride + eps) + three.c + small;
        }""")
    assert kernel.params == [("p", 8), ("i", 8), ("f", 4), ("s", 12), ("u", 1)]

    class Three(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int) for name in "abc"]

    y = redzone_array(1, np.int32)
    kernel.launch(1, 1, 0, [y, 2**33 - 2**33 + 40, 2.0, Three(1, 2, 3), 5])
    assert y[0] == 50
    pointer = ctypes.c_void_p(y.ctypes.data)
    kernel.launch(1, 1, 0, [pointer, ctypes.c_longlong(1), ctypes.c_float(1), Three(1, 2, 3), ctypes.c_ubyte(0)])
    assert y[0] == 5
    good = [y, 1, 1.0, Three(1, 2, 3), 5]
    for index, wrong in ((0, 1), (1, y), (1, ctypes.c_int(1)), (2, None), (3, 1), (4, 256)):
        with pytest.raises(SimulatorError, match=f"parameter {index}"):
            kernel.launch(1, 1, 0, [*good[:index], wrong, *good[index + 1 :]])
    with pytest.raises(SimulatorError, match="takes 5 parameters, got 4"):
        kernel.launch(1, 1, 0, good[:4])


def test_arithmetic_follows_cuda(compiled):
    kernel = compiled("""extern "C" __global__ void kernel(float* f, int* i) {
            f[0] = fmaf(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, -1.0f);  // one rounding
            f[1] = (1.0f + 0x1p-12f) * (1.0f + 0x1p-12f) - 1.0f;   // two: nothing is contracted
            f[2] = rsqrtf(4.0f); f[3] = 0x1p-149f * 1.0f; f[4] = fmaxf(__uint_as_float(0x7fc00000u), 2.0f);
            f[5] = max(1.0f, 2.0f); f[6] = __saturatef(-1.0f);
            i[0] = __float2int_rn(2.5f); i[1] = __float2int_rn(1e20f); i[2] = __float2int_rn(f[4] / 0.0f - f[4] / 0.0f);
            i[3] = __clz(1); i[4] = __ffs(8); i[5] = __popc(0xf0u); i[6] = __byte_perm(0x33221100u, 0x77665544u, 0x7530u);
            i[7] = min(3, 5);
        }""")
    f, i = redzone_array(7, np.float32), redzone_array(8, np.int32)
    kernel.launch(1, 1, 0, [f, i])
    one = np.float32(1 + 2**-12)
    expected = [2**-11 + 2**-24, one * one - np.float32(1), 0.5, 2.0**-149, 2, 2, 0]
    assert np.array_equal(f, np.array(expected, np.float32)) and f[0] != f[1]
    assert list(i) == [2, 2**31 - 1, 0, 31, 4, 4, 0x77553300, 3]
