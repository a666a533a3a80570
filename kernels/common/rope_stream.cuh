// Many rows, on sm_90 and newer: bulk copies bring whole rows of qkv into shared memory, C::ring rows ahead.
//
// A block has C::parts warps that compute, and one that loads: for each row of the block it starts the copies of the
// row and of its angles, works out where K and V go, and hands all of that over by a barrier. So no warp that computes
// ever waits for metadata, and what is in flight does not depend on registers.
#pragma once

#include "common/rope_row.cuh"
#include "common/sm90_ptx.cuh"

namespace hccupy {

// A stage of the ring in shared memory: qkv, then the row of cos_sin.
template <class C>
struct RowStage {
  static constexpr int row_bytes = ((C::q_heads + C::kv_heads) * C::dim + C::kv_heads * C::v_dim) *
                                   static_cast<int>(sizeof(typename RopeArgs<C>::In));
  static constexpr int angle_bytes = 2 * C::Lanes::half * static_cast<int>(sizeof(float));
  static constexpr int bytes = (row_bytes + angle_bytes + 127) / 128 * 128;
  static_assert(row_bytes % 16 == 0 && angle_bytes % 16 == 0 && C::read_align == 16 && C::table_align == 16,
                "the host must take another kernel for rows that bulk copies cannot move");
};

// Row, without its default values: shared memory starts undefined.
struct SharedRow {
  int request, place, position, page, slot, flags;

  __device__ __forceinline__ void put(const Row& row) {
    request = row.request;
    place = row.place;
    position = row.position;
    page = row.page;
    slot = row.slot;
    flags = row.last | row.placed << 1 | row.live << 2 | row.stored << 3;
  }
  __device__ __forceinline__ Row get() const {
    Row row;
    row.request = request;
    row.place = place;
    row.position = position;
    row.page = page;
    row.slot = slot;
    row.last = (flags & 1) != 0;
    row.placed = (flags & 2) != 0;
    row.live = (flags & 4) != 0;
    row.stored = (flags & 8) != 0;
    return row;
  }
};

template <class C>
struct RowRing {
  char* stages;  // shared
  SharedRow* rows;
  Barrier *full, *empty;

