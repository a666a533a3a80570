// Many narrow rows: a warp has as many neighbouring rows as a unit has heads, so that every unit is full, and its
// start and the factors of its angles serve them all.
//
// A lane stays with one row. The units follow each other through a ring in shared memory, a turn of one or two of them
// at a time. A warp has all units of its rows, or, where that gives the machine too few warps, a part of them.
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_stage.cuh"
#include "common/rope_tail.cuh"

namespace hccupy {

// The units from `first` to before `end` of a row that is not live. (Told apart where units are finished, such a row
// cost all others a tenth of their instructions.)
template <class C>
__device__ __forceinline__ void clear_row(const RopeArgs<C>& a, const Row& row, int token, int first, int end) {
  using Rotated = RotatedHeads<C>;
#pragma unroll 1
  for (int unit = first; unit < end && unit < Rotated::units; ++unit) {
    const bool is_q = unit < C::q_heads;
    const uint4 raw[1][2] = {};
    Rotated::template finish<1>(a, false, unit, 1, Rotated::target(a, row, token, unit, is_q), raw, {}, {});
  }
}

template <class C>
__device__ __forceinline__ void narrow_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  using Stage = StagedUnit<C>;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr int kRows = C::Lanes::heads_per_warp;
  constexpr int kUnits = Share<C>::units;
  constexpr int kCount = Share<C>::at_once;
  constexpr int kTurns =
      kCount == 2 ? 2 : 3;  // on their way (three of two: 8/1 heads, fp8, 16384 rows 18.4 -> 19.2 us)
  const Metadata& m = a.metadata;
  // Where the rows go, by the metadata as they are before the previous grid has ended; afterwards they are read again.
  const bool guesses = (C::early & kEarlyGuess) != 0 && m.tokens > 0 && m.requests <= Requests::kMost;
  if (!guesses) wait_for_previous_grid();
  Requests requests = Requests::read<true>(m);
  // The host has started so many warps (a block each) for every kRows rows: not baked, whatever the number of rows.
  const unsigned int groups = m.tokens > 0 ? (static_cast<unsigned int>(m.tokens) + kRows - 1) / kRows : 1;
  const unsigned int parts = gridDim.x / groups;
  const unsigned int group = blockIdx.x / parts;
  const int part = static_cast<int>(blockIdx.x - group * parts);
  const int steps = static_cast<int>((kUnits + parts - 1) / parts);
  const int first_row = static_cast<int>(group) * kRows;
  const int rows = m.tokens - first_row < kRows ? m.tokens - first_row : kRows;  // 0 where there are no tokens
  const int first = part * steps;
  const int end = first + steps < kUnits ? first + steps : kUnits;
  const int member = lane_index() / C::Lanes::lanes;
  const bool mine = member < rows;  // the others work on the last row too, and store nothing
  const int token = first_row + (mine ? member : rows - 1);
  const auto* qkv = a.qkv + token * a.qkv_stride;

