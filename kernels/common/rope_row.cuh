// One row of qkv in units of 1 KB (at head dim 128): arguments, q and k heads, v heads, and the tail behind the last
// row.
//
// C is the Config of rope_norm_store_kv.cu: everything baked. A unit is what one warp holds in two registers of 16
// bytes a lane (`raw`): C::Lanes::heads_per_warp heads of q and k, or 512 elements of v. What a unit's values become
// depends on nothing but the row, so any kernel that goes through the units gives the same bits.
#pragma once

#include "common/rope.cuh"

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
  const float *k_scale, *v_scale, *q_scale_inv;
  float* q_scale;
  int* split_k_flag;
  float upper_max;
  int padded_q_len;  // 0: q_scale is [tokens, q_heads]

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

// ---- tail ---------------------------------------------------------------------------------------------------

// The slots behind a request's last token, in its page, become zero bytes. Each lane clears the elements that it has
// written in the last token's slot, so a warp answers for the heads it holds.
//
// Rewriting whole tails at each decode step would cost more than the rest of the op. So, unless the page's first slot
// is among this call's tokens (nobody has cleared the page then), each warp first looks at its heads in two slots: at
// all their elements in the slot right behind the last token, where the tokens of a rolled-back draft begin, and at
// half of them in the last slot of the page, which a page that was never cleared has. Only if all are zero the heads
// are left as they are.
template <class C, int kChunk>
struct Tail {
  using Store = typename RopeArgs<C>::Store;
  using StorePack = Pack<C::store_dtype, kChunk>;
  int behind = 0;  // slots to look after
  bool fresh = false;

  __device__ __forceinline__ Tail(const RopeArgs<C>& a, const Row& row, bool cached) {
    if (C::tail_zero && cached && row.stored && row.last) behind = a.metadata.block_size - 1 - row.slot;
    fresh = row.place >= row.slot;
  }
  __device__ __forceinline__ bool looks() const { return C::tail_zero && behind > 0 && !fresh; }

  static __device__ __forceinline__ unsigned int bits(const Store* from) {
    const StorePack pack = load_aligned<C::write_align, C::store_dtype, kChunk, Cached::kOnce>(from);
    unsigned int words[(sizeof pack + 3) / 4] = {};
    memcpy(words, &pack, sizeof pack);
    unsigned int all = 0;
#pragma unroll
    for (unsigned int word : words) all |= word;
    return all;
  }
  // `to`: where this lane's chunk `which` is in the last token's slot; `slot`: elements from slot to slot.
  __device__ __forceinline__ unsigned int look(const Store* to, int which, long long slot) const {
    const unsigned int found = bits(to + slot);
    return which == 0 ? found | bits(to + behind * slot) : found;
  }
  __device__ __forceinline__ void clear(Store* to, long long slot) const {
#pragma unroll 2
    for (int i = 1; i <= behind; ++i)
      store_aligned<C::write_align, C::store_dtype, kChunk>(to + i * slot, StorePack::zeros());
  }
};

// ---- q and k ------------------------------------------------------------------------------------------------

// A unit is C::Lanes::heads_per_warp heads: q heads first, then k heads.
template <class C>
struct RotatedHeads {
  using L = typename C::Lanes;
  using InPack = Pack<C::qkv_dtype, L::chunk>;
  using StorePack = Pack<C::store_dtype, L::chunk>;
  static constexpr int heads = C::q_heads + C::kv_heads;
  static constexpr int units = (heads + L::heads_per_warp - 1) / L::heads_per_warp;
  static constexpr int q_units = C::q_heads / L::heads_per_warp;      // those that hold nothing but q
  static constexpr bool mixed = C::q_heads % L::heads_per_warp != 0;  // a unit has both
  static constexpr bool normed = C::policy != kPolicyNone;
  static_assert(L::per_lane * sizeof(InPack) <= sizeof(uint4),
                "a lane's part of a half head must fit its register slot");

  static __device__ __forceinline__ int slot(int k) { return lane_index() % L::lanes + k * L::lanes; }
  static __device__ __forceinline__ int head(int unit) { return unit * L::heads_per_warp + lane_index() / L::lanes; }

