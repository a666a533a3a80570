// RoPE, QK-RMSNorm and the paged KV write of one layer, in one pass over the qkv projection; bf16, fp16 or FP8 caches.
//
//   position = seq_lens[b] - new tokens of b + place of the row in b        b: the request that holds the row
//   rotate   (first, second) -> (first cos - second sin, second cos + first sin) over dims < rotary_dim
//   norm     x / sqrt(mean(x^2) + norm_eps) * (weight + norm_weight_offset)
//   q, k     rotate, or rotate then norm, or norm then rotate; fp32, rounded once
//   fp8      stored = saturate(value * (1 / scale)) to +-upper_max; q scale = max(absmax, 1e-12) / upper_max per row
//            and head, or q * q_scale_inv. absmax ignores NaN and takes Inf for the largest finite float
//   v        copied bit for bit, or quantised as k
//
//   argument                   shape                                        dtype
//   key_cache, value_cache     [num_blocks, block_size, kv_heads, (v_)head_dim]  as qkv; e4m3, uint8 or int8
//   qkv                        [tokens, (q_heads + kv_heads) head_dim + kv_heads v_head_dim]  bf16, fp16
//   cos_sin                    [positions, rotary_dim]                      fp32: cosines, then sines
//   seq_lens, q_index          [requests], [requests + 1]                   int32
//   block_table                [requests, max_blocks]                       int32
//   q_norm_weight, k_norm_..   [head_dim]                                   fp32, or as qkv; null without a norm
//   k_scale, v_scale, q_scale_inv  [1]                                      fp32 (fp8 only)
//   q                          [tokens, q_heads, head_dim]                  as qkv; e4m3
//   q_scale                    [tokens, q_heads]; prefill [requests, q_heads, max_q_len up to a multiple of 128]  fp32
//   split_k_flag               [requests, kv_heads]                         int32 zeros
//   out_k, out_v               [tokens, kv_heads, (v_)head_dim]             as the caches, which they replace
//
// Rows of no request, or with a bad position or page, write nothing to the caches, and zeros everywhere else.
// tail zero: the row that is its request's last also clears the slots behind it in its page (see clear_tail).
//
// Baked: heads, dims, dtypes, norm policy, rope style. Run time: tokens, requests, all lengths and strides of caches.
// Launch: one warp per unit, blocks of up to kThreads. Units: tokens x kParts, then (fp8) ceil(requests * padded / 32)
// for q_scale in prefill with dynamic q, then ceil(requests * kv_heads / 128) for split_k_flag. May be a dependent launch.

#include "common/rope.cuh"

namespace hccupy {

enum { kPolicyNone = 0, kRopeThenNorm = 1, kNormThenRope = 2 };
constexpr float kLargestFloat = 3.402823466e38f;
constexpr float kSmallestAbsmax = 1e-12f;
constexpr int kFlagsPerWarp = 128;

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
// its slots are zero; a written token never looks like that, so slots of a rolled-back draft are found, and so is a page
// that came full of NaN. If the page's first slot is among this call's tokens nobody has cleared it, and no look is
// taken. (A lone non-zero value in the rest of an otherwise clean batch stays: clear such a page with zero_kv_tail.)
template <class C>
struct Tail {
  const RopeArgs<C>& args;
  const Row& row;
  int part;
  bool wanted;
  bool fresh;

  __device__ __forceinline__ Tail(const RopeArgs<C>& a, const Row& r, int p)
      : args(a), row(r), part(p), wanted(C::tail_zero && r.stored && r.last), fresh(!C::tail_probe || r.place >= r.slot) {}

  __device__ __forceinline__ int slot(int batch, int index) const { return row.slot + 1 + part + (batch * 8 + index) * C::parts; }

