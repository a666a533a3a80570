// Entry points of the sm_90a iHC kernels. The including file has defined IhcKernel with kThreads, kBlocks and run().
#pragma once

namespace hccupy {
using BakedX = Element<baked::x_dtype>::Type;
using BakedRmsWeight = Element<baked::rms_weight_dtype>::Type;
}  // namespace hccupy

#ifdef HCCUPY_ENTRY_PRE
extern "C" __global__ void __cluster_dims__(hccupy::IhcKernel::kRanks, 1, 1)
    __launch_bounds__(hccupy::IhcKernel::kThreads, hccupy::IhcKernel::kBlocks)
        ihc_pre(const hccupy::BakedX* x, const float* w, const float* hc_scale, const float* hc_base,
                const hccupy::BakedRmsWeight* rms_weight, hccupy::BakedX* y, float* h_post, long long x_stride_tokens,
                long long x_stride_hc, long long y_stride_tokens, long long h_post_stride_tokens, float norm_eps,
                float hc_eps, float magnitude, float rms_eps, int tokens) {
  hccupy::IhcArguments a = {};
  a.x = reinterpret_cast<const char*>(x), a.w = w, a.hc_scale = hc_scale, a.hc_base = hc_base,
  a.rms_weight = rms_weight;
  a.z = reinterpret_cast<char*>(y), a.h_next = h_post;
  a.x_tokens = x_stride_tokens, a.x_hc = x_stride_hc, a.z_tokens = y_stride_tokens,
  a.h_next_tokens = h_post_stride_tokens;
  a.norm_eps = norm_eps, a.hc_eps = hc_eps, a.magnitude = magnitude, a.rms_eps = rms_eps, a.tokens = tokens;
  hccupy::IhcKernel::run(a);
}
#endif

#ifdef HCCUPY_ENTRY_HEAD
extern "C" __global__ void __cluster_dims__(hccupy::IhcKernel::kRanks, 1, 1)
    __launch_bounds__(hccupy::IhcKernel::kThreads, hccupy::IhcKernel::kBlocks)
        ihc_head(const hccupy::BakedX* x, const float* w, const float* hc_scale, const float* hc_base,
                 const hccupy::BakedRmsWeight* rms_weight, hccupy::BakedX* y, long long x_stride_tokens,
                 long long x_stride_hc, long long y_stride_tokens, float norm_eps, float hc_eps, float rms_eps,
                 int tokens) {
  hccupy::IhcArguments a = {};
  a.x = reinterpret_cast<const char*>(x), a.w = w, a.hc_scale = hc_scale, a.hc_base = hc_base,
  a.rms_weight = rms_weight;
  a.z = reinterpret_cast<char*>(y);
  a.x_tokens = x_stride_tokens, a.x_hc = x_stride_hc, a.z_tokens = y_stride_tokens;
  a.norm_eps = norm_eps, a.hc_eps = hc_eps, a.magnitude = 1.0f, a.rms_eps = rms_eps, a.tokens = tokens;
  hccupy::IhcKernel::run(a);
}
#endif

#ifdef HCCUPY_ENTRY_POST_PRE
extern "C" __global__ void __cluster_dims__(hccupy::IhcKernel::kRanks, 1, 1)
    __launch_bounds__(hccupy::IhcKernel::kThreads, hccupy::IhcKernel::kBlocks)
        ihc_post_pre(const hccupy::BakedX* x, const hccupy::BakedX* residual, const float* h_post, const float* w,
                     const float* hc_scale, const float* hc_base, const hccupy::BakedRmsWeight* rms_weight,
                     hccupy::BakedX* y, hccupy::BakedX* z, float* h_post_next, long long x_stride_tokens,
                     long long residual_stride_tokens, long long residual_stride_hc, long long h_post_stride_tokens,
                     long long y_stride_tokens, long long y_stride_hc, long long z_stride_tokens,
                     long long h_post_next_stride_tokens, float norm_eps, float hc_eps, float magnitude, float rms_eps,
                     int tokens) {
  hccupy::IhcArguments a = {};
  a.x = reinterpret_cast<const char*>(x), a.residual = reinterpret_cast<const char*>(residual), a.h_post = h_post;
  a.w = w, a.hc_scale = hc_scale, a.hc_base = hc_base, a.rms_weight = rms_weight;
  a.y = reinterpret_cast<char*>(y), a.z = reinterpret_cast<char*>(z), a.h_next = h_post_next;
  a.x_tokens = x_stride_tokens, a.residual_tokens = residual_stride_tokens, a.residual_hc = residual_stride_hc;
  a.h_post_tokens = h_post_stride_tokens, a.y_tokens = y_stride_tokens, a.y_hc = y_stride_hc,
  a.z_tokens = z_stride_tokens;
  a.h_next_tokens = h_post_next_stride_tokens;
  a.norm_eps = norm_eps, a.hc_eps = hc_eps, a.magnitude = magnitude, a.rms_eps = rms_eps, a.tokens = tokens;
  hccupy::IhcKernel::run(a);
}
#endif