  // Lanes without elements hold zeros.
  static __device__ __forceinline__ void load(const RopeArgs<C>& a, int token, int unit, uint4 (&raw)[2]) {
    const auto* from = a.qkv + token * a.qkv_stride + head(unit) * C::dim;
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        InPack pack = InPack::zeros();
        if (head(unit) < heads && L::exists(slot(k), which))
          pack = load_aligned<C::read_align, C::qkv_dtype, L::chunk, Cached::kOnce>(from + L::element(slot(k), which));
        memcpy(reinterpret_cast<char*>(&raw[which]) + k * sizeof pack, &pack, sizeof pack);
      }
    }
  }

  // The same from a row in shared memory.
  static __device__ __forceinline__ void raw_of(const typename RopeArgs<C>::In* row, int unit, uint4 (&raw)[2]) {
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        InPack pack = InPack::zeros();
        if (head(unit) < heads && L::exists(slot(k), which))
          pack = InPack::load(row + head(unit) * C::dim + L::element(slot(k), which));
        memcpy(reinterpret_cast<char*>(&raw[which]) + k * sizeof pack, &pack, sizeof pack);
      }
    }
  }

  static __device__ __forceinline__ void prefetch(const RopeArgs<C>& a, int token, int unit) {
    constexpr int kLine = 128 / static_cast<int>(sizeof *a.qkv);
    const int first = unit * L::heads_per_warp * C::dim + lane_index() * kLine;
    if (lane_index() * kLine < L::heads_per_warp * C::dim && first < heads * C::dim)
      prefetch_line(a.qkv + token * a.qkv_stride + first);
  }

  static constexpr int kAngles = C::interleaved ? L::chunk / 2 : L::chunk;
  using AnglePack = Pack<kFloat32, kAngles>;
  struct Angles {
    float cosine[L::per_lane][L::chunk];  // interleaved: the second chunk's angles are the upper half
    float sine[L::per_lane][L::chunk];
  };

  template <class Load>
  static __device__ __forceinline__ void angles_by(const float* table, Angles& o, Load load) {
    constexpr int kHalves = C::interleaved ? 2 : 1;
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < kHalves; ++which) {
        if (!L::exists(slot(k), which) || !L::rotated(slot(k), which)) continue;
        const float* from = table + L::angle(slot(k), which);
        const AnglePack c = load(from);
        const AnglePack s = load(from + L::half);
#pragma unroll
        for (int i = 0; i < kAngles; ++i) {
          o.cosine[k][which * kAngles + i] = c.at(i);
          o.sine[k][which * kAngles + i] = s.at(i);
        }
      }
  }
  static __device__ __forceinline__ void load_angles(const RopeArgs<C>& a, int position, Angles& o) {
    angles_by(a.cos_sin + static_cast<long long>(position) * (2 * L::half), o,
              [](const float* from) { return load_aligned<C::table_align, kFloat32, kAngles, Cached::kShared>(from); });
  }
  // The same from a row of the table in shared memory.
  static __device__ __forceinline__ void angles_of(const float* row, Angles& o) {
    angles_by(row, o, [](const float* from) { return AnglePack::load(from); });
  }
  static __device__ __forceinline__ void prefetch_angles(const RopeArgs<C>& a, int position) {
    if (lane_index() * 32 < 2 * L::half)
      prefetch_line(a.cos_sin + static_cast<long long>(position) * (2 * L::half) + lane_index() * 32);
  }

  static __device__ __forceinline__ void rotate(float (&x)[2][L::chunk], int k, const float (&cosine)[L::chunk],
                                                const float (&sine)[L::chunk]) {
    if constexpr (C::interleaved) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!L::rotated(slot(k), which)) continue;
