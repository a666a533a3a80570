// The gates of independent hyper-connections (iHC) and the mixes: the maths that all iHC kernels share.
// Every multiply-add is written as fmaf, so that the bits do not depend on what the compiler contracts.
#pragma once

namespace hccupy {

// 1 / sqrt(mean of squares + eps), precise: not the approximate rsqrt.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, float count, float eps) {
  return 1.0f / sqrtf(sum_of_squares / count + eps);
}

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// One gate: magnitude * sigmoid(mix * scale + base) + hc_eps, with mix = dot(x, w row) * inverse rms of x.
// Pre gates have magnitude 1, which leaves the bits of the sigmoid alone.
__device__ __forceinline__ float ihc_gate(float dot, float inverse, float scale, float base, float magnitude,
                                          float hc_eps) {
  return fmaf(magnitude, sigmoid(fmaf(dot * inverse, scale, base)), hc_eps);
}

// One element of pre's mix: sum over the channels, first to last.
template <int kChannels>
__device__ __forceinline__ float ihc_mix(const float (&h_pre)[kChannels], const float (&channels)[kChannels]) {
  float sum = h_pre[0] * channels[0];
#pragma unroll
  for (int channel = 1; channel < kChannels; ++channel) sum = fmaf(h_pre[channel], channels[channel], sum);
  return sum;
}

// One element of post, before its one rounding.
__device__ __forceinline__ float ihc_post_element(float h_post, float x, float residual) {
  return fmaf(h_post, x, residual);
}

}  // namespace hccupy
