// One row of qkv, shared out over warps: arguments, the q and k heads, the v heads, and the tail behind the last row.
//
// C is the Config of rope_norm_store_kv.cu: everything baked. A warp holds 2 * C::steps registers of 16 bytes a lane
// (`raw`), filled before anything waits, either from C::steps groups of q and k heads or from v.
#pragma once

#include "common/rope.cuh"

namespace hccupy {

enum { kPolicyNone = 0, kRopeThenNorm = 1, kNormThenRope = 2 };
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

// value * inverse scale, held inside +-bound; NaN stays NaN (comparisons with it are false).
__device__ __forceinline__ float quantised(float value, float inverse, float bound) {
  const float scaled = value * inverse;
  return scaled > bound ? bound : scaled < -bound ? -bound : scaled;
}

// ---- tail ---------------------------------------------------------------------------------------------------

// The slots behind a request's last token, in its page, become zero bytes. The warps of the last token's row share
// them: warp `part` owns every kParts-th slot, in batches of 8.
//
// With C::tail_probe a batch is left alone if it is clean already: rewriting whole tails at each decode step costs
// more than the rest of the op. Clean means that the first 8 elements of the K and V vectors of two heads of each of
// its slots are zero; a written token never looks like that, so slots of a rolled-back draft are found, and so is a
// page that came full of NaN. If the page's first slot is among this call's tokens nobody has cleared it, and no look
// is taken. (A lone non-zero value in the rest of an otherwise clean batch stays: clear such a page with zero_kv_tail.)
template <class C>
struct Tail {
  const RopeArgs<C>& args;
  const Row& row;
  int part;
  bool wanted;
  bool fresh;

  __device__ __forceinline__ Tail(const RopeArgs<C>& a, const Row& r, int p)
      : args(a),
        row(r),
        part(p),
        wanted(C::tail_zero && r.stored && r.last),
        fresh(!C::tail_probe || r.place >= r.slot) {}

  __device__ __forceinline__ int slot(int batch, int index) const {
    return row.slot + 1 + part + (batch * 8 + index) * C::parts;
  }

  // Not 0 if this lane's look at the batch finds something: 4 lanes a slot, K and V of two heads.
  __device__ __forceinline__ unsigned int look(int batch) const {
    const int lane = lane_index();
    const int at = slot(batch, lane / 4);
    const bool is_k = (lane & 1) == 0;
    const int head = (lane & 2) != 0 ? C::kv_heads / 2 : 0;
    if (!wanted || fresh || at >= args.metadata.block_size || (is_k ? C::has_out_k : C::has_out_v)) return 0;
    const auto* from = is_k ? args.at(args.key_cache, args.key, row.page, at, head)
                            : args.at(args.value_cache, args.value, row.page, at, head);
    const auto pack = load_aligned<C::write_align, C::store_dtype, 8, Cached::kOnce>(from);
    unsigned int words[sizeof pack / 4];
    memcpy(words, &pack, sizeof pack);
    unsigned int found = 0;
#pragma unroll
    for (unsigned int word : words) found |= word;
    return found;
  }

  // `found`: look(0), taken early so that it overlaps the rest of the row's work.
  __device__ __forceinline__ void clear(unsigned int found) const {
    if (!wanted) return;
    constexpr int kSize = static_cast<int>(sizeof(typename RopeArgs<C>::Store));
#pragma unroll 1
    for (int batch = 0; slot(batch, 0) < args.metadata.block_size; ++batch) {
      if (batch > 0) found = look(batch);
      if (!fresh && __ballot_sync(kFullMask, found != 0) == 0) continue;
#pragma unroll 1
      for (int index = 0; index < 8 && slot(batch, index) < args.metadata.block_size; ++index) {
        if constexpr (!C::has_out_k)
          clear_vectors<C::write_align, C::kv_heads, C::dim * kSize>(
              reinterpret_cast<char*>(args.at(args.key_cache, args.key, row.page, slot(batch, index), 0)),
              args.key.head * kSize);
        if constexpr (!C::has_out_v)
          clear_vectors<C::write_align, C::kv_heads, C::v_dim * kSize>(
              reinterpret_cast<char*>(args.at(args.value_cache, args.value, row.page, slot(batch, index), 0)),
              args.value.head * kSize);
      }
    }
  }
};

// ---- q and k ------------------------------------------------------------------------------------------------

// C::steps groups of heads of one row: q heads first, then k heads, C::Lanes::heads_per_warp at a time.
template <class C>
struct RotatedHeads {
  using L = typename C::Lanes;
  using InPack = Pack<C::qkv_dtype, L::chunk>;
  using StorePack = Pack<C::store_dtype, L::chunk>;
  static constexpr int heads = C::q_heads + C::kv_heads;
  static_assert(L::per_lane * sizeof(InPack) <= sizeof(uint4),
                "a lane's part of a half head must fit its register slot");