  // Not 0 if this lane's look at the batch finds something: 4 lanes a slot, K and V of two heads.
  __device__ __forceinline__ unsigned int look(int batch) const {
    const int lane = lane_index();
    const int at = slot(batch, lane / 4);
    const bool is_k = (lane & 1) == 0;
    const int head = (lane & 2) != 0 ? C::kv_heads / 2 : 0;
    if (!wanted || fresh || at >= args.metadata.block_size || (is_k ? C::has_out_k : C::has_out_v)) return 0;
    const auto* from = is_k ? args.at(args.key_cache, args.key, row.page, at, head) : args.at(args.value_cache, args.value, row.page, at, head);
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
              reinterpret_cast<char*>(args.at(args.key_cache, args.key, row.page, slot(batch, index), 0)), args.key.head * kSize);
        if constexpr (!C::has_out_v)
          clear_vectors<C::write_align, C::kv_heads, C::v_dim * kSize>(
              reinterpret_cast<char*>(args.at(args.value_cache, args.value, row.page, slot(batch, index), 0)), args.value.head * kSize);
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
  static_assert(L::per_lane * sizeof(InPack) <= sizeof(uint4), "a lane's part of a half head must fit its register slot");

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
            pack = load_aligned<C::read_align, C::qkv_dtype, L::chunk, Cached::kOnce>(
                from + head(part, step) * C::dim + L::element(slot(k), which));
          }
          memcpy(reinterpret_cast<char*>(&raw[2 * step + which]) + k * sizeof pack, &pack, sizeof pack);
        }
      }
    }
  }

  // Cosines and sines of a slot. Interleaved, the second chunk's angles are the upper half of the arrays.
  static __device__ __forceinline__ void load_angles(const float* table, int k, float (&cosine)[L::chunk], float (&sine)[L::chunk]) {
    if constexpr (C::interleaved) {
      constexpr int kCount = L::chunk / 2;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (L::exists(slot(k), which) && L::rotated(slot(k), which)) {
          const float* from = table + L::angle(slot(k), which);
          const auto c = load_aligned<C::table_align, kFloat32, kCount, Cached::kShared>(from);
          const auto s = load_aligned<C::table_align, kFloat32, kCount, Cached::kShared>(from + L::half);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            cosine[which * kCount + i] = c.at(i);
            sine[which * kCount + i] = s.at(i);
          }
        }
      }
    } else if (L::exists(slot(k), 0) && L::rotated(slot(k), 0)) {
      load_aligned<C::table_align, kFloat32, L::chunk, Cached::kShared>(table + L::angle(slot(k), 0)).to_floats(cosine);
      load_aligned<C::table_align, kFloat32, L::chunk, Cached::kShared>(table + L::angle(slot(k), 0) + L::half).to_floats(sine);
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
          rotate_pair(x[which][2 * i], x[which][2 * i + 1], cosine[which * L::chunk / 2 + i], sine[which * L::chunk / 2 + i]);
      }
    } else if (L::rotated(slot(k), 0)) {
#pragma unroll
      for (int i = 0; i < L::chunk; ++i) rotate_pair(x[0][i], x[1][i], cosine[i], sine[i]);
    }
  }

  template <int kDtype>
  static __device__ __forceinline__ void scale(float (&x)[L::chunk], const typename Element<kDtype>::Type* weight, float inverse, float offset) {
    float w[L::chunk];
    load_aligned<C::weight_align, kDtype, L::chunk, Cached::kShared>(weight).to_floats(w);
#pragma unroll
    for (int i = 0; i < L::chunk; ++i) x[i] = x[i] * inverse * (w[i] + offset);
  }

  static __device__ __forceinline__ void normalise(const RopeArgs<C>& a, bool is_q, float (&x)[L::per_lane][2][L::chunk]) {
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
        const int element = L::element(slot(k), which);
        if constexpr (C::q_weight_dtype == C::k_weight_dtype) {
          scale<C::q_weight_dtype>(x[k][which], (is_q ? a.q_weight : a.k_weight) + element, inverse, a.norm_weight_offset);
        } else if (is_q) {
          scale<C::q_weight_dtype>(x[k][which], a.q_weight + element, inverse, a.norm_weight_offset);
        } else {
          scale<C::k_weight_dtype>(x[k][which], a.k_weight + element, inverse, a.norm_weight_offset);
        }
      }
  }

  static __device__ __forceinline__ void store_q_scale(const RopeArgs<C>& a, const Row& row, int token, int head, float scale) {
    if (lane_index() % L::lanes != 0 || head >= C::q_heads) return;
    if constexpr (!C::padded_scale) {
      a.q_scale[static_cast<long long>(token) * C::q_heads + head] = scale;
    } else if (row.request >= 0 && row.place < a.padded_q_len) {
      a.q_scale[(static_cast<long long>(row.request) * C::q_heads + head) * a.padded_q_len + row.place] = scale;
    }
  }

  // Quantises x of one head in place; returns with what it can be multiplied back (dynamic q).
  static __device__ __forceinline__ float quantise(const RopeArgs<C>& a, bool is_q, float inverse_k, float (&x)[L::per_lane][2][L::chunk]) {
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
  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int part, const uint4 (&raw)[2 * C::steps]) {
    float cosine[L::per_lane][L::chunk];
    float sine[L::per_lane][L::chunk];
    const float* table = a.cos_sin + static_cast<long long>(row.position) * (2 * L::half);
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
      if (row.live) load_angles(table, k, cosine[k], sine[k]);
    float inverse_k = 1.0f;
    if constexpr (C::fp8) inverse_k = 1.0f / *a.k_scale;

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
      if constexpr (C::policy == kNormThenRope) normalise(a, is_q, x);
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k) rotate(x[k], k, cosine[k], sine[k]);
      if constexpr (C::policy == kRopeThenNorm) normalise(a, is_q, x);
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
            store_aligned<C::write_align, C::store_dtype, L::chunk>(to + L::element(slot(k), which),
                                                                    row.live ? StorePack::from_floats(x[k][which]) : StorePack::zeros());
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
      if (chunk(part, k) < chunks) raw[k] = load_aligned<C::read_align, C::qkv_dtype, 8, Cached::kOnce>(from + chunk(part, k) * 8).words[0];
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

  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token, int part, const uint4 (&raw)[count]) {
    if (!(C::has_out_v || row.stored)) return;
    float inverse = 1.0f;
    if constexpr (C::fp8) inverse = 1.0f / *a.v_scale;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const int at = chunk(part, k) * 8;
      if (at >= chunks * 8) continue;
      store_aligned<C::write_align, C::store_dtype, 8>(a.value_of(row, token, at / C::v_dim) + at % C::v_dim,
                                                       row.live ? stored(a, InPack{{raw[k]}}, inverse) : StorePack::zeros());
    }
  }
};

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

