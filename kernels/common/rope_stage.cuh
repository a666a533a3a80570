// Units of qkv on their way to shared memory: each lane reads back what it has asked for itself, so nothing waits for
// another lane.
#pragma once

#include "common/rope_units.cuh"

namespace hccupy {

constexpr int kAhead = 3;  // turns, of one or two units, that are on their way
constexpr int kRing = 8;   // units: those and the ones at hand, a power of two

// Asks for what every warp reads first in L2: metadata (of the block table the first lines), scales, weights. By a few
// blocks, before the previous grid has ended.
template <class C>
__device__ __forceinline__ void prefetch_shared(const RopeArgs<C>& a) {
  constexpr unsigned int kBlocks = 256;
  const Metadata& m = a.metadata;
  const int lane = lane_index();
  if (blockIdx.x >= kBlocks || m.requests == 0) return;
  const char* line = reinterpret_cast<const char*>(lane == 0 ? m.q_index : m.seq_lens);
  if constexpr (C::fp8) {
    if (lane == 2) line = reinterpret_cast<const char*>(a.k_scale);
    if (lane == 3) line = reinterpret_cast<const char*>(a.v_scale);
  }
  if constexpr (RotatedHeads<C>::normed) {
    if (lane >= 4 && (lane - 4) * 128 < C::dim * static_cast<int>(sizeof *a.q_weight))
      line = reinterpret_cast<const char*>(a.q_weight) + (lane - 4) * 128;
    if (lane >= 12 && (lane - 12) * 128 < C::dim * static_cast<int>(sizeof *a.k_weight))
      line = reinterpret_cast<const char*>(a.k_weight) + (lane - 12) * 128;
  }
  if constexpr (!(C::has_out_k && C::has_out_v)) {
    if (lane >= 20 && (lane - 20) * 32 < (m.requests - 1) * m.block_table_stride + m.max_blocks)
      line = reinterpret_cast<const char*>(m.block_table + (lane - 20) * 32);
  }
  prefetch_line(line);
}

// A unit is 1 KB: a lane's first 16 bytes are at lane * 16, its others 512 behind.
template <class C>
struct StagedUnit {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  using In = typename RopeArgs<C>::In;

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
  // Units lie one behind the other, in rows as in the order of their numbers.
  static constexpr bool in_line =
      C::Lanes::full && C::Lanes::chunk == 8 && Rotated::whole && Rotated::elements == V::elements;

  // `to`: this lane's place in the stage.
  static __device__ __forceinline__ void ask(const In* row, int unit, char* to) {
    if constexpr (in_line) {
      const bool rotated = unit < Rotated::units;
      const In* first = row + (unit * V::elements + (rotated ? Rotated::first_element(0) : V::chunk(0, 0) * 8));
      if (V::whole || rotated || V::chunk(unit - Rotated::units, 0) < V::chunks) copy<8>(to, first);
      if (V::whole || rotated || V::chunk(unit - Rotated::units, 1) < V::chunks)
        copy<8>(to + 512, first + (rotated ? Rotated::behind(0, 1) : V::apart));
    } else if (unit < Rotated::units) {
      const In* first = Rotated::first_of(row, unit);
      Rotated::each_pack(unit, [&](int k, int which) {
        copy<C::Lanes::chunk>(to + place(k, which), first + Rotated::behind(k, which));
      });
    } else {
      const In* first = V::first_of(row, unit - Rotated::units);
      V::each_pack(unit - Rotated::units, [&](int k) { copy<8>(to + k * 512, first + k * V::apart); });
    }
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

}  // namespace hccupy
