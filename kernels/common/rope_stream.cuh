// From a row a multiprocessor on, on sm_90 and newer: bulk copies bring whole rows of qkv into shared memory, C::ring
// rows ahead. With as many blocks as rows, and a ring of 1, nothing but the row's arithmetic follows the copy.
//
// A block has C::parts warps that compute, and one that loads: for each row of the block it starts the copies of the
// row and of its angles, works out where K and V go, and hands all of that over by a barrier. So no warp that computes
// ever waits for metadata, and what is in flight does not depend on registers.
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_tail.cuh"
#include "common/rope_units.cuh"
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

// The loading warp. Row number i of the block takes stage i % C::ring. What it does before the previous grid has ended
// is for the first rows: their qkv and, with kEarlyGuess, what the first one's metadata point to as they are then.
template <class C>
__device__ __forceinline__ void load_rows(const RopeArgs<C>& a, const RowRing<C>& ring) {
  using Stage = RowStage<C>;
  using Rotated = RotatedHeads<C>;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  constexpr bool kGuess = (C::early & kEarlyGuess) != 0;
  const Metadata& m = a.metadata;
  const int stride = static_cast<int>(gridDim.x);
  const bool leads = lane_index() == 0;
  const auto copy_row = [&](unsigned int i, long long token) {
    if (leads) bulk_load(ring.stage(i), a.qkv + token * a.qkv_stride, Stage::row_bytes, ring.full + i % C::ring);
  };
  Held held;
  Row row;
  bool known = false;  // of the first row
  const int first = static_cast<int>(blockIdx.x);
  const Guess guess(m, first);
  if constexpr ((C::early & kEarlyRow) != 0) {
#pragma unroll 1
    for (int i = 0; i < C::ring; ++i) {
      const long long token = blockIdx.x + static_cast<long long>(i) * stride;
#pragma unroll 1
      for (int byte = lane_index() * 128; byte < Stage::row_bytes && token < m.tokens; byte += 32 * 128)
        prefetch_line(reinterpret_cast<const char*>(a.qkv + token * a.qkv_stride) + byte);
    }
  }
  if (kGuess && first < m.tokens) {
    held = read_held(m, guess.request);
    row = place_row<kPaged>(m, held, first);
    put_page<C::has_null>(m, read_page(m, row), row);
    if (row.placed) Rotated::prefetch_angles(a, row.position);
    const Tail<C> tail(a, row);
    if (tail.to_look_at()) tail.prefetch();
  }
  wait_for_previous_grid();
#pragma unroll 1
  for (unsigned int i = 0; i < C::ring; ++i) {
    const long long token = blockIdx.x + static_cast<long long>(i) * stride;
    if (token < m.tokens) copy_row(i, token);
  }
  if (kGuess && first < m.tokens) {
    const Held now = read_held(m, guess.request);
    const int page = read_page(m, row);
    const int middle = guess.look(m);
    known = now == held && page == row.page && row.request >= 0 && !__any_sync(kFullMask, guess.astray(middle, first));
    if (!known) held.request = -1;
  }
  unsigned int i = 0;
#pragma unroll 1
  for (long long at = blockIdx.x; at < m.tokens; at += stride, ++i) {
    const int token = static_cast<int>(at);
    const unsigned int stage = i % C::ring;
    if (i >= C::ring) {
      barrier_wait(ring.empty + stage, (i / C::ring - 1) & 1);
      copy_row(i, token);
    }
    if (!known) {
      if (held.request < 0 || token >= held.end) held = hold_row(m, Guess(m, token), token);
      row = place_row<kPaged>(m, held, token);
      put_page<C::has_null>(m, read_page(m, row), row);
    }
    known = false;
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
    if constexpr (Tail<C>::exists) {
      const Tail<C> tail(a, row);
      if (tail.to_look_at() && __any_sync(kFullMask, tail.look() != 0)) tail.clear(0, 1);
    }
  }
}

// Warp `part` of those that compute.
template <class C>
__device__ __forceinline__ void finish_rows(const RopeArgs<C>& a, const RowRing<C>& ring, int part) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps, "the host must count the warps of a row likewise");
  const Share<C> share(part);
  Scales scales = load_scales(a);
  if (!share.only_q) invert<C>(scales);
  unsigned int i = 0;
#pragma unroll 1
  for (long long at = blockIdx.x; at < a.metadata.tokens; at += gridDim.x, ++i) {
    const int token = static_cast<int>(at);
    const unsigned int stage = i % C::ring;
    barrier_wait(ring.full + stage, i / C::ring & 1);
    const Row row = ring.rows[stage].get();
    const auto* qkv = reinterpret_cast<const typename RopeArgs<C>::In*>(ring.stage(i));
    typename Rotated::Weights weights;  // read anew for each row, from L1: 16 registers less between rows
    share.load_weights(a, share.first, weights);
    typename Rotated::Angles angles;
    Rotated::angles_of(reinterpret_cast<const float*>(ring.stage(i) + RowStage<C>::row_bytes), angles);
    uint4 raw[2];
    share.template finish<false>(a, row, token, raw, angles, weights, scales, [&](int unit, uint4(&to)[2]) {
      share.load_near(share.first_of(qkv, unit), unit, to);
    });
    if constexpr (Tail<C>::exists) {
      const Row done = ring.rows[stage].get();  // once more, so that no register holds it meanwhile
      const Tail<C> tail(a, done);
      if (tail.behind > 0 && tail.fresh()) tail.clear(part, C::parts);  // one warp alone takes 20 us for a page
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
  const int part = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  if (part == C::parts) {
    load_rows(a, ring);
    return;
  }
  wait_for_previous_grid();
  if constexpr (C::fp8) {
    const long long more = more_units(a);
    const long long warps = static_cast<long long>(gridDim.x) * C::parts;
#pragma unroll 1
    for (long long unit = static_cast<long long>(blockIdx.x) * C::parts + part; unit < more; unit += warps)
      clear_more(a, unit);
  }
  finish_rows(a, ring, part);
}

}  // namespace hccupy
