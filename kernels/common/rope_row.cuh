// One row of qkv in units of 1 KB (at head dim 128): q and k heads (v heads: common/rope_values.cuh).
//
// C is the Config of rope_norm_store_kv.cu: everything baked. A unit is what one warp holds in two registers of 16
// bytes a lane (`raw`): C::Lanes::heads_per_warp heads of q and k, or 512 elements of v. What a unit's values become
// depends on nothing but the row, so any kernel that goes through the units gives the same bits.
#pragma once

#include "common/rope.cuh"
#include "common/rope_args.cuh"

namespace hccupy {

// ---- q and k ------------------------------------------------------------------------------------------------

// A unit is C::Lanes::heads_per_warp heads: of one row, q heads first, then k heads; or, C::together, the same head of
// so many rows.
template <class C>
struct RotatedHeads {
  using L = typename C::Lanes;
  using InPack = Pack<C::qkv_dtype, L::chunk>;
  using StorePack = Pack<C::store_dtype, L::chunk>;
  static constexpr int heads = C::q_heads + C::kv_heads;
  static constexpr int of_row = C::together ? 1 : L::heads_per_warp;  // heads of one row in a unit
  static constexpr int units = (heads + of_row - 1) / of_row;
  static constexpr int q_units = C::q_heads / of_row;      // those that hold nothing but q
  static constexpr bool mixed = C::q_heads % of_row != 0;  // a unit has both
  static constexpr bool normed = C::policy != kPolicyNone;
  static constexpr bool whole = heads % of_row == 0;  // every unit is full
  static constexpr int elements = of_row * C::dim;    // of a unit and row
  static_assert(L::per_lane * sizeof(InPack) <= sizeof(uint4),
                "a lane's part of a half head must fit its register slot");

  static __device__ __forceinline__ int slot(int k) { return lane_index() % L::lanes + k * L::lanes; }
  static __device__ __forceinline__ int head(int unit) {
    return C::together ? unit : unit * of_row + lane_index() / L::lanes;
  }

  // Chunk `which` of slot k of this lane, in elements behind its first chunk.
  static __device__ __forceinline__ int behind(int k, int which) {
    return L::element(slot(k), which) - L::element(slot(0), 0);
  }
  // Where this lane's first chunk of a unit is in a row.
  static __device__ __forceinline__ int first_element(int unit) { return head(unit) * C::dim + L::element(slot(0), 0); }
  static __device__ __forceinline__ const typename RopeArgs<C>::In* first_of(const typename RopeArgs<C>::In* row,
                                                                             int unit) {
    return row + first_element(unit);
  }

  // do_pack(k, which) for the packs of this lane that exist.
  template <class Do>
  static __device__ __forceinline__ void each_pack(int unit, Do do_pack) {
    if (!whole && head(unit) >= heads) return;
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < 2; ++which)
        if (L::exists(slot(k), which)) do_pack(k, which);
  }
  // load_pack(k, which): a pack. Lanes without elements hold zeros.
  template <class Load>
  static __device__ __forceinline__ void raw_by(int unit, uint4 (&raw)[2], Load load_pack) {
    memset(raw, 0, sizeof raw);
    each_pack(unit, [&](int k, int which) {
      const InPack pack = load_pack(k, which);
      memcpy(reinterpret_cast<char*>(&raw[which]) + k * sizeof pack, &pack, sizeof pack);
    });
  }

  static constexpr int kAngles = C::interleaved ? L::chunk / 2 : L::chunk;
  using AnglePack = Pack<kFloat32, kAngles>;
  struct Angles {
    float cosine[L::per_lane][L::chunk];  // interleaved: the second chunk's angles are the upper half
    float sine[L::per_lane][L::chunk];
  };

  static constexpr int kAngleHalves = C::interleaved ? 2 : 1;
  static constexpr int kAnglePacks = 2 * L::per_lane * kAngleHalves;  // of a lane

