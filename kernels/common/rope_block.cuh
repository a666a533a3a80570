// A row a block, on sm_90 and newer: a bulk copy brings the row of qkv into shared memory.
//
// A block has C::parts warps that compute, and one that loads: it starts the copies of the row and of its angles, works
// out where K and V go, and hands all of that over by a barrier. So no warp that computes ever waits for metadata.
#pragma once

#include "common/rope_fp8.cuh"
#include "common/rope_tail.cuh"
#include "common/rope_units.cuh"
#include "common/sm90_ptx.cuh"

namespace hccupy {

// In shared memory: the row of qkv, then that of cos_sin.
template <class C>
struct RowStage {
  static constexpr int row_bytes = ((C::q_heads + C::kv_heads) * C::dim + C::kv_heads * C::v_dim) *
                                   static_cast<int>(sizeof(typename RopeArgs<C>::In));
  static constexpr int angle_bytes = 2 * C::Lanes::half * static_cast<int>(sizeof(float));
  static_assert(row_bytes % 16 == 0 && angle_bytes % 16 == 0 && C::read_align == 16 && C::table_align == 16,
                "the host must take another kernel for rows that bulk copies cannot move");
};

// The loading warp. Before the previous grid has ended it asks for the row in L2, and for what the
// metadata point to as they are then.
template <class C>
__device__ __forceinline__ void load_row(const RopeArgs<C>& a, int token, SharedRow& shared, Barrier* full) {
  using Stage = RowStage<C>;
  using Rotated = RotatedHeads<C>;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  const Metadata& m = a.metadata;
  const auto* qkv = a.qkv + token * a.qkv_stride;
  char* stage = reinterpret_cast<char*>(shared_bytes);
  const bool leads = lane_index() == 0;
  const Guess guess(m, token);
  if constexpr ((C::early & kEarlyRow) != 0) {
#pragma unroll 1
    for (int byte = lane_index() * 128; byte < Stage::row_bytes; byte += 32 * 128)
      prefetch_line(reinterpret_cast<const char*>(qkv) + byte);
  }
  Row row;
#pragma unroll 1
  for (bool early = true;; early = false) {  // the second time only if the guess was wrong: one body of code for both
    const Held held = early ? read_held(m, guess.request) : hold_row(m, guess, token);
    row = place_row<kPaged>(m, held, token);
    put_page<C::has_null>(m, read_page(m, row), row);
    if (!early) break;
    if (row.placed) Rotated::prefetch_angles(a, row.position);
    {
      const Tail<C> tail(a, row);
      if (tail.to_look_at()) tail.prefetch();
    }
    wait_for_previous_grid();
    if (leads) bulk_load(stage, qkv, Stage::row_bytes, full);
    const Held now = read_held(m, guess.request);
    const int page = read_page(m, row);
    const int middle = guess.look(m);
    if (now == held && page == row.page && row.request >= 0 && !__any_sync(kFullMask, guess.astray(middle, token)))
      break;
  }
  if (leads) {
    shared.put(row);
    const bool angles = row.placed && Stage::angle_bytes > 0;
    if (angles)
      bulk_load(stage + Stage::row_bytes, a.cos_sin + static_cast<long long>(row.position) * (2 * C::Lanes::half),
                Stage::angle_bytes, full);
    barrier_expect(full, Stage::row_bytes + (angles ? Stage::angle_bytes : 0));
  }
  __syncwarp();
  look_after_tail(a, row, C::parts, C::parts + 1);
}

// Warp `part` of those that compute.
template <class C>
__device__ __forceinline__ void finish_row(const RopeArgs<C>& a, int token, const SharedRow& shared, Barrier* full,
                                           int part) {
  using Rotated = RotatedHeads<C>;
  static_assert(C::parts == Share<C>::warps, "the host must count the warps of a row likewise");
  const Share<C> share(part);
  Scales scales = load_scales(a);
  if (!share.only_q) invert<C>(scales);
  typename Rotated::Weights weights;
  share.load_weights(a, share.first, weights);
  const char* stage = reinterpret_cast<const char*>(shared_bytes);
  barrier_wait(full, 0);
  const Row row = shared.get();
  const auto* qkv = reinterpret_cast<const typename RopeArgs<C>::In*>(stage);
  typename Rotated::Angles angles;
  Rotated::angles_of(reinterpret_cast<const float*>(stage + RowStage<C>::row_bytes), angles);
  uint4 raw[Share<C>::at_once][2];
  share.template finish<false>(a, row, token, raw, angles, weights, scales,
                               [&](int unit, uint4(&to)[2]) { share.load_near(share.first_of(qkv, unit), unit, to); });
  look_after_tail(a, row, part, C::parts + 1);
}

template <class C>
__device__ __forceinline__ void row_a_block(const RopeArgs<C>& a) {
  __shared__ Barrier full;
  __shared__ SharedRow row;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int part = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int token = static_cast<int>(blockIdx.x);
  const bool has_row = token < a.metadata.tokens;
  if (part == C::parts) {
    if (has_row) load_row(a, token, row, &full);
    return;
  }
  wait_for_previous_grid();
  if constexpr (C::fp8) {
    const unsigned int more = more_units(a);
#pragma unroll 1
    for (unsigned int unit = blockIdx.x * C::parts + part; unit < more; unit += gridDim.x * C::parts)
      clear_more(a, unit);
  }
  if (has_row) finish_row(a, token, row, &full, part);
}

}  // namespace hccupy
