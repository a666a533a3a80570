// iHC post: the output of a block goes back into every channel of the state.
//
//   y[n, i, :] = h_post[n, i] * x[n, :] + residual[n, i, :]          fmaf in fp32, one rounding
//
//   argument   shape                 dtype
//   x          [tokens, hidden]      fp32, fp16, bf16; any stride on tokens
//   residual   [tokens, hc, hidden]  as x; any stride on tokens and hc
//   h_post     [tokens, hc]          fp32; any stride on tokens
//   y          [tokens, hc, hidden]  as x; any stride on tokens and hc; may be residual itself, with its strides
//
// Baked: hc, hidden, dtype. Run time: tokens, strides.
// Launch: grid ceil(tokens * (hidden / kVec) / kThreads), block kThreads, no shared memory: one pack of kVec elements
// of x and hc of residual a thread. May be a dependent launch: the rows of the first kAhead blocks are then on the way
// to L2 while the previous kernel still runs. With kLate the next kernel may start once all blocks have asked for their
// rows, else at once.

#include "common/ihc.cuh"
#include "common/pack.cuh"

namespace hccupy {

// The packs of all tokens stand in one line. An element of y is read (as residual) by the thread that writes it, before
// it does.
template <int kDtype, int kChannels, int kLength, int kSize, int kBlockThreads, int kAheadBlocks, bool kLateRelease,
          bool kStreaming, typename X>
__device__ __forceinline__ void ihc_post_body(const X* x, const X* residual, const float* h_post, X* y,
                                              long long x_stride_tokens, long long residual_stride_tokens,
                                              long long residual_stride_hc, long long h_post_stride_tokens,
                                              long long y_stride_tokens, long long y_stride_hc, int tokens) {
  static_assert(kChannels >= 1 && kChannels <= 8, "hc is 1 to 8");
  static_assert(kLength % kSize == 0, "a pack must not straddle the end of a row");
  using Vector = Pack<kDtype, kSize>;
  constexpr unsigned int kRow = kLength / kSize;  // packs of a row

  if constexpr (!kLateRelease) let_next_grid_start();

  // One 64-bit division a block; the rest is 32-bit. All divisors are constants.
  const unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * kBlockThreads;
  const unsigned int place = static_cast<unsigned int>(first % kRow) + threadIdx.x;
  const long long token = static_cast<long long>(first / kRow) + place / kRow;
  const int column = static_cast<int>(place % kRow) * kSize;
  const bool exists = token < tokens;
  const X* from = residual + token * residual_stride_tokens + column;
  const X* added_from = x + token * x_stride_tokens + column;
  const float* gates_from = h_post + token * h_post_stride_tokens;

  // A prefetch consumes no value: whatever the previous kernel still writes reaches L2 before the loads below read it.
  if (exists && blockIdx.x < kAheadBlocks) {
    if (column % (128 / static_cast<int>(sizeof(X))) == 0) {
#pragma unroll
      for (int channel = 0; channel < kChannels; ++channel) prefetch_line(from + channel * residual_stride_hc);
      prefetch_line(added_from);
    }
    if (threadIdx.x == 0) prefetch_line(gates_from);
  }

  wait_for_previous_grid();

  Vector input, state[kChannels];
  float gates[kChannels];
  if (exists) {
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      state[channel] = Vector::load_once(from + channel * residual_stride_hc);
      gates[channel] = gates_from[channel];
    }
    input = Vector::load_once(added_from);
  }
  // Behind a branch, or the compiler moves arithmetic on the loaded values in front of it.
  if constexpr (kLateRelease) let_next_grid_start();
  if (!exists) return;

  float added[kSize];
  input.to_floats(added);
  X* to = y + token * y_stride_tokens + column;
#pragma unroll
  for (int channel = 0; channel < kChannels; ++channel) {
    float values[kSize];
    state[channel].to_floats(values);
#pragma unroll
    for (int e = 0; e < kSize; ++e) values[e] = ihc_post_element(gates[channel], added[e], values[e]);
    const Vector result = Vector::from_floats(values);
    if constexpr (kStreaming) {
      result.store_once(to + channel * y_stride_hc);
    } else {
      result.store_whole(to + channel * y_stride_hc);
    }
  }
}

}  // namespace hccupy

using X = hccupy::Element<kXDtype>::Type;

extern "C" __global__ void __launch_bounds__(kThreads)
    ihc_post(const X* x, const X* residual, const float* h_post, X* y, long long x_stride_tokens,
             long long residual_stride_tokens, long long residual_stride_hc, long long h_post_stride_tokens,
             long long y_stride_tokens, long long y_stride_hc, int tokens) {
  hccupy::ihc_post_body<kXDtype, kHc, kHidden, kVec, kThreads, kAhead, kLate, kStream>(
      x, residual, h_post, y, x_stride_tokens, residual_stride_tokens, residual_stride_hc, h_post_stride_tokens,
      y_stride_tokens, y_stride_hc, tokens);
}
