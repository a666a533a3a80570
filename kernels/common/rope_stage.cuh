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

// kBytes from global to shared memory, both multiples of kAlign.
template <int kBytes, int kAlign, bool kNear = false>
__device__ __forceinline__ void stage_bytes(char* to, const char* from) {
  constexpr int kPart = common_divisor(common_divisor(kBytes, kAlign), 16);
#pragma unroll
  for (int byte = 0; byte < kBytes; byte += kPart) {
    if constexpr (kPart >= 4) {
      async_copy<kPart, kNear>(to + byte, from + byte);
    } else {
      const auto word = load_once(reinterpret_cast<const typename WordOf<kPart>::Type*>(from + byte));
      memcpy(to + byte, &word, sizeof word);
    }
  }
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
    stage_bytes<kElements* static_cast<int>(sizeof(In)), C::read_align>(to, reinterpret_cast<const char*>(from));
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

// The angles of a lane's row, kept in shared memory.
template <class C>
struct StagedAngles {
  using Rotated = RotatedHeads<C>;
  using Pack = typename Rotated::AnglePack;
  static constexpr int bytes = Rotated::kAnglePacks * 32 * static_cast<int>(sizeof(Pack));  // of a warp, 2 KB at most

  static __device__ __forceinline__ char* place(char* stage, int number) {
    return stage + (number * 32 + lane_index()) * static_cast<int>(sizeof(Pack));
  }
  static __device__ __forceinline__ void put(const typename Rotated::Angles& angles, char* stage) {
    Rotated::each_angles([&](int k, int which, int number, int) {
      float cosines[Rotated::kAngles], sines[Rotated::kAngles];
#pragma unroll
      for (int i = 0; i < Rotated::kAngles; ++i) {
        cosines[i] = angles.cosine[k][which * Rotated::kAngles + i];
        sines[i] = angles.sine[k][which * Rotated::kAngles + i];
      }
      Pack::from_floats(cosines).store(place(stage, number));
      Pack::from_floats(sines).store(place(stage, number + 1));
    });
  }
  static __device__ __forceinline__ void get(char* stage, typename Rotated::Angles& angles) {
    Rotated::angles_by(angles, [&](int number, int) { return Pack::load(place(stage, number)); });
  }
};

// The norm weights, q's and then k's, on their way to shared memory. All lanes must meet before they read them.
template <class C>
struct StagedWeights {
  using Rotated = RotatedHeads<C>;
  using Q = typename RopeArgs<C>::QWeight;
  using K = typename RopeArgs<C>::KWeight;
  static constexpr int bytes = C::dim * static_cast<int>(sizeof(Q) + sizeof(K));

  template <class T>
  static __device__ __forceinline__ void ask(const T* weights, char* to) {
    constexpr int kOnce = 8;  // elements
#pragma unroll 1
    for (int element = lane_index() * kOnce; element < C::dim; element += 32 * kOnce)
      stage_bytes<kOnce * sizeof(T), C::weight_align, true>(to + element * sizeof(T),
                                                            reinterpret_cast<const char*>(weights + element));
  }
  static __device__ __forceinline__ void ask(const RopeArgs<C>& a, char* stage) {
    if constexpr (Rotated::normed) {
      ask(a.q_weight, stage);
      ask(a.k_weight, stage + C::dim * sizeof(Q));
    }
  }
  static __device__ __forceinline__ void get(const char* stage, bool is_q, typename Rotated::Weights& weights) {
    Rotated::template weights_by<true>(reinterpret_cast<const Q*>(stage),
                                       reinterpret_cast<const K*>(stage + C::dim * sizeof(Q)), is_q, weights);
  }
};

}  // namespace hccupy
