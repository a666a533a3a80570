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
// Launch: grid ceil(tokens * (hidden / kVec) / (kThreads * kPacks)), block kThreads, no shared memory. May be a
// dependent launch; with kPrefetch its rows are on the way to L2 while the previous kernel still runs.

#include "common/ihc.cuh"
#include "common/pack.cuh"

namespace hccupy {

// The packs of all tokens stand in one line; a block takes kBlockThreads * kCount neighbours, a thread kCount of
// them, kBlockThreads apart. An element of y is read (as residual) by the thread that writes it, before it does.
template <int kDtype, int kChannels, int kLength, int kSize, int kBlockThreads, int kCount, bool kStreaming,
          bool kEarly, typename X>
__device__ __forceinline__ void ihc_post_body(const X* x, const X* residual, const float* h_post, X* y,
                                              long long x_stride_tokens, long long residual_stride_tokens,
                                              long long residual_stride_hc, long long h_post_stride_tokens,
                                              long long y_stride_tokens, long long y_stride_hc, int tokens) {
  static_assert(kChannels >= 1 && kChannels <= 8, "hc is 1 to 8");
  static_assert(kLength % kSize == 0, "a pack must not straddle the end of a row");
  static_assert(kBlockThreads * kCount < 1 << 30 && kLength < 1 << 30, "the place in a block is 32-bit");
  using Vector = Pack<kDtype, kSize>;
  constexpr unsigned int kRow = kLength / kSize;  // packs of a row

  let_next_grid_start();

  // One 64-bit division a block; the rest is 32-bit. All divisors are constants.
  const unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * (kBlockThreads * kCount);
  const long long first_token = static_cast<long long>(first / kRow);
  const unsigned int first_place = static_cast<unsigned int>(first % kRow) + threadIdx.x;

  // A prefetch consumes no value: whatever the previous kernel still writes reaches L2 before the loads below read it.
  if constexpr (kEarly) {
    constexpr int kLine = 128 / static_cast<int>(sizeof(X));
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const unsigned int place = first_place + k * kBlockThreads;
      const long long row = first_token + place / kRow;
      const int element = static_cast<int>(place % kRow) * kSize;
      if (row >= tokens || element % kLine != 0) continue;
#pragma unroll
      for (int channel = 0; channel < kChannels; ++channel) {
        prefetch_line(residual + row * residual_stride_tokens + channel * residual_stride_hc + element);
      }
      prefetch_line(x + row * x_stride_tokens + element);
    }
  }

  wait_for_previous_grid();

  long long token[kCount];
  int column[kCount];
  Vector input[kCount];
  Vector state[kCount][kChannels];
  float gate[kCount][kChannels];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const unsigned int place = first_place + k * kBlockThreads;
    token[k] = first_token + place / kRow;
    column[k] = static_cast<int>(place % kRow) * kSize;
    if (token[k] >= tokens) break;
    const X* from = residual + token[k] * residual_stride_tokens + column[k];
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      state[k][channel] = Vector::load_once(from + channel * residual_stride_hc);
      gate[k][channel] = h_post[token[k] * h_post_stride_tokens + channel];
    }
    input[k] = Vector::load_once(x + token[k] * x_stride_tokens + column[k]);
  }

#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (token[k] >= tokens) break;
    float added[kSize];
    input[k].to_floats(added);
    X* to = y + token[k] * y_stride_tokens + column[k];
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
      float values[kSize];
      state[k][channel].to_floats(values);
#pragma unroll
      for (int e = 0; e < kSize; ++e) values[e] = ihc_post_element(gate[k][channel], added[e], values[e]);
      const Vector result = Vector::from_floats(values);
      if constexpr (kStreaming) {
        result.store_once(to + channel * y_stride_hc);
      } else {
        result.store(to + channel * y_stride_hc);
      }
    }
  }
}

}  // namespace hccupy

using X = hccupy::Element<kXDtype>::Type;

extern "C" __global__ void __launch_bounds__(kThreads)
    ihc_post(const X* x, const X* residual, const float* h_post, X* y, long long x_stride_tokens,
             long long residual_stride_tokens, long long residual_stride_hc, long long h_post_stride_tokens,
             long long y_stride_tokens, long long y_stride_hc, int tokens) {
  hccupy::ihc_post_body<kXDtype, kHc, kHidden, kVec, kThreads, kPacks, kStream, kPrefetch>(
      x, residual, h_post, y, x_stride_tokens, residual_stride_tokens, residual_stride_hc, h_post_stride_tokens,
      y_stride_tokens, y_stride_hc, tokens);
}
