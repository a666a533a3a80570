// A few rows: all of it is latency. A row's warps share its units; the last looks after the tail, beside its
// units or (C::parts more than they need) instead.
//
// Before the previous grid has ended a warp works out where its row goes, by the metadata as they are then, and asks
// for everything in L2. Afterwards it reads metadata, row, weights, angles and tail at once, at those addresses: one
// trip to memory. If the metadata are what they were, so is everything that was worked out.
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_tail.cuh"
#include "common/rope_units.cuh"

namespace hccupy {

template <class C>
__device__ __forceinline__ void prefetch_weights(const RopeArgs<C>& a) {
  if constexpr (RotatedHeads<C>::normed) {
    const int byte = lane_index() * 128;
    if (byte < C::dim * static_cast<int>(sizeof *a.q_weight))
      prefetch_line(reinterpret_cast<const char*>(a.q_weight) + byte);
    if (byte < C::dim * static_cast<int>(sizeof *a.k_weight))
      prefetch_line(reinterpret_cast<const char*>(a.k_weight) + byte);
  }
}

template <class C>
__device__ __forceinline__ void few_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps || (Tail<C>::exists && C::parts > Share<C>::warps),
                "the host must count the warps of a row likewise");
  // Two or more warps without units have a new page's tail for themselves: they need not wait for the others.
  constexpr int kFirstOfTail = C::parts > Share<C>::warps + 1 ? Share<C>::warps : 0;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr bool kGuess = (C::early & kEarlyGuess) != 0;
  const Metadata& m = a.metadata;
  const unsigned int warp = blockIdx.x * (blockDim.x / 32) + warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const unsigned int row_warps = static_cast<unsigned int>(m.tokens) * C::parts;
  if (warp >= row_warps) {
    wait_for_previous_grid();
    if constexpr (C::fp8) clear_more(a, warp - row_warps);
    return;
  }
  const int token = static_cast<int>(warp / C::parts);
  const int part = static_cast<int>(warp % C::parts);
  const bool computes = part < Share<C>::warps;
  const bool looks = Tail<C>::exists && part == C::parts - 1;
  // One that only looks loads the last one's units all the same: no branch between loads.
  const Share<C> share(computes ? part : Share<C>::warps - 1);
  const Guess guess(m, token);
  const auto* qkv = a.qkv + token * a.qkv_stride;
  const auto* first = share.first_of(qkv, share.first);
  settle(first);
  if ((C::early & kEarlyRow) != 0 && computes) {
    share.prefetch(qkv);
    prefetch_weights(a);
  }
  Held held;
  Row row;
  const float* angles_at = nullptr;
  if constexpr (kGuess) {
    held = read_held(m, guess.request);
    row = place_row<kPaged>(m, held, token);
    put_page<C::has_null>(m, read_page(m, row), row);
    if (row.placed) Rotated::prefetch_angles(a, row.position);
    if (looks) {
      const Tail<C> tail(a, row);
      if (tail.to_look_at()) tail.prefetch();
    }
    angles_at = Rotated::first_angle(a, row.position);
    settle(angles_at);
  }
  wait_for_previous_grid();

  uint4 raw[1][2];
  typename Rotated::Weights weights;
  typename Rotated::Angles angles;
  share.load(first, share.first, raw[0]);
  if (row.placed) Rotated::load_angles(angles_at, angles);
  share.load_weights(a, share.first, weights);
  Held now;
  int page = 0;
  int middle = 0;
  if constexpr (kGuess) {
    now = read_held(m, guess.request);
    page = read_page(m, row);
    middle = guess.look(m);
  }
  Scales scales = load_scales(a);
  if (!(kGuess && now == held && page == row.page && !__any_sync(kFullMask, guess.astray(middle, token)))) {
    row = place_row<kPaged>(m, hold_row(m, guess, token), token);
    put_page<C::has_null>(m, read_page(m, row), row);
    if (row.placed) Rotated::load_angles(Rotated::first_angle(a, row.position), angles);
  }
  row = row.of_lane(0);
  if (computes) {
    if (!share.only_q) invert<C>(scales);
    share.template finish<true>(a, row, token, raw, angles, weights, scales,
                                [&](int unit, uint4(&to)[2]) { share.load(share.first_of(qkv, unit), unit, to); });
  }
  if (part >= kFirstOfTail) look_after_tail(a, row, part - kFirstOfTail, C::parts - kFirstOfTail);
}

}  // namespace hccupy
