// Memory ceilings, measured beside every benchmark: what plain streaming kernels of the same byte mix reach.
//
//   ceiling   in[r] for r < kReads are read, their bitwise xor goes to out[w] for w < kWrites; 16 bytes an access
//
// | argument | shape              | dtype |
// | in       | [kReads, count]    | uint4 |
// | out      | [kWrites, count]   | uint4 |
// Baked: kReads (1..8), kWrites (0..8). With kWrites = 0 only a value that never occurs would be stored: a pure read.
// Launch: persistent, grid = multiprocessors * 8, 256 threads, no shared memory. count is in uint4.

constexpr int kUnroll = 4;  // accesses of 16 bytes in flight per thread and stream

extern "C" __global__ void __launch_bounds__(256) ceiling(const uint4* in, uint4* out, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * 256 * kUnroll;
  for (long long base = static_cast<long long>(blockIdx.x) * 256 * kUnroll + threadIdx.x; base < count; base += step) {
    uint4 sum[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum[u] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < kReads; ++r) {
      uint4 value[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const long long i = base + u * 256;
        value[u] = i < count ? __ldcs(in + r * count + i) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        sum[u].x ^= value[u].x, sum[u].y ^= value[u].y, sum[u].z ^= value[u].z, sum[u].w ^= value[u].w;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const long long i = base + u * 256;
      if (kWrites == 0) {
        if (sum[u].x == 0x9e3779b9u && sum[u].y == 0x7f4a7c15u && sum[u].z == 0xf39cc060u && sum[u].w == 1u) out[0] = sum[u];
      }
#pragma unroll
      for (int w = 0; w < kWrites; ++w) {
        if (i < count) __stcs(out + w * count + i, sum[u]);
      }
    }
  }
}