  static __device__ __forceinline__ int slot(int k) { return lane_index() % L::lanes + k * L::lanes; }
  static __device__ __forceinline__ int head(int part, int step) {
    return (part * C::steps + step) * L::heads_per_warp + lane_index() / L::lanes;
  }

  // All loads of the warp are in flight before anything waits for one. Lanes without elements hold zeros.
  static __device__ __forceinline__ void load(const RopeArgs<C>& a, int token, int part, uint4 (&raw)[2 * C::steps]) {
    const auto* from = a.qkv + token * a.qkv_stride;
#pragma unroll
    for (int step = 0; step < C::steps; ++step) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          InPack pack = InPack::zeros();
          if (head(part, step) < heads && L::exists(slot(k), which)) {
            pack = load_aligned<C::read_align, C::qkv_dtype, L::chunk, Cached::kOnce>(from + head(part, step) * C::dim +
                                                                                      L::element(slot(k), which));
          }
          memcpy(reinterpret_cast<char*>(&raw[2 * step + which]) + k * sizeof pack, &pack, sizeof pack);
        }
      }
    }
  }

  // What a row needs besides its elements. Loaded before anything depends on the page, so that the trips overlap.
  struct Operands {
    float cosine[L::per_lane][L::chunk];  // interleaved: the second chunk's angles are the upper half
    float sine[L::per_lane][L::chunk];
    float weight[L::per_lane][2][L::chunk];  // early_weights only
  };

  static __device__ __forceinline__ void load_angles(const RopeArgs<C>& a, const Row& row, Operands& o) {
    if (!row.placed) return;
    const float* table = a.cos_sin + static_cast<long long>(row.position) * (2 * L::half);
    constexpr int kHalves = C::interleaved ? 2 : 1;
    constexpr int kCount = L::chunk / kHalves;
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < kHalves; ++which) {
        if (!L::exists(slot(k), which) || !L::rotated(slot(k), which)) continue;
        const float* from = table + L::angle(slot(k), which);
        const auto c = load_aligned<C::table_align, kFloat32, kCount, Cached::kShared>(from);
        const auto s = load_aligned<C::table_align, kFloat32, kCount, Cached::kShared>(from + L::half);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          o.cosine[k][which * kCount + i] = c.at(i);
          o.sine[k][which * kCount + i] = s.at(i);
        }
      }
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

  // Norm weights of a chunk (the load differs where q's and k's have different dtypes).
  static __device__ __forceinline__ void weights_of(const RopeArgs<C>& a, bool is_q, int element,
                                                    float (&w)[L::chunk]) {
    if constexpr (C::q_weight_dtype == C::k_weight_dtype) {
      load_aligned<C::weight_align, C::q_weight_dtype, L::chunk, Cached::kShared>((is_q ? a.q_weight : a.k_weight) +
                                                                                  element)
          .to_floats(w);
    } else if (is_q) {
      load_aligned<C::weight_align, C::q_weight_dtype, L::chunk, Cached::kShared>(a.q_weight + element).to_floats(w);
    } else {
      load_aligned<C::weight_align, C::k_weight_dtype, L::chunk, Cached::kShared>(a.k_weight + element).to_floats(w);
    }
  }

  // With one step the weights come along with the row; with more they are in L1 when they are needed.
  static constexpr bool early_weights = C::policy != kPolicyNone && C::steps == 1;
  static __device__ __forceinline__ void load_weights(const RopeArgs<C>& a, int part, Operands& o) {
    if constexpr (early_weights) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
          if (L::exists(slot(k), which))
            weights_of(a, head(part, 0) < C::q_heads, L::element(slot(k), which), o.weight[k][which]);
    }
  }

  static __device__ __forceinline__ void normalise(const RopeArgs<C>& a, bool is_q, const Operands& o,
                                                   float (&x)[L::per_lane][2][L::chunk]) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < L::chunk; ++i) sum = fmaf(x[k][which][i], x[k][which][i], sum);
    const float inverse = inverse_rms_of_head<C::dim>(warp_sum<L::lanes>(sum), a.norm_eps);
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!L::exists(slot(k), which)) continue;
        float w[L::chunk];
        if constexpr (!early_weights) weights_of(a, is_q, L::element(slot(k), which), w);
