// iHC pre: gates from the whole channel state, then the gated sum of the channels, with the next RMSNorm if asked.
//
//   r      = 1 / sqrt(mean(x^2 over hc * hidden) + norm_eps)
//   mixes  = (x . w) * r
//   h_pre  = sigmoid(mixes[:hc] * hc_scale[0] + hc_base[:hc]) + hc_eps
//   h_post = magnitude * sigmoid(mixes[hc:] * hc_scale[1] + hc_base[hc:]) + hc_eps      (ihc_pre only)
//   y      = sum over hc of h_pre * x; with rms_weight: y / sqrt(mean(y^2) + rms_eps) * rms_weight,
//            y rounded to its dtype before that if kRoundBeforeNorm
//
//   argument     shape                 dtype
//   x            [tokens, hc, hidden]  fp32, fp16, bf16; any stride on tokens and hc
//   w            [gates, hc * hidden]  fp32, packed; gates = 2 * hc, for ihc_head hc
//   hc_scale     [2], ihc_head [1]     fp32
//   hc_base      [gates]               fp32
//   rms_weight   [hidden]              fp32, fp16, bf16; null without the norm
//   y            [tokens, hidden]      as x; any stride on tokens
//   h_post       [tokens, hc]          fp32; any stride on tokens
//
// Baked: hc, hidden, dtypes. Run time: tokens, strides, eps.
// Launch: grid ceil(tokens / kTileTokens), block kThreads, dynamic shared memory tokens x hc x padded row if kStaged
// (kTileTokens * kHc * ceil(ceil(kHidden / 8) / kThreads) * kThreads * 8 elements), else 0. With kRanks, not 0:
// clusters of kRanks blocks, at least ceil(tokens / 8), 8 * IhcTensor::kTokenBytes of shared
// memory. May be a dependent launch.

#if kRanks
#include "common/ihc_tensor.cuh"
#else
#include "common/ihc_tile.cuh"
#endif

namespace hccupy {

template <class Config, typename X>
__device__ __forceinline__ void ihc_pre_body(const X* x, long long x_stride_tokens, long long x_stride_hc, int tokens,
                                             const IhcPreArgs<Config>& args) {
#if kRanks
  IhcTensor<Config>::run(args, tokens, [&](const auto& tile) { tile.stage(x, x_stride_tokens, x_stride_hc); });
#else
  let_next_grid_start();
  prefetch_to_l2<Config::threads>(args.w, static_cast<long long>(Config::gates) * Config::hc * Config::hidden * 4);
  wait_for_previous_grid();

  const IhcTile<Config> tile{x, x_stride_tokens, x_stride_hc, static_cast<long long>(blockIdx.x) * Config::tokens,
                             tokens};
  if constexpr (Config::staged) tile.stage();
  ihc_pre_tile(tile, args);
#endif
}

}  // namespace hccupy

using X = hccupy::Element<kXDtype>::Type;
using R = hccupy::Element<kRmsWeightDtype>::Type;

template <int kGates>
struct Config {
  static constexpr int x_dtype = kXDtype, hc = kHc, hidden = kHidden, gates = kGates;
  static constexpr bool has_rms_weight = kHasRmsWeight, round_before_norm = kRoundBeforeNorm;
  static constexpr int rms_weight_dtype = kRmsWeightDtype;
  static constexpr int vec = kVec, weight_vec = kWeightVec, threads = kThreads;
#if kRanks
  static constexpr int ranks = kRanks;
#else
  static constexpr int tokens = kTileTokens;
  static constexpr bool staged = kStaged;
#endif
};

#if !kHead  // one entry a binary: the other would double the compile time
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    ihc_pre(const X* x, const float* w, const float* hc_scale, const float* hc_base, const R* rms_weight, X* y,
            float* h_post, long long x_stride_tokens, long long x_stride_hc, long long y_stride_tokens,
            long long h_post_stride_tokens, float norm_eps, float hc_eps, float magnitude, float rms_eps, int tokens) {
  hccupy::ihc_pre_body<Config<2 * kHc>>(x, x_stride_tokens, x_stride_hc, tokens,
                                        {w, hc_scale, hc_base, rms_weight, y, h_post, y_stride_tokens,
                                         h_post_stride_tokens, norm_eps, hc_eps, magnitude, rms_eps});
}

#else
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    ihc_head(const X* x, const float* w, const float* hc_scale, const float* hc_base, const R* rms_weight, X* y,
             long long x_stride_tokens, long long x_stride_hc, long long y_stride_tokens, float norm_eps, float hc_eps,
             float rms_eps, int tokens) {
  hccupy::ihc_pre_body<Config<kHc>>(
      x, x_stride_tokens, x_stride_hc, tokens,
      {w, hc_scale, hc_base, rms_weight, y, nullptr, y_stride_tokens, 0, norm_eps, hc_eps, 1.0f, rms_eps});
}
#endif
