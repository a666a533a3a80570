// From some rows a multiprocessor on: a warp has the same units of a few neighbouring rows.
//
// While it works on a row, its units of the next are on their way to shared memory; each lane reads back what it has
// copied itself, so nothing waits for another lane. Where the rows go is worked out beside that, a row a lane. Blocks
// are small and start in the order of the rows: memory serves that order 3 % faster than blocks that stay and loop over
// rows far apart (kernels/NOTES.md).
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_tail.cuh"
#include "common/rope_units.cuh"

namespace hccupy {

// This lane's part of a warp's units of two rows, in shared memory.
template <class C>
struct TwoRows {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  using In = typename RopeArgs<C>::In;
  static constexpr int row_bytes = C::steps * 1024;
  static constexpr int bytes = 2 * row_bytes;

  char* mine;

  __device__ __forceinline__ explicit TwoRows(int warp)
      : mine(reinterpret_cast<char*>(shared_bytes) + warp * bytes + lane_index() * 16) {}

  static __device__ __forceinline__ int place(int k, int which) {
    return which * 512 + k * static_cast<int>(sizeof(typename Rotated::InPack));
  }
  template <int kElements>
  static __device__ __forceinline__ void copy(char* to, const In* from) {
    constexpr int kAll = kElements * static_cast<int>(sizeof(In));
    constexpr int kPart = C::read_align < kAll ? C::read_align : kAll;
#pragma unroll
    for (int byte = 0; byte < kAll; byte += kPart) {
      const char* part = reinterpret_cast<const char*>(from) + byte;
      if constexpr (kPart >= 4) {
        async_copy<kPart>(to + byte, part);
      } else {
        const auto word = load_once(reinterpret_cast<const typename WordOf<kPart>::Type*>(part));
        memcpy(to + byte, &word, sizeof word);
      }
    }
  }
  __device__ __forceinline__ void ask(const Share<C>& share, const In* row, int which_row) const {
#pragma unroll
    for (int step = 0; step < C::steps; ++step) {
      const int unit = share.first + step;
      if (unit >= share.end) break;
      char* to = mine + which_row * row_bytes + step * 1024;
      if (unit < Rotated::units) {
        const In* first = Rotated::first_of(row, unit);
        Rotated::each_pack(unit, [&](int k, int which) {
          copy<C::Lanes::chunk>(to + place(k, which), first + Rotated::behind(k, which));
        });
      } else {
        const In* first = V::first_of(row, unit - Rotated::units);
        V::each_pack(unit - Rotated::units, [&](int k) { copy<8>(to + k * 512, first + k * 256); });
      }
    }
  }
  static __device__ __forceinline__ void get(const char* from, int unit, uint4 (&raw)[2]) {
    if (Rotated::full && V::whole) {
      raw[0] = *reinterpret_cast<const uint4*>(from);
      raw[1] = *reinterpret_cast<const uint4*>(from + 512);
    } else if (unit < Rotated::units) {
      Rotated::raw_by(unit, raw, [&](int k, int which) { return Rotated::InPack::load(from + place(k, which)); });
    } else {
      V::raw_by(unit - Rotated::units, raw, [&](int k) { return V::InPack::load(from + k * 512); });
    }
  }
};

template <class C>
__device__ __forceinline__ void many_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps, "the host must count the warps of a row likewise");
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  const Metadata& m = a.metadata;
  const int block_warps = static_cast<int>(blockDim.x) / 32;
  const int of_block = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int warp = static_cast<int>(blockIdx.x) * block_warps + of_block;
  const int warps = static_cast<int>(gridDim.x) * block_warps;
  const int groups = warps / C::parts;
  const int each = (m.tokens + groups - 1) / groups;
  const int group = warp / C::parts;
  const int part = warp % C::parts;
  const int first_row = group * each;
  const int rows = group < groups ? (each < m.tokens - first_row ? each : m.tokens - first_row) : 0;
  const Share<C> share(part);
  const TwoRows<C> stage(of_block);
  const auto* next = a.qkv + first_row * a.qkv_stride;

  wait_for_previous_grid();
  if (rows > 0) stage.ask(share, next, 0);
  async_commit();
  Scales scales = load_scales(a);
  Row mine;  // lane n: row n of the warp
  if (lane_index() < rows) {
    const int token = first_row + lane_index();
    mine = place_row<kPaged>(m, read_held<false>(m, find_request_alone(m.q_index, m.requests, token)), token);
    put_page<C::has_null>(m, read_page<false>(m, mine), mine);
  }
  if (!share.only_q) invert<C>(scales);
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    next += a.qkv_stride;
    if (i + 1 < rows) stage.ask(share, next, (i + 1) % 2);
    async_commit();
    const Row row = mine.of_lane(i);
    const int token = first_row + i;
    typename Rotated::Turn turn;
    typename Rotated::Target target;
    const auto prepare = [&](int unit) {
      typename Rotated::Angles angles;
      typename Rotated::Weights weights;
      if (row.placed) Rotated::load_angles(Rotated::first_angle(a, row.position), angles);
      share.load_weights(a, unit, weights);
      Rotated::prepare(a, angles, weights, turn);
      target = Rotated::target(a, row, token, unit, share.only_q);
    };
    if (!Rotated::mixed && share.first < Rotated::units) prepare(share.first);
    const char* at = stage.mine + i % 2 * TwoRows<C>::row_bytes;
    async_wait<1>();
#pragma unroll 1
    for (int unit = share.first; unit < share.end; ++unit, at += 1024) {
      uint4 raw[2];
      TwoRows<C>::get(at, unit, raw);
      if (unit < Rotated::units) {
        if (Rotated::mixed) prepare(unit);  // a unit of q and k, then units of k
        Rotated::finish(a, row.live, unit, target, raw, turn, scales);
        if constexpr (!Rotated::mixed) Rotated::advance(target);
      } else {
        Values<C>::finish(a, row, token, unit - Rotated::units, raw, scales);
      }
    }
    if constexpr (Tail<C>::exists) {
      const Tail<C> tail(a, row);
      if (tail.behind > 0) {
        const bool fresh = tail.fresh();  // then all warps of the row share the slots
        if (fresh || (part == C::parts - 1 && __any_sync(kFullMask, tail.look() != 0)))
          tail.clear(fresh ? part : 0, fresh ? C::parts : 1);
      }
    }
  }
  if constexpr (C::fp8) {
    const long long more = more_units(a);
#pragma unroll 1
    for (long long unit = warp; unit < more; unit += warps) clear_more(a, unit);
  }
}

}  // namespace hccupy