  // do_packs(k, which, number, place) for each two packs, cosines and sines, of this lane: numbers `number` and the
  // next; `place`: where in a row of the table the cosines are, behind this lane's first.
  template <class Do>
  static __device__ __forceinline__ void each_angles(Do do_packs) {
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
      for (int which = 0; which < kAngleHalves; ++which)
        if (L::exists(slot(k), which) && L::rotated(slot(k), which))
          do_packs(k, which, 2 * (k * kAngleHalves + which), L::angle(slot(k), which) - L::angle(slot(0), 0));
  }
  // load(number, place): a pack.
  template <class Load>
  static __device__ __forceinline__ void angles_by(Angles& o, Load load) {
    each_angles([&](int k, int which, int number, int place) {
      const AnglePack c = load(number, place);
      const AnglePack s = load(number + 1, place + L::half);
#pragma unroll
      for (int i = 0; i < kAngles; ++i) {
        o.cosine[k][which * kAngles + i] = c.at(i);
        o.sine[k][which * kAngles + i] = s.at(i);
      }
    });
  }
  // Where this lane's first angles are in a row of the table.
  static __device__ __forceinline__ const float* first_angle(const float* row) { return row + L::angle(slot(0), 0); }
  static __device__ __forceinline__ const float* first_angle(const RopeArgs<C>& a, int position) {
    return first_angle(a.cos_sin + static_cast<long long>(position) * (2 * L::half));
  }
  static __device__ __forceinline__ void load_angles(const float* first, Angles& o) {
    angles_by(o, [&](int, int place) {
      return load_aligned<C::table_align, kFloat32, kAngles, Cached::kShared>(first + place);
    });
  }
  // The same from a row of the table in shared memory.
  static __device__ __forceinline__ void angles_of(const float* row, Angles& o) {
    const float* first = first_angle(row);
    angles_by(o, [&](int, int place) { return AnglePack::load(first + place); });
  }
  // Lane `lane` of `lanes` that ask for the angles of this row.
  static __device__ __forceinline__ void prefetch_angles(const RopeArgs<C>& a, int position, int lane = lane_index(),
                                                         int lanes = 32) {
#pragma unroll 1
    for (int at = lane * 32; at < 2 * L::half; at += lanes * 32)
      prefetch_line(a.cos_sin + static_cast<long long>(position) * (2 * L::half) + at);
  }

  // The norm weights of a lane's elements as they are in memory (as floats where q's and k's dtypes differ).
  static constexpr bool one_dtype = C::q_weight_dtype == C::k_weight_dtype;
  using WeightPack = Pack<one_dtype ? C::q_weight_dtype : kFloat32, L::chunk>;
  struct Weights {
    WeightPack of[L::per_lane][2];
  };

