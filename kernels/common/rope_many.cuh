// From some rows a multiprocessor on: a warp has the same units of a few neighbouring rows.
//
// While it works on a unit or two, the next are on their way to shared memory. Where the rows go is worked out beside
// that, a row a lane. Blocks are small and start in the order of the rows: memory serves that order 3 % faster than
// blocks that stay and loop over rows far apart (kernels/NOTES.md).
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_stage.cuh"
#include "common/rope_tail.cuh"

namespace hccupy {

// In shared memory, a warp: the ring of units, the norm weights, the angles of as many rows as can be under way.
template <class C>
struct ManyStage {
  static constexpr int angle_bytes = 2 * C::Lanes::half * static_cast<int>(sizeof(float));
  static constexpr int angle_row = (angle_bytes + 15) / 16 * 16;
  static constexpr int weight_bytes = RotatedHeads<C>::normed ? StagedWeights<C>::bytes : 0;
  static constexpr int bytes = kRing * 1024 + weight_bytes + (kAhead + 1) * angle_row;

  char* ring;

  __device__ __forceinline__ explicit ManyStage(int warp)
      : ring(reinterpret_cast<char*>(shared_bytes) + warp * bytes) {}
  __device__ __forceinline__ char* unit(unsigned int number) const {
    return ring + lane_index() * 16 + number % kRing * 1024;
  }
  __device__ __forceinline__ char* angles(unsigned int row) const {
    return weights() + weight_bytes + row % (kAhead + 1) * angle_row;
  }
  __device__ __forceinline__ char* weights() const { return ring + kRing * 1024; }
  // All lanes must meet before they read them.
  __device__ __forceinline__ void ask_angles(const RopeArgs<C>& a, const Row& row, int number) const {
    constexpr int kPart = common_divisor(common_divisor(angle_bytes, C::table_align), 16);
    if (!row.placed) return;
    const char* from =
        reinterpret_cast<const char*>(a.cos_sin + static_cast<long long>(row.position) * (2 * C::Lanes::half));
#pragma unroll
    for (int byte = lane_index() * kPart; byte < angle_bytes; byte += 32 * kPart)
      async_copy<kPart>(angles(number) + byte, from + byte);
  }
};

template <class C>
__device__ __forceinline__ void many_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps, "the host must count the warps of a row likewise");
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr int kCount = Share<C>::at_once;
  const Metadata& m = a.metadata;
  // Where the rows go, by the metadata as they are before the previous grid has ended; afterwards they are read again.
  const bool guesses = (C::early & kEarlyGuess) != 0 && m.tokens > 0 && m.requests <= Requests::kMost;
  if (!guesses) wait_for_previous_grid();
  Requests requests = Requests::read<true>(m);
  const int block_warps = static_cast<int>(blockDim.x) / 32;
  const int of_block = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int warp = static_cast<int>(blockIdx.x) * block_warps + of_block;
  const int warps = static_cast<int>(gridDim.x) * block_warps;
  const int groups = warps / C::parts;
  const int each = (m.tokens + groups - 1) / groups;
  const int group = warp / C::parts;
  const int part = warp % C::parts;
  const int first_row = group * each;
  const long long left = group < groups ? m.tokens - static_cast<long long>(group) * each : 0;
  const int rows = left < each ? static_cast<int>(left) : each;
  const Share<C> share(part);
  const ManyStage<C> stage(of_block);
  __shared__ SharedRow places[C::threads];  // of 32 rows a warp
  SharedRow* place = places + of_block * 32;
  const auto* const first_qkv = a.qkv + first_row * a.qkv_stride;
  int asked = share.first, asked_row = 0;  // what is asked for next
  unsigned int asked_units = 0;
  const auto* qkv = first_qkv;
  const auto ask = [&] {
    if (asked_row < rows) {
      if (asked == share.first) stage.ask_angles(a, place[asked_row].get(), asked_row);
#pragma unroll 1
      for (const int next = asked + share.units_at(asked); asked < next; ++asked)
        StagedUnit<C>::ask(qkv, asked, stage.unit(asked_units++));
      if (asked == share.end) {
        asked = share.first;
        ++asked_row;
        qkv += a.qkv_stride;
      }
    }
    async_commit();
  };

  if ((C::early & kEarlyRow) != 0 && rows > 0) share.prefetch(first_qkv);
  Scales scales;
  if (rows > 0) {
    const int n = lane_index() < rows ? lane_index() : rows - 1;
#pragma unroll 1
    for (bool again = false;; again = true) {
      Row mine = place_row<kPaged>(m, requests.held(m, first_row + n), first_row + n);
      if (n == lane_index()) place[n].put(mine);
      __syncwarp();
      if (guesses && !again) {
        if (mine.placed && n == lane_index()) Rotated::prefetch_angles(a, mine.position, 0, 1);
        wait_for_previous_grid();
      }
      // All this before the units: what is asked for behind those of all warps comes 2 us later (kernels/NOTES.md).
      const Requests now = Requests::read<false>(m);
      const int page = read_page<false>(m, mine);
      StagedWeights<C>::ask(a, stage.weights());
      scales = load_scales(a);
      asked = share.first;
      asked_row = 0;
      asked_units = 0;
      qkv = first_qkv;
#pragma unroll 1
      for (int turn = 0; turn < kAhead; ++turn) ask();
      put_page<C::has_null>(m, page, mine);
      if (!guesses || again || !__any_sync(kFullMask, !(now == requests))) {
        __syncwarp();  // all have read the places for what they asked
        if (n == lane_index()) place[n].put(mine);
        __syncwarp();
        break;
      }
      requests = now;
      async_wait<0>();
      __syncwarp();  // the places are written again
    }
    if (!share.only_q) invert<C>(scales);
  } else {
    wait_for_previous_grid();
  }
  int unit = share.first, i = 0;
  unsigned int units = 0;
  typename Rotated::Turn turn;
  typename Rotated::Target target;
#pragma unroll 1
  while (i < rows) {
    ask();
    const Row row = place[i].get();
    const int token = first_row + i;
    async_wait<kAhead>();
    if (unit == share.first) __syncwarp();
    if (unit < Rotated::units &&
        (Rotated::mixed || unit == share.first)) {  // mixed: a unit of q and k, then units of k
      typename Rotated::Angles angles;
      typename Rotated::Weights weights;
      Rotated::angles_of(reinterpret_cast<const float*>(stage.angles(i)), angles);
      StagedWeights<C>::get(stage.weights(), Rotated::head(unit) < C::q_heads, weights);
      Rotated::prepare(a, angles, weights, turn);
      target = Rotated::target(a, row, token, unit, share.only_q);
    }
    uint4 raw[kCount][2];
#pragma unroll
    for (int n = 0; n < kCount; ++n) StagedUnit<C>::get(stage.unit(units + n), unit, raw[n]);
    const int done = share.units_at(unit);
    if (unit < Rotated::units) {
      Rotated::template finish<kCount>(a, row.live, unit, done, target, raw, turn, scales);
      Rotated::advance(target, kCount);
    } else {
      Values<C>::finish(a, row, token, unit - Rotated::units, raw[0], scales);
    }
    unit += done;
    units += done;
    if (unit >= share.end) {
      __syncwarp();  // the angles have been read
      look_after_tail(a, row, part, C::parts);
      unit = share.first;
      ++i;
    }
  }
  if constexpr (C::fp8) {
    const unsigned int more = more_units(a);
#pragma unroll 1
    for (unsigned int unit = warp; unit < more; unit += warps) clear_more(a, unit);
  }
}

}  // namespace hccupy
