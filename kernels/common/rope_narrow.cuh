// Many narrow rows: a warp has as many neighbouring rows as a unit has heads, so that every unit is full, and its
// start and the factors of its angles serve them all.
//
// A lane stays with one row. The units follow each other through a ring in shared memory. A warp has all units of its
// rows, or, where that gives the machine too few warps, a part of them.
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_stage.cuh"
#include "common/rope_tail.cuh"

namespace hccupy {

template <class C>
__device__ __forceinline__ void narrow_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  using Stage = StagedUnit<C>;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr int kRows = C::Lanes::heads_per_warp;
  constexpr int kUnits = Share<C>::units;
  constexpr int kCount = Share<C>::at_once;
  const Metadata& m = a.metadata;
  // The host has started so many warps (a block each) for every kRows rows: not baked, whatever the number of rows.
  const unsigned int groups = m.tokens > 0 ? (static_cast<unsigned int>(m.tokens) + kRows - 1) / kRows : 1;
  const int parts = static_cast<int>(gridDim.x / groups);
  const int group = static_cast<int>(blockIdx.x) / parts;
  const int part = static_cast<int>(blockIdx.x) - group * parts;
  const int steps = (kUnits + parts - 1) / parts;
  const int first_row = group * kRows;
  const int rows = m.tokens - first_row < kRows ? m.tokens - first_row : kRows;  // 0 where there are no tokens
  const int first = part * steps;
  const int end = first + steps < kUnits ? first + steps : kUnits;
  const int member = lane_index() / C::Lanes::lanes;
  const bool mine = member < rows;  // the others work on the last row too, and store nothing
  const int token = first_row + (mine ? member : rows - 1);
  const auto* qkv = a.qkv + token * a.qkv_stride;
  char* ring = reinterpret_cast<char*>(shared_bytes) + lane_index() * 16;

  wait_for_previous_grid();
  if (rows > 0) {
    const Requests requests(m);
    Scales scales = load_scales(a);
    // Two heads at once where there are two with the same weights: they wait less for shuffles.
    const auto units_at = [end](int unit) {
      const int last = unit < C::q_heads ? C::q_heads : Rotated::units;
      return unit + kCount <= (last < end ? last : end) ? kCount : 1;
    };
    int asked = first;
    const auto ask = [&] {  // for the units of a turn
#pragma unroll 1
      for (const int next = asked < end ? asked + units_at(asked) : asked; asked < next; ++asked)
        Stage::ask(qkv, asked, ring + static_cast<unsigned int>(asked) % kRing * 1024);
      async_commit();
    };
#pragma unroll 1
    for (int k = 0; k < kAhead; ++k) ask();
    __shared__ SharedRow places[32];  // a lane's own: registers are short
    SharedRow& place = places[lane_index()];
    {
      const Row row = place_row<kPaged>(m, requests.held(m, token), token);
      place.put(row);
      if (row.column >= 0)  // comes with the units of the next turn, beside the angles
        async_copy<4>(&place.page, m.block_table + row.request * m.block_table_stride + row.column);
    }
    typename Rotated::Turn turn;
    typename Rotated::Target target;
#pragma unroll 1
    for (int unit = first; unit < end;) {
      ask();
      if (unit == first || unit == C::q_heads) {  // k has other weights
        Row row = place.get();
        typename Rotated::Angles angles;
        typename Rotated::Weights weights;
        if (row.placed) Rotated::load_angles(Rotated::first_angle(a, row.position), angles);
        Rotated::load_weights(a, unit < C::q_heads, weights);
        if (unit == first) {
          async_wait<0>();
          row = place.get();
          put_page<C::has_null>(m, row.page, row);
          place.put(row);
          invert<C>(scales);
        }
        Rotated::prepare(a, angles, weights, turn);
        target = Rotated::target(a, row, mine ? token : -1, unit, unit < C::q_heads);
      }
      async_wait<kAhead>();
      uint4 raw[kCount][2];
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        Stage::get(ring + static_cast<unsigned int>(unit + n) % kRing * 1024, unit, raw[n]);
      const int done = units_at(unit);
      const Row row = place.get();
      if (unit < Rotated::units) {
        Rotated::template finish<kCount>(a, row.live, unit, done, target, raw, turn, scales);
        Rotated::advance(target, kCount);
      } else {
        Values<C>::finish(a, row, mine ? token : -1, unit - Rotated::units, raw[0], scales);
      }
      unit += done;
    }
    if constexpr (Tail<C>::exists) {
      const Row row = place.get();
      const Tail<C> own(a, row);
      unsigned int tails = __ballot_sync(kFullMask, mine && own.behind > 0 && lane_index() % C::Lanes::lanes == 0);
#pragma unroll 1
      for (; tails != 0; tails &= tails - 1) look_after_tail(a, row.of_lane(__ffs(tails) - 1), part, parts);
    }
  }
  if constexpr (C::fp8) {
    const long long more = more_units(a);
#pragma unroll 1
    for (long long unit = blockIdx.x; unit < more; unit += gridDim.x) clear_more(a, unit);
  }
}

}  // namespace hccupy
