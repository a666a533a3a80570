// Memory ceilings, measured beside every benchmark: what plain streaming kernels of the same byte mix reach.
//
//   ceiling   in[k][r] for r < kReads are read, their bitwise xor goes to out[k][w] for w < kWrites; 16 bytes an access
//
// | argument | shape                      | dtype |
// | in       | [rows, kReads, kRow]       | uint4 |
// | out      | [rows, kWrites, kRow]      | uint4 |
// Baked: kReads (1..8), kWrites (0..8). With kWrites = 0 only a value that never occurs would be stored: a pure read.
// Rows of 12 KB, as the operators' are: 5 reads and 4 writes reach 4.22 TB/s (each stream a stretch of memory of its
// own: 4.14).
// Launch: grid = ceil(count / 256) with count = rows * kRow, 256 threads, no shared memory: one access a
// thread and stream. Persistent blocks with 4 accesses in flight wait for all of them before they ask again: copy 3.82
// against 4.24.

constexpr unsigned int kRow = 768;

extern "C" __global__ void __launch_bounds__(256) ceiling(const uint4* in, uint4* out, long long count) {
  const unsigned int i = blockIdx.x * 256 + threadIdx.x, row = i / kRow, place = i % kRow;
  if (i >= count) return;
  const uint4* from = in + static_cast<long long>(row) * (kReads * kRow) + place;
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int r = 0; r < kReads; ++r) {
    const uint4 value = __ldcs(from + r * kRow);
    sum.x ^= value.x, sum.y ^= value.y, sum.z ^= value.z, sum.w ^= value.w;
  }
  if (kWrites == 0) {
    if (sum.x == 0x9e3779b9u && sum.y == 0x7f4a7c15u && sum.z == 0xf39cc060u && sum.w == 1u) out[0] = sum;
  }
  uint4* to = out + static_cast<long long>(row) * (kWrites * kRow) + place;
#pragma unroll
  for (int w = 0; w < kWrites; ++w) __stcs(to + w * kRow, sum);
}