// ---- kernel -------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void rope_norm_store_kv_body(const RopeArgs<C>& a) {
  let_next_grid_start();
  wait_for_previous_grid();
  long long unit = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const long long row_units = static_cast<long long>(a.metadata.tokens) * C::parts;
  if (unit >= row_units) {
    if constexpr (C::fp8) {
      unit -= row_units;
      const long long scale_units = C::padded_scale ? static_cast<long long>(a.metadata.requests) * (a.padded_q_len / 32) : 0;
      if (unit < scale_units) {
        clear_q_scale(a, unit);
      } else {
        clear_split_k_flag(a, unit - scale_units);
      }
    }
    return;
  }
  const int token = static_cast<int>(unit / C::parts);
  const int part = static_cast<int>(unit % C::parts);
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  const bool rotated = part < C::rotated_parts;
  uint4 raw[2 * C::steps];
  if (rotated) {
    RotatedHeads<C>::load(a, token, part, raw);
  } else {
    Values<C>::load(a, token, part - C::rotated_parts, raw);
  }
  const Row row = locate_row<kPaged, C::has_null>(a.metadata, token);
  const Tail<C> tail(a, row, part);
  const unsigned int found = tail.look(0);
  if (rotated) {
    RotatedHeads<C>::finish(a, row, token, part, raw);
  } else {
    Values<C>::finish(a, row, token, part - C::rotated_parts, raw);
  }
  tail.clear(found);
}

}  // namespace hccupy

struct Config {
  static constexpr int qkv_dtype = kQkvDtype;
  static constexpr bool fp8 = kFp8;
  static constexpr int store_dtype = kFp8 ? hccupy::kFloat8E4m3 : kQkvDtype;  // uint8 and int8 caches hold e4m3
  static constexpr int q_weight_dtype = kQNormWeightDtype, k_weight_dtype = kKNormWeightDtype;
  static constexpr int q_heads = kQHeads, kv_heads = kKvHeads, dim = kHeadDim, v_dim = kVHeadDim;
  static constexpr bool interleaved = kRopeStyle == 1;
  static constexpr int policy = kQkNormPolicy;
  static constexpr bool tail_zero = kTail == 0, tail_probe = kTailProbe;
  static constexpr bool has_null = kHasNullBlock, has_out_k = kHasOutK, has_out_v = kHasOutV;
  static constexpr int steps = kSteps, rotated_parts = kRotatedParts, parts = kParts;
  static constexpr int read_align = kReadAlign, write_align = kWriteAlign, table_align = kTableAlign, weight_align = kWeightAlign;
  using Lanes = hccupy::HeadLanes<kHeadDim, kRotaryDim, interleaved>;
#if kFp8
  static constexpr bool dynamic_q = kQQuant == 0, padded_scale = dynamic_q && kIsPrefill;
#else
  static constexpr bool dynamic_q = false, padded_scale = false;
#endif
  static_assert(rotated_parts * steps * Lanes::heads_per_warp >= q_heads + kv_heads, "the host must cover every q and k head");
  static_assert((parts - rotated_parts) * steps * 64 * 8 >= kv_heads * v_dim, "the host must cover every v element");
};

