// Sums over the lanes of a warp and the threads of a block, always added in the same order: the same inputs in
// the same lanes give the same bits, whatever else is summed beside them.
#pragma once

namespace hccupy {

constexpr unsigned int kFullMask = 0xffffffffu;

// Sum (or maximum) over groups of kLanes neighbouring lanes; every lane gets the result, with the same bits.
// Cost: log2(kLanes) shuffles. All 32 lanes must take part.
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

template <int kLanes = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

// Sum over the block; every thread gets it. `scratch` holds kBlockThreads / 32 floats of shared memory.
// Cost: 5 shuffles, one barrier, kBlockThreads / 32 shared loads. Sync rule: the scratch may be written again only
// after another barrier of the block.
template <int kBlockThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  static_assert(kBlockThreads % 32 == 0, "a block is whole warps");
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kBlockThreads / 32; ++warp) sum += scratch[warp];
  return sum;
}

// A sum and what rounding has taken from it: close to twice the precision of float, without doubles, which most
// GPUs are slow at.
struct WideSum {
  float sum;
  float lost;

  // A sum that overflowed has lost its meaning, not its value.
  __device__ __forceinline__ float rounded() const {
    const float total = sum + lost;
    return total == total ? total : sum;
  }

  // Kahan's step: 4 additions.
  __device__ __forceinline__ void add_compensated(float value) {
    const float added = value + lost;
    const float total = sum + added;
    lost = added - (total - sum);
    sum = total;
  }
};

// Exact but for the rounding of `lost`, and the same for (b, a). 8 additions.
__device__ __forceinline__ WideSum operator+(WideSum a, WideSum b) {
  const float sum = a.sum + b.sum;
  const float of_b = sum - a.sum;
  const float lost = (a.sum - (sum - of_b)) + (b.sum - of_b);
  return {sum, lost + (a.lost + b.lost)};
}

__device__ __forceinline__ WideSum shuffle_xor(WideSum value, int offset) {
  return {__shfl_xor_sync(kFullMask, value.sum, offset), __shfl_xor_sync(kFullMask, value.lost, offset)};
}

// One halving step of warp_sums: each lane carries kCarried values, of which `held` are real, the first being
// number `first`; afterwards it carries half as many, each summed with the lane at distance kOffset.
template <int kCarried, int kOffset, int kCount>
__device__ __forceinline__ void share_out(WideSum (&values)[kCount], int& first, int& held) {
  constexpr int kHalf = (kCarried + 1) / 2;
  const bool upper = (threadIdx.x & kOffset) != 0;
  if constexpr (kCarried == 1) {
    values[0] = values[0] + shuffle_xor(values[0], kOffset);
    held = upper ? 0 : held;  // both have it; one of them writes
  } else {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const WideSum low = values[k];
      const WideSum high = k + kHalf < kCarried ? values[k + kHalf] : WideSum{0.0f, 0.0f};
      values[k] = (upper ? high : low) + shuffle_xor(upper ? low : high, kOffset);
    }
    first += upper ? kHalf : 0;
    held = upper ? held - kHalf : (held < kHalf ? held : kHalf);
  }
  if constexpr (kOffset > 1) share_out<kHalf, kOffset / 2>(values, first, held);
}

// Sum over the warp of each of kCount values; sums[k] (any memory, one array per warp) receives value k.
// Each value is added over lanes at distance 16, 8, 4, 2, 1: the bits do not depend on kCount. The lanes share the
// values out as they add (each step halves what a lane still carries), so the cost is about 2 * (kCount + 5)
// shuffles instead of 10 * kCount. No barrier inside; `values` is used up.
template <int kCount>
__device__ __forceinline__ void warp_sums(WideSum (&values)[kCount], WideSum* sums) {
  int first = 0;
  int held = kCount;
  share_out<kCount, 16>(values, first, held);
#pragma unroll
  for (int k = 0; k < (kCount + 31) / 32; ++k) {
    if (k < held) sums[first + k] = values[k];
  }
}

}  // namespace hccupy
