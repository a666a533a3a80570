// One small kernel for each kind of function in common/ptx.cuh and common/sm90_ptx.cuh that has a portable twin: run in
// the simulator it shows the twin, on a GPU the instruction (test_ptx_twins.py).

#include "common/sm90_ptx.cuh"

namespace {
__device__ __forceinline__ int thread_of_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }
}  // namespace

// Six conversions of each float, with its neighbour for the pairs.
extern "C" __global__ void narrow(const unsigned int* in, unsigned int* out, int n) {
  using namespace hccupy;
  const int i = thread_of_grid();
  if (i >= n) return;
  float value = float_from_bits(in[i]);
  const float other = float_from_bits(in[(i + 1) % n]);
  settle(value);
  unsigned int* to = out + 6 * static_cast<long long>(i);
  to[0] = float_to_bf16(value);
  to[1] = float_to_f16(value);
  to[2] = float_to_e4m3(value);
  to[3] = floats_to_bf16x2(value, other);
  to[4] = floats_to_f16x2(value, other);
  to[5] = floats_to_e4m3x2(value, other);
}

extern "C" __global__ void widen(unsigned int* out) {
  using namespace hccupy;
  const unsigned int bits = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned int* to = out + 3 * bits;
  to[0] = float_bits(bf16_to_float(static_cast<unsigned short>(bits)));
  to[1] = float_bits(f16_to_float(static_cast<unsigned short>(bits)));
  to[2] = float_bits(e4m3_to_float(static_cast<unsigned char>(bits)));
}

extern "C" __global__ void inverse(const float* in, float* out, int n) {
  const int i = thread_of_grid();
  if (i < n) out[i] = hccupy::fast_reciprocal(in[i]);
}

// 64 bytes a thread, by words of each size, loaded and stored in each way.
template <typename Word>
__device__ void move(const char* in, char* out) {
  using namespace hccupy;
  const Word* from = reinterpret_cast<const Word*>(in) + thread_of_grid();
  Word* to = reinterpret_cast<Word*>(out) + thread_of_grid();
  const int apart = static_cast<int>(gridDim.x * blockDim.x);
  const Word once = load_once(from);
  const Word shared = load_shared(from + apart);
  store_once(to, once);
  store_whole(to + apart, shared);
}

extern "C" __global__ void move_words(const char* in, char* out, int bytes) {
  using namespace hccupy;
  let_next_grid_start();
  prefetch_line(in);
  wait_for_previous_grid();
  if (bytes == 1) move<unsigned char>(in, out);
  if (bytes == 2) move<unsigned short>(in, out);
  if (bytes == 4) move<unsigned int>(in, out);
  if (bytes == 8) move<uint2>(in, out);
  if (bytes == 16) move<uint4>(in, out);
}

template <int kBytes>
__device__ void copy_through(const char* in, char* out, char* shared) {
  using namespace hccupy;
  const int at = static_cast<int>(threadIdx.x) * kBytes;
  async_copy<kBytes>(shared + at, in + at);
  async_commit();
  async_copy<kBytes>(shared + 2048 + at, in + 2048 + at);
  async_commit();
  async_wait<1>();  // the first group is there
  for (int b = 0; b < kBytes; ++b) out[at + b] = shared[at + b];
  async_wait<0>();
  for (int b = 0; b < kBytes; ++b) out[2048 + at + b] = shared[2048 + at + b];
}

extern "C" __global__ void __launch_bounds__(128) async_copies(const char* in, char* out, int bytes) {
  __shared__ __align__(16) char shared[4096];
  if (bytes == 4) copy_through<4>(in, out, shared);
  if (bytes == 8) copy_through<8>(in, out, shared);
  if (bytes == 16) copy_through<16>(in, out, shared);
}

// One warp a block: a is 16 x 8, b 8 x 8, c 16 x 8, row by row.
extern "C" __global__ void __launch_bounds__(32) products(const float* a, const float* b, float* c) {
  using namespace hccupy;
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  a += blockIdx.x * 128;
  b += blockIdx.x * 64;
  c += blockIdx.x * 128;
  const float of_a[4] = {a[8 * g + t], a[8 * (g + 8) + t], a[8 * g + t + 4], a[8 * (g + 8) + t + 4]};
  const float of_b[2] = {b[8 * t + g], b[8 * (t + 4) + g]};
  const int place[4] = {8 * g + 2 * t, 8 * g + 2 * t + 1, 8 * (g + 8) + 2 * t, 8 * (g + 8) + 2 * t + 1};
  float sum[4];
  for (int k = 0; k < 4; ++k) sum[k] = c[place[k]];
  mma_tf32(sum, of_a, of_b);
  for (int k = 0; k < 4; ++k) c[place[k]] = sum[k];
}

#if kHopper
// A cluster of one block: its rank, a barrier, and its own shared memory as a peer sees it.
extern "C" __global__ void __launch_bounds__(64) cluster(const float* in, float* out) {
  using namespace hccupy;
  __shared__ float2 shared[64];
  const int t = static_cast<int>(threadIdx.x);
  shared[t] = {in[2 * t], in[2 * t + 1]};
  sync_cluster();
  const float2 value = load_of_block(&shared[63 - t], block_in_cluster());
  out[2 * t] = value.x;
  out[2 * t + 1] = value.y;
  sync_cluster();
}

// Bulk copies of 1 KB in two phases of one barrier, which one thread also arrives on by itself.
extern "C" __global__ void __launch_bounds__(64) bulk_copies(const char* in, char* out) {
  using namespace hccupy;
  __shared__ __align__(16) char shared[2048];
  __shared__ Barrier ready, done;
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    barrier_init(&ready, 1);
    barrier_init(&done, 64);
    fence_barrier_init();
  }
  __syncthreads();
  for (int phase = 0; phase < 2; ++phase) {
    if (t == 0) {
      barrier_expect(&ready, 1024);
      bulk_load(shared + 1024 * phase, in + 1024 * phase, 1024, &ready);
    }
    barrier_wait(&ready, static_cast<unsigned int>(phase));
    for (int b = 0; b < 16; ++b) out[1024 * phase + 16 * t + b] = shared[1024 * phase + 16 * t + b];
    barrier_arrive(&done);
    barrier_wait(&done, static_cast<unsigned int>(phase));
  }
}
#endif