#pragma unroll
        for (int i = 0; i < L::chunk / 2; ++i)
          rotate_pair(x[which][2 * i], x[which][2 * i + 1], cosine[which * L::chunk / 2 + i],
                      sine[which * L::chunk / 2 + i]);
      }
    } else if (L::rotated(slot(k), 0)) {
#pragma unroll
      for (int i = 0; i < L::chunk; ++i) rotate_pair(x[0][i], x[1][i], cosine[i], sine[i]);
    }
  }

  // What a lane's elements are multiplied by, with the offset (the load differs where q's and k's have different
  // dtypes).
  struct Weights {
    float of[L::per_lane][2][L::chunk];
  };

  static __device__ __forceinline__ void load_weights(const RopeArgs<C>& a, bool is_q, Weights& w) {
    if constexpr (normed) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!L::exists(slot(k), which)) continue;
          const int element = L::element(slot(k), which);
          auto& to = w.of[k][which];
          if constexpr (C::q_weight_dtype == C::k_weight_dtype) {
            weights_at<C::q_weight_dtype>((is_q ? a.q_weight : a.k_weight) + element, to);
          } else if (is_q) {
            weights_at<C::q_weight_dtype>(a.q_weight + element, to);
          } else {
            weights_at<C::k_weight_dtype>(a.k_weight + element, to);
          }
        }
    }
  }
  template <int kDtype>
  static __device__ __forceinline__ void weights_at(const typename Element<kDtype>::Type* from, float (&to)[L::chunk]) {
    load_aligned<C::weight_align, kDtype, L::chunk, Cached::kShared>(from).to_floats(to);
  }
  static __device__ __forceinline__ void add_offset(const RopeArgs<C>& a, Weights& w) {
    if constexpr (normed) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int i = 0; i < L::chunk; ++i) w.of[k][which][i] += a.norm_weight_offset;
    }
  }

  static __device__ __forceinline__ void normalise(const RopeArgs<C>& a, const Weights& w,
                                                   float (&x)[L::per_lane][2][L::chunk]) {
    float sum[2] = {0.0f, 0.0f};  // two chains, to wait less
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < L::chunk; ++i) sum[which] = fmaf(x[k][which][i], x[k][which][i], sum[which]);
    const float inverse = inverse_rms_of_head<C::dim>(warp_sum<L::lanes>(sum[0] + sum[1]), a.norm_eps);
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < L::chunk; ++i) x[k][which][i] = x[k][which][i] * inverse * w.of[k][which][i];
  }

  static __device__ __forceinline__ void store_q_scale(const RopeArgs<C>& a, const Row& row, int token, int head,
                                                       float scale) {
    if (lane_index() % L::lanes != 0 || head >= C::q_heads) return;
    if constexpr (!C::padded_scale) {
      a.q_scale[static_cast<long long>(token) * C::q_heads + head] = scale;
    } else if (row.request >= 0 && row.place < a.padded_q_len) {
      a.q_scale[(static_cast<long long>(row.request) * C::q_heads + head) * a.padded_q_len + row.place] = scale;
    }
  }

  // Quantises x of one head in place; returns with what it can be multiplied back (dynamic q).
  static __device__ __forceinline__ float quantise(const RopeArgs<C>& a, bool is_q, const Scales& scales,
                                                   float (&x)[L::per_lane][2][L::chunk]) {
    float scale = 0.0f;
    float inverse = is_q ? scales.q : scales.k;
    float zero = -0.0f;  // leaves every product as it is
    if constexpr (C::dynamic_q) {
      float largest[2] = {0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int i = 0; i < L::chunk; ++i) largest[which] = fmaxf(largest[which], fabsf(x[k][which][i]));
      const float absmax = fminf(warp_max<L::lanes>(fmaxf(largest[0], largest[1])), kLargestFloat);
      const float at_least = fmaxf(absmax, kSmallestAbsmax);
      scale = C::bounded ? at_least / a.upper_max : divided_by<448>(at_least);
      if (is_q) {
        inverse = C::bounded ? 1.0f / scale : reciprocal(scale);
        zero = absmax == 0.0f ? 0.0f : -0.0f;  // an all-zero head has no negative zeros
      }
    }
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < L::chunk; ++i)
          x[k][which][i] = quantised<C::bounded>(x[k][which][i], inverse, zero, a.upper_max);
    return scale;
  }

  // What a look at the tail of this row finds.
  static __device__ __forceinline__ unsigned int look(const RopeArgs<C>& a, const Row& row, int unit) {
    const int h = head(unit);
    unsigned int found = 0;
    if (h < C::q_heads || h >= heads) return found;
    const Tail<C, L::chunk> tail(a, row, true);
    const auto* from = a.key_of(row, 0, h - C::q_heads);
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
        if (L::exists(slot(k), which)) found |= tail.look(from + L::element(slot(k), which), which, a.key.slot);
    return found;
  }

  // A row that is padding or bad gives zeros to every output and nothing to the caches. `only_q`: known at compile
  // time.
  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int unit, bool only_q,
                                                const uint4 (&raw)[2], const Angles& angles, const Weights& w,
                                                const Scales& scales) {
    const int h = head(unit);
    const bool is_q = only_q || h < C::q_heads;
    auto* to = is_q ? a.at(a.q, a.q_strides, 0, token, h) : a.key_of(row, token, h - C::q_heads);
    const bool writes = only_q || (h < heads && (is_q || C::has_out_k || row.stored));
    if (only_q || C::ring > 0) {
      compute(a, row, token, h, is_q, writes, to, raw, angles, w, scales);
      return;
    }
    const Tail<C, L::chunk> tail(a, row, !C::has_out_k);
    const unsigned int found = tail.looks() ? look(a, row, unit) : 0;
    compute(a, row, token, h, is_q, writes, to, raw, angles, w, scales);
    if (tail.behind > 0 && (tail.fresh || __any_sync(kFullMask, found != 0)) && h < heads && !is_q) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
          if (L::exists(slot(k), which)) tail.clear(to + L::element(slot(k), which), a.key.slot);
    }
  }

  // `to`: where head `h` of this lane goes, in global or shared memory.
  static __device__ __forceinline__ void compute(const RopeArgs<C>& a, const Row& row, int token, int h, bool is_q,
                                                 bool writes, typename RopeArgs<C>::Store* to, const uint4 (&raw)[2],
                                                 const Angles& angles, const Weights& w, const Scales& scales) {
    float x[L::per_lane][2][L::chunk];
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        InPack pack;
        memcpy(&pack, reinterpret_cast<const char*>(&raw[which]) + k * sizeof pack, sizeof pack);
        unpack<C::qkv_dtype>(pack, x[k][which]);
      }
    if constexpr (C::policy == kNormThenRope) normalise(a, w, x);
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k) rotate(x[k], k, angles.cosine[k], angles.sine[k]);
    if constexpr (C::policy == kRopeThenNorm) normalise(a, w, x);
    if constexpr (C::fp8) {
      const float scale = quantise(a, is_q, scales, x);
      if constexpr (C::dynamic_q) store_q_scale(a, row, token, h, row.live ? scale : 0.0f);
    }
    if (writes) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
          if (L::exists(slot(k), which))
            store_aligned<C::write_align, C::store_dtype, L::chunk>(
                to + L::element(slot(k), which), row.live ? StorePack::from_floats(x[k][which]) : StorePack::zeros());
    }
  }

  // The lines of the caches that `finish` will look at.
  static __device__ __forceinline__ void prefetch_tail(const RopeArgs<C>& a, const Row& row, int unit) {
    const int h = head(unit);
    if (h < C::q_heads || h >= heads || lane_index() % L::lanes * 64 >= C::dim) return;
    const auto* at = a.key_of(row, 0, h - C::q_heads) + lane_index() % L::lanes * 64;
    prefetch_line(at + a.key.slot);
    if (lane_index() % L::lanes * 128 < C::dim) prefetch_line(at + (a.metadata.block_size - 1 - row.slot) * a.key.slot);
  }
};