  __device__ __forceinline__ char* stage(unsigned int at) const { return stages + at % C::ring * RowStage<C>::bytes; }
};

// The tail behind a row (Tail in common/rope_row.cuh), by one warp for all heads.
template <class C>
__device__ __forceinline__ void clear_tail(const RopeArgs<C>& a, const Row& row) {
  using Store = typename RopeArgs<C>::Store;
  const int behind = a.metadata.block_size - 1 - row.slot;
  if (!C::tail_zero || !row.stored || !row.last || behind <= 0) return;
  const auto keys = [&](int slot) { return a.at(a.key_cache, a.key, row.page, slot, 0); };
  const auto values = [&](int slot) { return a.at(a.value_cache, a.value, row.page, slot, 0); };
  unsigned int found = 0;
  if (row.place < row.slot) {
#pragma unroll 1
    for (int slot = row.slot + 1;; slot = row.slot + behind) {
      if constexpr (!C::has_out_k)
        found |= bits_of_vectors<C::write_align, C::kv_heads, C::dim * sizeof(Store)>(keys(slot),
                                                                                      a.key.head * sizeof(Store));
      if constexpr (!C::has_out_v)
        found |= bits_of_vectors<C::write_align, C::kv_heads, C::v_dim * sizeof(Store)>(values(slot),
                                                                                        a.value.head * sizeof(Store));
      if (slot == row.slot + behind) break;
    }
    if (!__any_sync(kFullMask, found != 0)) return;
  }
#pragma unroll 1
  for (int slot = row.slot + 1; slot <= row.slot + behind; ++slot) {
    if constexpr (!C::has_out_k)
      clear_vectors<C::write_align, C::kv_heads, C::dim * sizeof(Store)>(reinterpret_cast<char*>(keys(slot)),
                                                                         a.key.head * sizeof(Store));
    if constexpr (!C::has_out_v)
      clear_vectors<C::write_align, C::kv_heads, C::v_dim * sizeof(Store)>(reinterpret_cast<char*>(values(slot)),
                                                                           a.value.head * sizeof(Store));
  }
}

// The loading warp. Row number i of the block takes stage i % C::ring.
template <class C>
__device__ __forceinline__ void load_rows(const RopeArgs<C>& a, const RowRing<C>& ring) {
  using Stage = RowStage<C>;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  const Metadata& m = a.metadata;
  const int stride = static_cast<int>(gridDim.x);
  const bool leads = lane_index() == 0;
  const auto copy_row = [&](unsigned int i, long long token) {
    if (leads) bulk_load(ring.stage(i), a.qkv + token * a.qkv_stride, Stage::row_bytes, ring.full + i % C::ring);
  };
  for (unsigned int i = 0; i < C::ring; ++i) {
    const long long token = blockIdx.x + static_cast<long long>(i) * stride;
    if (token < m.tokens) copy_row(i, token);
  }
  Held held;
  unsigned int i = 0;
#pragma unroll 1
  for (long long at = blockIdx.x; at < m.tokens; at += stride, ++i) {
    const int token = static_cast<int>(at);
    const unsigned int stage = i % C::ring;
    if (i >= C::ring) {
      barrier_wait(ring.empty + stage, (i / C::ring - 1) & 1);
      copy_row(i, token);
    }
    if (held.request < 0 || token >= held.end) held = hold_row(m, guess_request(m, token), token);
    const Row row = locate_row<kPaged, C::has_null>(m, held, Guess{}, token);
    if (leads) {
      ring.rows[stage].put(row);
      const bool angles = row.placed && Stage::angle_bytes > 0;
      if (angles)
        bulk_load(ring.stage(i) + Stage::row_bytes,
                  a.cos_sin + static_cast<long long>(row.position) * (2 * C::Lanes::half), Stage::angle_bytes,
                  ring.full + stage);
      barrier_expect(ring.full + stage, Stage::row_bytes + (angles ? Stage::angle_bytes : 0));
    }
    __syncwarp();
    clear_tail(a, row);
  }
}

// Warp `part` of those that compute. Some have only q, whose weights they keep; the others k and v.
template <class C>
__device__ __forceinline__ void finish_rows(const RopeArgs<C>& a, const RowRing<C>& ring, int part) {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  constexpr int kQWarps = (Rotated::q_units + C::steps - 1) / C::steps;
  constexpr int kOthers = Rotated::units - Rotated::q_units + V::units;
  static_assert((C::parts - kQWarps) * C::steps >= kOthers, "the host must cover every k and v head");
  const bool only_q = part < kQWarps;
  const int first = only_q ? part : Rotated::q_units + part - kQWarps;
  const int apart = only_q ? kQWarps : C::parts - kQWarps;
  const int end = only_q ? Rotated::q_units : Rotated::units + V::units;
  typename Rotated::Weights weights;
  Rotated::load_weights(a, only_q, weights);
  Rotated::add_offset(a, weights);
  Scales scales = load_scales(a);
  invert<C>(scales);
  unsigned int i = 0;
#pragma unroll 1
  for (long long at = blockIdx.x; at < a.metadata.tokens; at += gridDim.x, ++i) {
    const int token = static_cast<int>(at);
    const unsigned int stage = i % C::ring;
    barrier_wait(ring.full + stage, i / C::ring & 1);
    const Row row = ring.rows[stage].get();
    const auto* qkv = reinterpret_cast<const typename RopeArgs<C>::In*>(ring.stage(i));
    typename Rotated::Angles angles;
    Rotated::angles_of(reinterpret_cast<const float*>(ring.stage(i) + RowStage<C>::row_bytes), angles);
    if (only_q) {
#pragma unroll 1
      for (int unit = first; unit < end; unit += apart) {
        uint4 raw[2];
        Rotated::raw_of(qkv, unit, raw);
        Rotated::finish(a, row, token, unit, true, raw, angles, weights, scales);
      }
    } else {
#pragma unroll 1
      for (int unit = first; unit < end; unit += apart) {
        uint4 raw[2];
        if (unit < Rotated::units) {
          if (Rotated::mixed) {
            Rotated::load_weights(a, Rotated::head(unit) < C::q_heads, weights);
            Rotated::add_offset(a, weights);
          }
          Rotated::raw_of(qkv, unit, raw);
          Rotated::finish(a, row, token, unit, false, raw, angles, weights, scales);
        } else {
          V::raw_of(qkv, unit - Rotated::units, raw);
          V::finish(a, row, token, unit - Rotated::units, raw, scales);
        }
      }
    }
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(ring.empty + stage);
  }
}

template <class C>
__device__ __forceinline__ void many_rows(const RopeArgs<C>& a) {
  __shared__ Barrier full[C::ring], empty[C::ring];
  __shared__ SharedRow rows[C::ring];
  const RowRing<C> ring{reinterpret_cast<char*>(shared_bytes), rows, full, empty};
  if (threadIdx.x < C::ring) {
    barrier_init(full + threadIdx.x, 1);
    barrier_init(empty + threadIdx.x, C::parts);
    fence_barrier_init();
  }
  __syncthreads();
  const int part = static_cast<int>(threadIdx.x) / 32;
  if constexpr ((C::early & kEarlyRow) != 0) {
    if (part == C::parts) {
      for (int i = 0; i < C::ring; ++i) {
        const long long token = blockIdx.x + static_cast<long long>(i) * gridDim.x;
        for (int at = lane_index() * 64; at * 2 < RowStage<C>::row_bytes && token < a.metadata.tokens; at += 32 * 64)
          prefetch_line(a.qkv + token * a.qkv_stride + at);
      }
    }
  }
  wait_for_previous_grid();
  if (part == C::parts) {
    load_rows(a, ring);
    return;
  }
  if constexpr (C::fp8) {
    const long long more = more_units(a);
    const long long warps = static_cast<long long>(gridDim.x) * C::parts;
    for (long long unit = static_cast<long long>(blockIdx.x) * C::parts + part; unit < more; unit += warps)
      clear_more(a, unit);
  }
  finish_rows(a, ring, part);
}

}  // namespace hccupy