using In = hccupy::Element<kQkvDtype>::Type;
using Cache = hccupy::Element<kKeyCacheDtype>::Type;
using Store = hccupy::Element<Config::store_dtype>::Type;
using QWeight = hccupy::Element<kQNormWeightDtype>::Type;
using KWeight = hccupy::Element<kKNormWeightDtype>::Type;

#if !kFp8  // one entry a binary: the defines of the other op are not there
extern "C" __global__ void __launch_bounds__(kThreads)
    rope_norm_store_kv(Cache* key_cache, Cache* value_cache, const In* qkv, const float* cos_sin, const int* seq_lens,
                       const int* q_index, const int* block_table, const QWeight* q_norm_weight, const KWeight* k_norm_weight,
                       Store* q, Cache* out_k, Cache* out_v, long long key_cache_stride_num_blocks,
                       long long key_cache_stride_block_size, long long key_cache_stride_kv_heads,
                       long long value_cache_stride_num_blocks, long long value_cache_stride_block_size,
                       long long value_cache_stride_kv_heads, long long qkv_stride_tokens, long long block_table_stride_requests,
                       long long q_stride_tokens, long long q_stride_q_heads, long long out_k_stride_tokens,
                       long long out_k_stride_kv_heads, long long out_v_stride_tokens, long long out_v_stride_kv_heads,
                       float norm_eps, float norm_weight_offset, int null_block, int tokens, int requests, int positions,
                       int num_blocks, int block_size, int max_blocks) {
  hccupy::rope_norm_store_kv_body<Config>(
      {{seq_lens, q_index, block_table, block_table_stride_requests, tokens, requests, positions, num_blocks, block_size,
        max_blocks, null_block},
       qkv, qkv_stride_tokens, cos_sin, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset, key_cache, value_cache,
       {key_cache_stride_num_blocks, key_cache_stride_block_size, key_cache_stride_kv_heads},
       {value_cache_stride_num_blocks, value_cache_stride_block_size, value_cache_stride_kv_heads},
       q, out_k, out_v, {0, q_stride_tokens, q_stride_q_heads}, {0, out_k_stride_tokens, out_k_stride_kv_heads},
       {0, out_v_stride_tokens, out_v_stride_kv_heads}, nullptr, nullptr, nullptr, nullptr, nullptr, 0.0f, 0});
}
#else
extern "C" __global__ void __launch_bounds__(kThreads)
    rope_norm_store_kv_fp8(Cache* key_cache, Cache* value_cache, const In* qkv, const float* cos_sin, const int* seq_lens,
                           const int* q_index, const int* block_table, const QWeight* q_norm_weight, const KWeight* k_norm_weight,
                           const float* k_scale, const float* v_scale, const float* q_scale_inv, Store* q, float* q_scale,
                           int* split_k_flag, Cache* out_k, Cache* out_v, long long key_cache_stride_num_blocks,
                           long long key_cache_stride_block_size, long long key_cache_stride_kv_heads,
                           long long value_cache_stride_num_blocks, long long value_cache_stride_block_size,
                           long long value_cache_stride_kv_heads, long long qkv_stride_tokens,
                           long long block_table_stride_requests, long long q_stride_tokens, long long q_stride_q_heads,
                           long long out_k_stride_tokens, long long out_k_stride_kv_heads, long long out_v_stride_tokens,
                           long long out_v_stride_kv_heads, float norm_eps, float norm_weight_offset, int null_block,
                           float upper_max, int max_q_len, int tokens, int requests, int positions, int num_blocks,
                           int block_size, int max_blocks) {
  auto bytes = [](Cache* at) { return reinterpret_cast<Store*>(at); };
  hccupy::rope_norm_store_kv_body<Config>(
      {{seq_lens, q_index, block_table, block_table_stride_requests, tokens, requests, positions, num_blocks, block_size,
        max_blocks, null_block},
       qkv, qkv_stride_tokens, cos_sin, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset, bytes(key_cache),
       bytes(value_cache),
       {key_cache_stride_num_blocks, key_cache_stride_block_size, key_cache_stride_kv_heads},
       {value_cache_stride_num_blocks, value_cache_stride_block_size, value_cache_stride_kv_heads},
       q, bytes(out_k), bytes(out_v), {0, q_stride_tokens, q_stride_q_heads}, {0, out_k_stride_tokens, out_k_stride_kv_heads},
       {0, out_v_stride_tokens, out_v_stride_kv_heads}, k_scale, v_scale, q_scale_inv, q_scale, split_k_flag,
       kHasUpperMax ? upper_max : 448.0f, (max_q_len + 127) / 128 * 128});
}
#endif