// ---- v ------------------------------------------------------------------------------------------------------

// A unit is two chunks of 8 elements a lane.
template <class C>
struct Values {
  static constexpr int chunks = C::kv_heads * C::v_dim / 8;
  static constexpr int units = (chunks + 63) / 64;
  using InPack = Pack<C::qkv_dtype, 8>;
  using StorePack = Pack<C::store_dtype, 8>;

  static __device__ __forceinline__ int chunk(int unit, int k) { return (unit * 2 + k) * 32 + lane_index(); }

  static __device__ __forceinline__ void load(const RopeArgs<C>& a, int token, int unit, uint4 (&raw)[2]) {
    const auto* from = a.qkv + token * a.qkv_stride + (C::q_heads + C::kv_heads) * C::dim;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (chunk(unit, k) < chunks)
        raw[k] = load_aligned<C::read_align, C::qkv_dtype, 8, Cached::kOnce>(from + chunk(unit, k) * 8).words[0];
  }
  static __device__ __forceinline__ void raw_of(const typename RopeArgs<C>::In* row, int unit, uint4 (&raw)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (chunk(unit, k) < chunks)
        raw[k] = InPack::load(row + (C::q_heads + C::kv_heads) * C::dim + chunk(unit, k) * 8).words[0];
  }

  static __device__ __forceinline__ void prefetch(const RopeArgs<C>& a, int token, int unit) {
    const int first = unit * 64 + lane_index() * 8;  // in chunks; 8 are a line
    if (lane_index() < 8 && first < chunks)
      prefetch_line(a.qkv + token * a.qkv_stride + (C::q_heads + C::kv_heads) * C::dim + first * 8);
  }