  if ((C::early & kEarlyRow) != 0 && rows > 0) {
    // 3 units (2 / 3 / 4: 8/1 heads, fp8, 4096 rows 6.8 / 7.0 / 7.2 us; 9/3, 16384 rows 14.1 / 13.9 / 13.9).
    const auto* from = qkv + first * C::dim;
#pragma unroll 1
    for (int at = lane_index() % C::Lanes::lanes * 64; at < 3 * C::dim; at += C::Lanes::lanes * 64)
      if (first * C::dim + at < Share<C>::row_elements) prefetch_line(from + at);
    prefetch_shared(a);
  }
  if (rows > 0) {
    // Two heads at once where there are two with the same weights: they wait less for shuffles.
    const auto units_at = [end](int unit) {
      const int last = unit < C::q_heads ? C::q_heads : Rotated::units;
      return unit + kCount <= (last < end ? last : end) ? kCount : 1;
    };
    const auto stage = [](int turn) {
      return reinterpret_cast<char*>(shared_bytes) + lane_index() * 16 + turn % (kTurns + 1) * (kCount * 1024);
    };
    int asked = first, unit = first;
    const auto ask = [&](int turn) {
      if (asked < end) {
        const int count = units_at(asked);
#pragma unroll
        for (int n = 0; n < kCount; ++n)
          if (n < count) Stage::ask(qkv, asked + n, stage(turn) + n * 1024);
        asked += count;
      }
      async_commit();
    };
    char* const staged_angles = reinterpret_cast<char*>(shared_bytes) + (kTurns + 1) * kCount * 1024;
    char* const staged_weights = staged_angles + StagedAngles<C>::bytes;
    __shared__ SharedRow places[32];  // a lane's own: registers are short
    SharedRow& place = places[lane_index()];
    Scales scales;
#pragma unroll 1
    for (bool again = false;; again = true) {
      Row row = place_row<kPaged>(m, requests.held(m, token), token);
      if (guesses && !again) {
        if (row.placed) Rotated::prefetch_angles(a, row.position, lane_index() % C::Lanes::lanes, C::Lanes::lanes);
        wait_for_previous_grid();
      }
      // All this before the units: what is asked for behind those of all warps comes 2 us later (kernels/NOTES.md).
      const Requests now = Requests::read<false>(m);
      const int page = read_page<false>(m, row);
      scales = load_scales(a);
      typename Rotated::Angles angles;
      if (row.placed) Rotated::load_angles(Rotated::first_angle(a, row.position), angles);
      if (!again) {
        StagedWeights<C>::ask(a, staged_weights);
        async_commit();
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) ask(turn);
      }
      if (!guesses || again || !__any_sync(kFullMask, !(now == requests))) {
        put_page<C::has_null>(m, page, row);
        place.put(row);
        StagedAngles<C>::put(angles, staged_angles);
        if (mine && !row.live) clear_row(a, row, token, first, end);
        break;
      }
      requests = now;
    }
    invert<C>(scales);
    typename Rotated::Turn factors;
    typename Rotated::Target target;
#pragma unroll 1
    for (int turn = 0; unit < end; ++turn) {
      ask(turn + kTurns);
      if (unit == first || unit == C::q_heads) {  // k has other weights
        async_wait<kTurns + 1>();
        __syncwarp();
        const Row row = place.get();
        typename Rotated::Angles angles;
        typename Rotated::Weights weights;
        StagedAngles<C>::get(staged_angles, angles);
        StagedWeights<C>::get(staged_weights, unit < C::q_heads, weights);
        Rotated::prepare(a, angles, weights, factors);
        target = Rotated::target(a, row, mine && row.live ? token : -1, unit, unit < C::q_heads);
      }
      async_wait<kTurns>();
      uint4 raw[kCount][2];
#pragma unroll
      for (int n = 0; n < kCount; ++n) Stage::get(stage(turn) + n * 1024, unit, raw[n]);
      const int done = units_at(unit);
      if (unit < Rotated::units) {
        Rotated::template finish<kCount>(a, true, unit, done, target, raw, factors, scales);
        Rotated::advance(target, kCount);
      } else {
        Values<C>::finish(a, place.get(), mine ? token : -1, unit - Rotated::units, raw[0], scales);
      }
      unit += done;
    }
    if constexpr (Tail<C>::exists) {
      const Row row = place.get();
      const Tail<C> own(a, row);
      unsigned int tails = __ballot_sync(kFullMask, mine && own.behind > 0 && lane_index() % C::Lanes::lanes == 0);
#pragma unroll 1
      for (; tails != 0; tails &= tails - 1)
        look_after_tail(a, row.of_lane(__ffs(tails) - 1), part, static_cast<int>(parts));
    }
  }
  if constexpr (C::fp8) {
    const unsigned int more = more_units(a);
#pragma unroll 1
    for (unsigned int unit = blockIdx.x; unit < more; unit += gridDim.x) clear_more(a, unit);
  }
}

}  // namespace hccupy