#pragma unroll
        for (int i = 0; i < L::chunk; ++i)
          x[k][which][i] =
              x[k][which][i] * inverse * ((early_weights ? o.weight[k][which][i] : w[i]) + a.norm_weight_offset);
      }
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
  static __device__ __forceinline__ float quantise(const RopeArgs<C>& a, bool is_q, float inverse_k,
                                                   float (&x)[L::per_lane][2][L::chunk]) {
    float scale = 0.0f;
    float inverse = inverse_k;
    bool nothing = false;
    if constexpr (C::dynamic_q) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
          for (int i = 0; i < L::chunk; ++i) largest = fmaxf(largest, fabsf(x[k][which][i]));
      largest = fminf(warp_max<L::lanes>(largest), kLargestFloat);
      scale = fmaxf(largest, kSmallestAbsmax) / a.upper_max;
      inverse = is_q ? 1.0f / scale : inverse_k;
      nothing = is_q && largest == 0.0f;
    } else {
      inverse = is_q ? *a.q_scale_inv : inverse_k;
    }
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < L::chunk; ++i) {
          const float value = quantised(x[k][which][i], inverse, a.upper_max);
          x[k][which][i] = nothing ? value + 0.0f : value;  // an all-zero head has no negative zeros
        }
    return scale;
  }

  // A row that is padding or bad gives zeros to every output and nothing to the caches.
  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int part,
                                                const uint4 (&raw)[2 * C::steps], const Operands& o, float scale_kv) {
    const float inverse_k = C::fp8 ? 1.0f / scale_kv : 1.0f;
#pragma unroll
    for (int step = 0; step < C::steps; ++step) {
      const int h = head(part, step);
      const bool is_q = h < C::q_heads;
      float x[L::per_lane][2][L::chunk];
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          InPack pack;
          memcpy(&pack, reinterpret_cast<const char*>(&raw[2 * step + which]) + k * sizeof pack, sizeof pack);
          pack.to_floats(x[k][which]);
        }
      if constexpr (C::policy == kNormThenRope) normalise(a, is_q, o, x);
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k) rotate(x[k], k, o.cosine[k], o.sine[k]);
      if constexpr (C::policy == kRopeThenNorm) normalise(a, is_q, o, x);
      if constexpr (C::fp8) {
        const float scale = quantise(a, is_q, inverse_k, x);
        if constexpr (C::dynamic_q) store_q_scale(a, row, token, h, row.live ? scale : 0.0f);
      }
      if (h >= heads || !(is_q || C::has_out_k || row.stored)) continue;
      auto* to = is_q ? a.at(a.q, a.q_strides, 0, token, h) : a.key_of(row, token, h - C::q_heads);
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which)
          if (L::exists(slot(k), which))
            store_aligned<C::write_align, C::store_dtype, L::chunk>(
                to + L::element(slot(k), which), row.live ? StorePack::from_floats(x[k][which]) : StorePack::zeros());
    }
  }
};

// ---- v ------------------------------------------------------------------------------------------------------

// 2 * C::steps chunks of 8 elements a lane, of the v heads of one row.
template <class C>
struct Values {
  static constexpr int chunks = C::kv_heads * C::v_dim / 8;
  static constexpr int count = 2 * C::steps;
  using InPack = Pack<C::qkv_dtype, 8>;
  using StorePack = Pack<C::store_dtype, 8>;

  static __device__ __forceinline__ int chunk(int part, int k) { return (part * count + k) * 32 + lane_index(); }

  static __device__ __forceinline__ void load(const RopeArgs<C>& a, int token, int part, uint4 (&raw)[count]) {
    const auto* from = a.qkv + token * a.qkv_stride + (C::q_heads + C::kv_heads) * C::dim;
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (chunk(part, k) < chunks)
        raw[k] = load_aligned<C::read_align, C::qkv_dtype, 8, Cached::kOnce>(from + chunk(part, k) * 8).words[0];
  }

  static __device__ __forceinline__ StorePack stored(const RopeArgs<C>& a, const InPack& pack, float inverse) {
    if constexpr (C::fp8) {
      float x[8];
      pack.to_floats(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = quantised(x[i], inverse, a.upper_max);
      return StorePack::from_floats(x);
    } else {
      return pack;
    }
  }

  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int part,
                                                const uint4 (&raw)[count], float scale_kv) {
    if (!(C::has_out_v || row.stored)) return;
    const float inverse = C::fp8 ? 1.0f / scale_kv : 1.0f;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const int at = chunk(part, k) * 8;
      if (at >= chunks * 8) continue;
      store_aligned<C::write_align, C::store_dtype, 8>(
          a.value_of(row, token, at / C::v_dim) + at % C::v_dim,
          row.live ? stored(a, InPack{{raw[k]}}, inverse) : StorePack::zeros());
    }
  }
};

}  // namespace hccupy