  static __device__ __forceinline__ StorePack stored(const RopeArgs<C>& a, const InPack& pack, float inverse) {
    if constexpr (C::fp8) {
      float x[8];
      unpack<C::qkv_dtype>(pack, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = quantised<C::bounded>(x[i], inverse, -0.0f, a.upper_max);
      return StorePack::from_floats(x);
    } else {
      return pack;
    }
  }

  static __device__ __forceinline__ unsigned int look(const RopeArgs<C>& a, const Row& row, int unit) {
    const Tail<C, 8> tail(a, row, true);
    unsigned int found = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int element = chunk(unit, k) * 8;
      if (chunk(unit, k) < chunks)
        found |= tail.look(a.value_of(row, 0, element / C::v_dim) + element % C::v_dim, k, a.value.slot);
    }
    return found;
  }

  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int unit,
                                                const uint4 (&raw)[2], const Scales& scales) {
    if (!(C::has_out_v || row.stored)) return;
    const Tail<C, 8> tail(a, row, !C::has_out_v && C::ring == 0);
    const unsigned int found = tail.looks() ? look(a, row, unit) : 0;
    typename RopeArgs<C>::Store* to[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int element = chunk(unit, k) * 8;
      to[k] = a.value_of(row, token, element / C::v_dim) + element % C::v_dim;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (chunk(unit, k) < chunks)
        store_aligned<C::write_align, C::store_dtype, 8>(
            to[k], row.live ? stored(a, InPack{{raw[k]}}, scales.v) : StorePack::zeros());
    if (tail.behind == 0 || !(tail.fresh || __any_sync(kFullMask, found != 0))) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (chunk(unit, k) < chunks) tail.clear(to[k], a.value.slot);
  }

  static __device__ __forceinline__ void prefetch_tail(const RopeArgs<C>& a, const Row& row, int unit) {
    const int element = (unit * 64 + lane_index() * 8) * 8;
    if (lane_index() >= 8 || element >= chunks * 8) return;
    const auto* at = a.value_of(row, 0, element / C::v_dim) + element % C::v_dim;
    prefetch_line(at + a.value.slot);
    if (lane_index() < 4) prefetch_line(at + (a.metadata.block_size - 1 - row.slot) * a.value.slot);
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

// ---- the rest of the fp8 outputs ----------------------------------------------------------------------------

// Zeros in q_scale where no token is: lane = one place of one request.
template <class C>
__device__ __forceinline__ void clear_q_scale(const RopeArgs<C>& a, long long unit) {
  const int per_request = a.padded_q_len / 32;
  const int request = static_cast<int>(unit / per_request);
  const int place = static_cast<int>(unit % per_request) * 32 + lane_index();
  const Metadata& m = a.metadata;
  const long long token = static_cast<long long>(m.q_index[request]) + place;
  if (token >= 0 && token < m.tokens) {
    const int row = static_cast<int>(token);
    // That row writes its own element if the search gives it to this request (it may not where q_index is not sorted).
    if (holds_row(request, m.q_index[request], m.q_index[request + 1], row, m.tokens) &&
        find_request_alone(m.q_index, m.requests, row) == request)
      return;
  }
#pragma unroll 1
  for (int head = 0; head < C::q_heads; ++head)
    a.q_scale[(static_cast<long long>(request) * C::q_heads + head) * a.padded_q_len + place] = 0.0f;
}

template <class C>
__device__ __forceinline__ void clear_split_k_flag(const RopeArgs<C>& a, long long unit) {
  const long long flags = static_cast<long long>(a.metadata.requests) * C::kv_heads;
#pragma unroll
  for (int k = 0; k < kFlagsPerWarp; k += 32) {
    const long long at = unit * kFlagsPerWarp + k + lane_index();
    if (at < flags) a.split_k_flag[at] = 0;
  }
}

// Number `unit` of the further work.
template <class C>
__device__ __forceinline__ void clear_more(const RopeArgs<C>& a, long long unit) {
  const long long scale_units =
      C::padded_scale ? static_cast<long long>(a.metadata.requests) * (a.padded_q_len / 32) : 0;
  if (unit < scale_units) {
    clear_q_scale(a, unit);
  } else {
    clear_split_k_flag(a, unit - scale_units);
  }
}

template <class C>
__device__ __forceinline__ long long more_units(const RopeArgs<C>& a) {
  const long long requests = a.metadata.requests;
  return (C::padded_scale ? requests * (a.padded_q_len / 32) : 0) +
         (requests * C::kv_heads + kFlagsPerWarp - 1) / kFlagsPerWarp;
}

}  // namespace hccupy
