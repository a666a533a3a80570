// What the rope kernels are called with.
#pragma once

#include "common/rope_place.cuh"

namespace hccupy {

enum { kPolicyNone = 0, kRopeThenNorm = 1, kNormThenRope = 2 };
// Bits of C::early, what is done before the previous grid has ended: ask for the row and the weights in L2; read the
// metadata as it is then (a guess, checked afterwards) and ask for the angles and the tail.
enum { kEarlyRow = 1, kEarlyGuess = 2 };
constexpr int kFlagsPerWarp = 128;  // of split_k_flag
constexpr float kLargestFloat = 3.402823466e38f;
constexpr float kSmallestAbsmax = 1e-12f;

template <class C>
struct RopeArgs {
  using In = typename Element<C::qkv_dtype>::Type;
  using Store = typename Element<C::store_dtype>::Type;
  using QWeight = typename Element<C::q_weight_dtype>::Type;
  using KWeight = typename Element<C::k_weight_dtype>::Type;
  struct Strides {
    long long block, slot, head;
  };

  Metadata metadata;
  const In* qkv;
  long long qkv_stride;
  const float* cos_sin;
  const QWeight* q_weight;
  const KWeight* k_weight;
  float norm_eps, norm_weight_offset;
  Store *key_cache, *value_cache;
  Strides key, value;
  Store *q, *out_k, *out_v;
  Strides q_strides, out_k_strides, out_v_strides;  // slot: of the tokens
  // fp8 only:
  const float *k_scale = nullptr, *v_scale = nullptr, *q_scale_inv = nullptr;
  float* q_scale = nullptr;
  int* split_k_flag = nullptr;
  float upper_max = 0.0f;
  int padded_q_len = 0;  // 0: q_scale is [tokens, q_heads]

  __device__ __forceinline__ Store* at(Store* base, const Strides& s, long long block, long long slot, int head) const {
    return base + block * s.block + slot * s.slot + head * s.head;
  }
  __device__ __forceinline__ Store* key_of(const Row& row, int token, int head) const {
    if constexpr (C::has_out_k) return at(out_k, out_k_strides, 0, token, head);
    return at(key_cache, key, row.page, row.slot, head);
  }
  __device__ __forceinline__ Store* value_of(const Row& row, int token, int head) const {
    if constexpr (C::has_out_v) return at(out_v, out_v_strides, 0, token, head);
    return at(value_cache, value, row.page, row.slot, head);
  }
};

// What K, V and static q are multiplied by (fp8).
struct Scales {
  float q = 1.0f, k = 1.0f, v = 1.0f;
};

// value * inverse, held inside +-bound; NaN stays NaN (comparisons with it are false). Without an upper_max the bound
// is the largest e4m3, where the conversion saturates by itself. A zero is written out as value * inverse + zero.
template <bool kBounded>
__device__ __forceinline__ float quantised(float value, float inverse, float zero, float bound) {
  const float scaled = fmaf(value, inverse, zero);
  if constexpr (!kBounded) return scaled;
  return scaled > bound ? bound : scaled < -bound ? -bound : scaled;
}

}  // namespace hccupy
