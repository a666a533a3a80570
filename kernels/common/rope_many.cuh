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

// A warp's units of two rows and their angles, in shared memory.
template <class C>
struct TwoRows {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  using In = typename RopeArgs<C>::In;
  static constexpr int angle_bytes = 2 * C::Lanes::half * static_cast<int>(sizeof(float));
  static constexpr int row_bytes = C::steps * 1024 + (C::together ? 0 : (angle_bytes + 15) / 16 * 16);
  static constexpr int bytes = 2 * row_bytes;

  char* rows;

  __device__ __forceinline__ explicit TwoRows(int warp) : rows(reinterpret_cast<char*>(shared_bytes) + warp * bytes) {}

  __device__ __forceinline__ char* mine(int which_row) const {
    return rows + which_row * row_bytes + lane_index() * 16;
  }
  __device__ __forceinline__ char* angles(int which_row) const {
    return rows + which_row * row_bytes + C::steps * 1024;
  }

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
      char* to = mine(which_row) + step * 1024;
      if (unit < Rotated::units) {
        const In* first = Rotated::first_of(row, unit);
        Rotated::each_pack(unit, [&](int k, int which) {
          copy<C::Lanes::chunk>(to + place(k, which), first + Rotated::behind(k, which));
        });
      } else {
        const In* first = V::first_of(row, unit - Rotated::units);
        V::each_pack(unit - Rotated::units, [&](int k) { copy<8>(to + k * 512, first + k * V::apart); });
      }
    }
  }
  // All lanes must meet before they read them.
  __device__ __forceinline__ void ask_angles(const RopeArgs<C>& a, const Row& row, int which_row) const {
    constexpr int kPart = common_divisor(common_divisor(angle_bytes, C::table_align), 16);
    if (!row.placed) return;
    const char* from =
        reinterpret_cast<const char*>(a.cos_sin + static_cast<long long>(row.position) * (2 * C::Lanes::half));
#pragma unroll
    for (int byte = lane_index() * kPart; byte < angle_bytes; byte += 32 * kPart)
      async_copy<kPart>(angles(which_row) + byte, from + byte);
  }
  static __device__ __forceinline__ void get(const char* from, int unit, uint4 (&raw)[2]) {
    if (C::Lanes::full) {  // heads and chunks that are not there come as rubbish, which is not stored
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
__device__ __forceinline__ void look_after_tail(const RopeArgs<C>& a, const Row& row, int part) {
  if constexpr (Tail<C>::exists) {
    const Tail<C> tail(a, row);
    if (tail.behind <= 0) return;
    const bool fresh = tail.fresh();  // then all warps of the row share the slots
    if (fresh || (part == C::parts - 1 && __any_sync(kFullMask, tail.look() != 0)))
      tail.clear(fresh ? part : 0, fresh ? C::parts : 1);
  }
}

template <class C>
__device__ __forceinline__ void many_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps, "the host must count the warps of a row likewise");
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr int kRowsATurn = C::together ? C::Lanes::heads_per_warp : 1;
  const Metadata& m = a.metadata;
  const int block_warps = static_cast<int>(blockDim.x) / 32;
  const int of_block = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int warp = static_cast<int>(blockIdx.x) * block_warps + of_block;
  const int warps = static_cast<int>(gridDim.x) * block_warps;
  const int groups = warps / C::parts;
  const int each = ((m.tokens + groups - 1) / groups + kRowsATurn - 1) / kRowsATurn * kRowsATurn;
  const int group = warp / C::parts;
  const int part = warp % C::parts;
  const long long left = group < groups ? m.tokens - static_cast<long long>(group) * each : 0;
  const int rows = left < each ? static_cast<int>(left) : each;
  const int first_row = group * each;
  const Share<C> share(part);
  const TwoRows<C> stage(of_block);
  __shared__ SharedRow places[C::threads];  // of 32 rows a warp
  SharedRow* place = places + of_block * 32;
  // This lane's row of turn i; the last again where there is none.
  const int member = C::together ? lane_index() / C::Lanes::lanes : 0;
  const auto number = [&](int i) {
    const int n = i * kRowsATurn + member;
    return n < rows ? n : rows - 1;
  };
  const auto ask = [&](int i) { stage.ask(share, a.qkv + (first_row + number(i)) * a.qkv_stride, i % 2); };

  if ((C::early & kEarlyRow) != 0 && rows > 0) share.prefetch(a.qkv + first_row * a.qkv_stride);
  wait_for_previous_grid();
  Scales scales = load_scales(a);
  if (!share.only_q) invert<C>(scales);
#pragma unroll 1
  for (int i = -1; rows > 0 && i * kRowsATurn < rows; ++i) {  // turn -1 only asks for the first rows
    const bool more = (i + 1) * kRowsATurn < rows;
    if (more) ask(i + 1);
    if (i < 0) {
      if (lane_index() < rows) {
        const int token = first_row + lane_index();
        Row mine = place_row<kPaged>(m, read_held<false>(m, find_request_alone(m.q_index, m.requests, token)), token);
        put_page<C::has_null>(m, read_page<false>(m, mine), mine);
        place[lane_index()].put(mine);
      }
      __syncwarp();
    }
    if (!C::together && more) stage.ask_angles(a, place[i + 1].get(), (i + 1) % 2);
    async_commit();
    if (i < 0) continue;
    const Row row = place[number(i)].get();
    const int token = i * kRowsATurn + member < rows ? first_row + number(i) : -1;
    typename Rotated::Turn turn;
    typename Rotated::Target target;
    const auto prepare = [&](int unit) {
      typename Rotated::Angles angles;
      typename Rotated::Weights weights;
      if constexpr (C::together) {
        if (row.placed) Rotated::load_angles(Rotated::first_angle(a, row.position), angles);
      } else {
        Rotated::angles_of(reinterpret_cast<const float*>(stage.angles(i % 2)), angles);
      }
      share.load_weights(a, unit, weights);
      Rotated::prepare(a, angles, weights, turn);
      target = Rotated::target(a, row, token, unit, share.only_q);
    };
    const char* at = stage.mine(i % 2);
    async_wait<1>();
    __syncwarp();
    if (!Rotated::mixed && share.first < Rotated::units) prepare(share.first);
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
    __syncwarp();  // the angles have been read
    if constexpr (C::together) {
#pragma unroll 1
      for (int n = i * kRowsATurn; n < (i + 1) * kRowsATurn && n < rows; ++n) look_after_tail(a, place[n].get(), part);
    } else {
      look_after_tail(a, row, part);
    }
  }
  if constexpr (C::fp8) {
    const long long more = more_units(a);
#pragma unroll 1
    for (long long unit = warp; unit < more; unit += warps) clear_more(a, unit);
  }
}

}  // namespace hccupy