  static __device__ __forceinline__ void load_weights(const RopeArgs<C>& a, bool is_q, Weights& w) {
    weights_by<false>(a.q_weight, a.k_weight, is_q, w);
  }
  // kNear: they are in shared memory.
  template <bool kNear>
  static __device__ __forceinline__ void weights_by(const typename RopeArgs<C>::QWeight* of_q,
                                                    const typename RopeArgs<C>::KWeight* of_k, bool is_q, Weights& w) {
    if constexpr (normed) {
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!L::exists(slot(k), which)) continue;
          const int element = L::element(slot(k), which);
          if constexpr (one_dtype) {
            w.of[k][which] = weights_at<C::q_weight_dtype, kNear>((is_q ? of_q : of_k) + element);
          } else {
            float of[L::chunk];
            if (is_q) {
              weights_at<C::q_weight_dtype, kNear>(of_q + element).to_floats(of);
            } else {
              weights_at<C::k_weight_dtype, kNear>(of_k + element).to_floats(of);
            }
            w.of[k][which] = WeightPack::from_floats(of);
          }
        }
    }
  }
  template <int kDtype, bool kNear>
  static __device__ __forceinline__ Pack<kDtype, L::chunk> weights_at(const typename Element<kDtype>::Type* from) {
    if constexpr (kNear) return Pack<kDtype, L::chunk>::load(from);
    return load_aligned<C::weight_align, kDtype, L::chunk, Cached::kShared>(from);
  }

  // What turns and scales a lane's elements, for all heads of a row with the same weights. Pair j of a slot is
  // (first(j), second(j)): partners of a rotation, or two elements that nothing rotates.
  //   norm, then rotate  first' = first a - second b, second' = second c + first d, of the elements before the norm
  //                      (a, c: cosine times weight of first, second; d, b: sine times them); the head's gain comes
  //                      last
  //   rotate, then norm  a, b the cosine and the sine; c, d the weights
  //   no norm            a, b
  struct Turn {
    float a[L::per_lane][L::chunk], b[L::per_lane][L::chunk], c[L::per_lane][L::chunk], d[L::per_lane][L::chunk];
  };
  static constexpr int kPairs = L::chunk;
  // Weighted before they are normalised, the largest bf16 would overflow; a power of two changes no bits.
  static constexpr float kDown = 1.0f / 4096.0f;
  static __device__ __forceinline__ int which_of(int j) { return C::interleaved ? j / (L::chunk / 2) : 0; }
  static __device__ __forceinline__ float& first(float (&x)[2][L::chunk], int j) {
    return C::interleaved ? x[which_of(j)][j % (L::chunk / 2) * 2] : x[0][j];
  }
  static __device__ __forceinline__ float& second(float (&x)[2][L::chunk], int j) {
    return C::interleaved ? x[which_of(j)][j % (L::chunk / 2) * 2 + 1] : x[1][j];
  }

  static __device__ __forceinline__ void prepare(const RopeArgs<C>& args, const Angles& angles, const Weights& weights,
                                                 Turn& t) {
#pragma unroll
    for (int k = 0; k < L::per_lane; ++k) {
      float w[2][L::chunk];
      if constexpr (normed) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          weights.of[k][which].to_floats(w[which]);
#pragma unroll
          for (int i = 0; i < L::chunk; ++i) w[which][i] = fmaf(w[which][i], kDown, args.norm_weight_offset * kDown);
        }
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float cosine = angles.cosine[k][j];
        const float sine = angles.sine[k][j];
        if constexpr (C::policy == kNormThenRope) {
          const bool turns = L::rotated(slot(k), which_of(j));
          t.a[k][j] = turns ? cosine * first(w, j) : first(w, j);
          t.c[k][j] = turns ? cosine * second(w, j) : second(w, j);
          t.b[k][j] = sine * second(w, j);
          t.d[k][j] = sine * first(w, j);
          settle(t.a[k][j]);
          settle(t.b[k][j]);
          settle(t.c[k][j]);
          settle(t.d[k][j]);
        } else {
          t.a[k][j] = cosine;
          t.b[k][j] = sine;
          if constexpr (normed) {
            t.c[k][j] = first(w, j);
            t.d[k][j] = second(w, j);
          }
        }
      }
    }
  }

  // What becomes of a head's values, for kCount units at once.
  template <int kCount>
  static __device__ __forceinline__ bool upper() {
    return upper_of_head<L::lanes, kCount>();
  }
  using Head = float[L::per_lane][2][L::chunk];
  template <int kCount>
  static __device__ __forceinline__ float gain_of(const RopeArgs<C>& a, const Head (&x)[kCount]) {
    float sums[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) sums[n] = squares(x[n]);
    const float sum = of_head<L::lanes>(sums, [](float one, float other) { return one + other; });
    return inverse_rms_of_head<C::dim>(sum, a.norm_eps) * (1.0f / kDown);
  }

  // The heads, turned and weighted; what remains to multiply this lane's by comes back.
  template <int kCount>
  static __device__ __forceinline__ float turn(const RopeArgs<C>& a, const Turn& t, Head (&x)[kCount]) {
    float gain = 1.0f;
    if constexpr (C::policy == kNormThenRope) gain = gain_of<kCount>(a, x);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          float& one = first(x[n][k], j);
          float& other = second(x[n][k], j);
          if (L::rotated(slot(k), which_of(j))) {
            if constexpr (C::policy == kNormThenRope) {
              rotate_pair(one, other, t.a[k][j], t.b[k][j], t.c[k][j], t.d[k][j]);
            } else {
              rotate_pair(one, other, t.a[k][j], t.b[k][j], t.a[k][j], t.b[k][j]);
            }
          } else if constexpr (C::policy == kNormThenRope) {
            one *= t.a[k][j];
            other *= t.c[k][j];
          }
        }
    if constexpr (C::policy == kRopeThenNorm) {
      gain = gain_of<kCount>(a, x);
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
          for (int j = 0; j < kPairs; ++j) {
            first(x[n][k], j) *= t.c[k][j];
            second(x[n][k], j) *= t.d[k][j];
          }
    }
    return gain;
  }

  // What this lane's head, turned and weighted, is multiplied by.
  struct Factor {
    float by;            // negative: an all-zero head of dynamic q, which has no negative zeros
    float scale = 0.0f;  // what q can be multiplied back with (dynamic q)
  };
  template <int kCount>
  static __device__ __forceinline__ Factor factor_of(const RopeArgs<C>& a, bool is_q, const Scales& scales, float gain,
                                                     const Head (&x)[kCount]) {
    Factor f{C::fp8 ? gain * (is_q ? scales.q : scales.k) : gain};
    if (C::dynamic_q && (mixed || is_q)) {  // not mixed: the same in all lanes
      float most[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) most[n] = largest(x[n]);
      // A gain of NaN, or of 0 beside an infinity, leaves nothing but NaN and zeros.
      const float found = of_head<L::lanes>(most, [](float one, float other) { return fmaxf(one, other); }) * gain;
      const float absmax = fminf(fmaxf(found, 0.0f), kLargestFloat);
      const float at_least = fmaxf(absmax, kSmallestAbsmax);
      f.scale = C::bounded ? at_least / a.upper_max : divided_by<448>(at_least);
      if (is_q) {
        f.by = gain * (C::bounded ? 1.0f / f.scale : reciprocal(f.scale));
        if (absmax == 0.0f) f.by = -f.by;
      }
    }
    return f;
  }

  // Where this lane's head of a unit goes: its first element's address, and its place in q_scale (dynamic q); and the
  // way from there to the next unit.
  struct Target {
    typename RopeArgs<C>::Store* to;
    float* scale;
    long long step, scale_step;
    bool is_q, stored, scaled;
  };
  // `only_q`: of a unit that is not mixed, does it hold q?
  static __device__ __forceinline__ Target target(const RopeArgs<C>& a, const Row& row, int token, int unit,
                                                  bool only_q) {
    const int h = head(unit);
    Target t;
    t.is_q = mixed ? h < C::q_heads : only_q;
    t.stored = (!C::together || token >= 0) && (t.is_q || C::has_out_k || row.stored);
    t.to =
        (t.is_q ? a.at(a.q, a.q_strides, 0, token, h) : a.key_of(row, token, h - C::q_heads)) + L::element(slot(0), 0);
    t.step = of_row * (only_q ? a.q_strides.head : C::has_out_k ? a.out_k_strides.head : a.key.head);
    if constexpr (C::dynamic_q) {
      t.scale = a.q_scale + (C::padded_scale
                                 ? (static_cast<long long>(row.request) * C::q_heads + h) * a.padded_q_len + row.place
                                 : static_cast<long long>(token) * C::q_heads + h);
      t.scale_step = static_cast<long long>(of_row) * (C::padded_scale ? a.padded_q_len : 1);
      t.scaled = t.is_q && t.stored && (!C::padded_scale || (row.request >= 0 && row.place < a.padded_q_len));
    }
    return t;
  }
  static __device__ __forceinline__ void advance(Target& t, int units) {
    t.to += units * t.step;
    if constexpr (C::dynamic_q) t.scale += units * t.scale_step;
  }

  // kCount neighbouring units, of which the first `there` exist. A row that is not live (padding or bad) gives zeros to
  // every output and nothing to the caches.
  template <int kCount>
  static __device__ __forceinline__ void finish(const RopeArgs<C>& a, bool live, int unit, int there,
                                                const Target& target, const uint4 (&raw)[kCount][2], const Turn& t,
                                                const Scales& scales) {
    const bool second = upper<kCount>();  // this lane's unit
    const auto put_scale = [&](float scale) {
      if constexpr (C::dynamic_q) {
        if (target.scaled && lane_index() % (L::lanes / kCount) == 0 && (!second || there > 1))
          target.scale[second ? target.scale_step : 0] = scale;
      }
    };
    if (!live) {
      put_scale(0.0f);
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        if (n < there) store(unit + n, target, n, [](int, int) { return StorePack::zeros(); });
      return;
    }
    Head x[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          InPack pack;
          memcpy(&pack, reinterpret_cast<const char*>(&raw[n][which]) + k * sizeof pack, sizeof pack);
          pack.to_floats(x[n][k][which]);
        }
    const float gain = turn<kCount>(a, t, x);
    const Factor factor = factor_of<kCount>(a, target.is_q, scales, gain, x);
    put_scale(factor.scale);
    float by[kCount] = {factor.by};
    if constexpr (kCount == 2) {
      const float other = __shfl_xor_sync(kFullMask, factor.by, L::lanes / 2);
      by[0] = second ? other : factor.by;
      by[1] = second ? factor.by : other;
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if constexpr (C::fp8 || normed) {
        // fp8: -0 added leaves every product as it is.
        const bool no_minus = C::dynamic_q && target.is_q;
        const float zero = float_from_bits((no_minus ? ~float_bits(by[n]) : ~0u) & 0x80000000u);
#pragma unroll
        for (int k = 0; k < L::per_lane; ++k)
#pragma unroll
          for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int i = 0; i < L::chunk; ++i) {
              float& value = x[n][k][which][i];
              value = C::fp8 ? quantised<C::bounded>(value, by[n], zero, a.upper_max) : value * by[n];
            }
      }
      if (n < there)
        store(unit + n, target, n, [&](int k, int which) { return StorePack::from_floats(x[n][k][which]); });
    }
  }
  template <class Values>
  static __device__ __forceinline__ void store(int unit, const Target& target, int n, Values values) {
    if (!target.stored) return;
    auto* to = target.to + n * target.step;
    each_pack(unit, [&](int k, int which) {
      store_aligned<C::write_align, C::store_dtype, L::chunk>(to + behind(k, which), values(k, which));
    });
  }
};

}  // namespace hccupy
