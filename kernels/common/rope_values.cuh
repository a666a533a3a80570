// The v heads of a row, and what fp8 values are multiplied by.
#pragma once

#include "common/rope_row.cuh"

namespace hccupy {

// A unit is two chunks of 8 elements a lane, of a row or of several together.
template <class C>
struct Values {
  static constexpr int lanes = C::together ? C::Lanes::lanes : 32;  // of a row
  static constexpr int chunks = C::kv_heads * C::v_dim / 8;
  static constexpr int units = (chunks + 2 * lanes - 1) / (2 * lanes);
  static constexpr bool whole = chunks % (2 * lanes) == 0;
  static constexpr int apart = 8 * lanes;      // elements from a lane's first chunk to its second
  static constexpr int elements = 16 * lanes;  // of a unit and row
  using InPack = Pack<C::qkv_dtype, 8>;
  using StorePack = Pack<C::store_dtype, 8>;

  static __device__ __forceinline__ int chunk(int unit, int k) { return (unit * 2 + k) * lanes + lane_index() % lanes; }

  static __device__ __forceinline__ const typename RopeArgs<C>::In* first_of(const typename RopeArgs<C>::In* row,
                                                                             int unit) {
    return row + (C::q_heads + C::kv_heads) * C::dim + chunk(unit, 0) * 8;
  }
  // do_pack(k) for the packs of this lane that exist.
  template <class Do>
  static __device__ __forceinline__ void each_pack(int unit, Do do_pack) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (whole || chunk(unit, k) < chunks) do_pack(k);
  }
  template <class Load>
  static __device__ __forceinline__ void raw_by(int unit, uint4 (&raw)[2], Load load_pack) {
    each_pack(unit, [&](int k) { raw[k] = load_pack(k).words[0]; });
  }

  static __device__ __forceinline__ StorePack stored(const RopeArgs<C>& a, const InPack& pack, float inverse) {
    if constexpr (C::fp8) {
      float x[8];
      pack.to_floats(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = quantised<C::bounded>(x[i], inverse, -0.0f, a.upper_max);
      return StorePack::from_floats(x);
    } else {
      return pack;
    }
  }

  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int unit,
                                                const uint4 (&raw)[2], const Scales& scales) {
    if (!(C::has_out_v || row.stored) || (C::together && token < 0)) return;
    auto* first = a.value_of(row, token, 0);
    const long long head = C::has_out_v ? a.out_v_strides.head : a.value.head;
    each_pack(unit, [&](int k) {
      const unsigned int element = chunk(unit, k) * 8;  // unsigned: divided by a shift
      store_aligned<C::write_align, C::store_dtype, 8>(
          first + element / C::v_dim * head + element % C::v_dim,
          row.live ? stored(a, InPack{{raw[k]}}, scales.v) : StorePack::zeros());
    });
  }
};

// ---- scales -------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ Scales load_scales(const RopeArgs<C>& a) {
  Scales scales;
  if constexpr (C::fp8) {
    scales.k = *a.k_scale;
    scales.v = *a.v_scale;
    if constexpr (!C::dynamic_q) scales.q = *a.q_scale_inv;
  }
  return scales;
}

template <class C>
__device__ __forceinline__ void invert(Scales& scales) {
  if constexpr (C::fp8) {
    scales.k = 1.0f / scales.k;
    scales.v = 1.0f / scales.v;
  }
}

}  // namespace hccupy
