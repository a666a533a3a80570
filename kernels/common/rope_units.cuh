// How the units of a row are shared among its warps: some have q alone, whose weights they keep; the others k and v.
#pragma once

#include "common/rope_values.cuh"

namespace hccupy {

template <class C>
struct Share {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  static constexpr int units = Rotated::units + V::units;
  static constexpr int q_warps = (Rotated::q_units + C::steps - 1) / C::steps;
  static constexpr int kv_warps = (units - Rotated::q_units + C::steps - 1) / C::steps;
  static constexpr int warps = q_warps + kv_warps;
  static constexpr int row_elements = (C::q_heads + C::kv_heads) * C::dim + C::kv_heads * C::v_dim;

  bool only_q;
  int first, end;  // its units

  __device__ __forceinline__ explicit Share(int part) {
    only_q = part < q_warps;
    first = only_q ? part * C::steps : Rotated::q_units + (part - q_warps) * C::steps;
    const int last = only_q ? Rotated::q_units : units;
    end = first + C::steps < last ? first + C::steps : last;
  }

  // Asks for the first units of its part of a row in L2, eight lanes a unit. All 8 of a part: 64/8 heads, 1024
  // rows 12.65
  // -> 12.95 us, 4096 42.95 -> 43.5.
  __device__ __forceinline__ void prefetch(const typename RopeArgs<C>::In* row) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof *row);
#pragma unroll 1
    for (int unit = first + lane_index() / 8; unit < end && unit < first + 4; unit += 4) {
      const bool rotated = unit < Rotated::units;
      const int start = rotated ? unit * Rotated::elements
                                : (C::q_heads + C::kv_heads) * C::dim + (unit - Rotated::units) * V::elements;
      const int at = lane_index() % 8 * kLine;
      if (at < (rotated ? Rotated::elements : V::elements) && start + at < row_elements)
        prefetch_line(row + start + at);
    }
  }

  __device__ __forceinline__ void load_weights(const RopeArgs<C>& a, int unit,
                                               typename Rotated::Weights& weights) const {
    if (unit < Rotated::units) Rotated::load_weights(a, Rotated::head(unit) < C::q_heads, weights);
  }

  // Every lane has 16 bytes in each register of a unit, or there is nothing for it.
  static constexpr bool full = C::Lanes::full && C::Lanes::chunk == 8;

  // Where this lane's part of a unit starts in a row (full: at its start where there is nothing, to load rubbish).
  __device__ __forceinline__ const typename RopeArgs<C>::In* first_of(const typename RopeArgs<C>::In* row,
                                                                      int unit) const {
    const bool rotated = unit < Rotated::units;
    const bool there = rotated ? Rotated::whole || Rotated::head(unit) < Rotated::heads
                               : V::whole || V::chunk(unit - Rotated::units, 0) < V::chunks;
    if (full && !there) return row;
    return rotated ? Rotated::first_of(row, unit) : V::first_of(row, unit - Rotated::units);
  }
  // A unit by do_rotated(k, which, address) or do_v(k, address) for each of its packs.
  template <class Rotate, class Value>
  static __device__ __forceinline__ void by(const typename RopeArgs<C>::In* from, int unit, uint4 (&raw)[2],
                                            Rotate rotated, Value value) {
    if constexpr (full) {
      // One load serves both kinds, and lanes that have nothing: of two, each under its condition, the second may wait
      // for the first.
      const bool rotated = unit < Rotated::units;
      const bool there = V::whole || V::chunk(unit - Rotated::units, 1) < V::chunks;
      raw[0] = value(from).words[0];
      raw[1] = value(from + (rotated ? Rotated::behind(0, 1) : there ? V::apart : 0)).words[0];
    } else if (unit < Rotated::units) {
      Rotated::raw_by(unit, raw, [&](int k, int which) { return rotated(from + Rotated::behind(k, which)); });
    } else {
      V::raw_by(unit - Rotated::units, raw, [&](int k) { return value(from + k * V::apart); });
    }
  }
  __device__ __forceinline__ void load(const typename RopeArgs<C>::In* from, int unit, uint4 (&raw)[2]) const {
    by(
        from, unit, raw,
        [](const auto* at) { return load_aligned<C::read_align, C::qkv_dtype, C::Lanes::chunk, Cached::kOnce>(at); },
        [](const auto* at) { return load_aligned<C::read_align, C::qkv_dtype, 8, Cached::kOnce>(at); });
  }
  // The same from shared memory.
  __device__ __forceinline__ void load_near(const typename RopeArgs<C>::In* from, int unit, uint4 (&raw)[2]) const {
    by(
        from, unit, raw, [](const auto* at) { return Rotated::InPack::load(at); },
        [](const auto* at) { return V::InPack::load(at); });
  }

  // How many units are worked on at once, where they hold nothing but q or nothing but k: two wait less for shuffles,
  // but take 30 registers more (a row a block, bf16: 512 rows 7.2 -> 8.1 us for it).
  static constexpr int at_once = Rotated::mixed || !C::Lanes::full || (C::bulk && !C::fp8) ? 1 : 2;
  __device__ __forceinline__ int units_at(int unit) const {
    const int last = end < Rotated::units ? end : Rotated::units;
    return unit + at_once <= last ? at_once : 1;
  }

  // All its units of a row. load(unit, raw) brings a unit. kAhead: one at a time, raw holds the first already, and the
  // next is asked for before a unit is worked on.
  template <bool kAhead, class Load>
  __device__ __forceinline__ void finish(const RopeArgs<C>& a, const Row& row, int token,
                                         uint4 (&raw)[kAhead ? 1 : at_once][2], const typename Rotated::Angles& angles,
                                         typename Rotated::Weights& weights, const Scales& scales,
                                         Load load_unit) const {
    constexpr int kCount = kAhead ? 1 : at_once;
    typename Rotated::Turn turn;
    Rotated::prepare(a, angles, weights, turn);
    typename Rotated::Target target = Rotated::target(a, row, token, first, only_q);
#pragma unroll 1
    for (int unit = first; unit < end;) {
      const int done = kAhead ? 1 : units_at(unit);
      uint4 next[2];
      if constexpr (!kAhead) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) load_unit(n < done ? unit + n : unit, raw[n]);
      }
      if (kAhead && C::steps > 1 && unit + 1 < end) load_unit(unit + 1, next);
      if (unit < Rotated::units) {
        if (Rotated::mixed && unit != first) {  // a unit of q and k, then units of k
          load_weights(a, unit, weights);
          Rotated::prepare(a, angles, weights, turn);
          target = Rotated::target(a, row, token, unit, only_q);
        }
        Rotated::template finish<kCount>(a, row.live, unit, done, target, raw, turn, scales);
        if constexpr (!Rotated::mixed) Rotated::advance(target, kCount);
      } else {
        V::finish(a, row, token, unit - Rotated::units, raw[0], scales);
      }
      if constexpr (C::steps == 1) break;
      if constexpr (kAhead) {
        raw[0][0] = next[0];
        raw[0][1] = next[1];
      }
      unit += done;
    }
  }
};

}  // namespace hccupy
