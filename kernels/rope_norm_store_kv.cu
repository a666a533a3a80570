// RoPE, QK-RMSNorm and the paged KV write of one layer, in one pass over the qkv projection; bf16, fp16 or FP8 caches.
//
//   position = seq_lens[b] - new tokens of b + place of the row in b        b: the request that holds the row
//   rotate   (first, second) -> (first cos - second sin, second cos + first sin) over dims < rotary_dim
//   norm     x / sqrt(mean(x^2) + norm_eps) * (weight + norm_weight_offset)
//   q, k     rotate, or rotate then norm, or norm then rotate; fp32, rounded once
//   fp8      stored = saturate(value * (1 / scale)) to +-upper_max; q scale = max(absmax, 1e-12) / upper_max per row
//            and head, or q * q_scale_inv. absmax ignores NaN and takes Inf for the largest finite float
//   v        copied bit for bit, or quantised as k
//
//   argument                   shape                                        dtype
//   key_cache, value_cache     [num_blocks, block_size, kv_heads, (v_)head_dim]  as qkv; e4m3, uint8 or int8
//   qkv                        [tokens, (q_heads + kv_heads) head_dim + kv_heads v_head_dim]  bf16, fp16
//   cos_sin                    [positions, rotary_dim]                      fp32: cosines, then sines
//   seq_lens, q_index          [requests], [requests + 1]                   int32
//   block_table                [requests, max_blocks]                       int32
//   q_norm_weight, k_norm_..   [head_dim]                                   fp32, or as qkv; null without a norm
//   k_scale, v_scale, q_scale_inv  [1]                                      fp32 (fp8 only)
//   q                          [tokens, q_heads, head_dim]                  as qkv; e4m3
//   q_scale                    [tokens, q_heads]; prefill [requests, q_heads, max_q_len up to a multiple of 128]  fp32
//   split_k_flag               [requests, kv_heads]                         int32 zeros
//   out_k, out_v               [tokens, kv_heads, (v_)head_dim]             as the caches, which they replace
//
// Rows of no request, or with a bad position or page, write nothing to the caches, and zeros everywhere else.
// tail zero: the row that is its request's last also clears the slots behind it in its page, unless a look at two of
// them finds zeros (Tail in common/rope_row.cuh says when and why).
//
// Baked: heads, dims, dtypes, norm policy, rope style. Run time: tokens, requests, all lengths and strides of caches.
// Launch: kParts warps share a row, in blocks of up to kThreads. A unit is 1 KB of qkv (common/rope_row.cuh).
// kRing 0, few rows: tokens x kParts warps, kSteps units each, then further warps for the fp8 outputs: ceil(requests *
// padded / 32) for q_scale in prefill with dynamic q, ceil(requests * kv_heads / 128) for split_k_flag.
// kRing > 0, many rows (common/rope_stream.cuh): any number of blocks of kParts + 1 warps; ceil(units of q / kSteps)
// warps for q, ceil(the other units / kSteps) for k and v; kRing stages of shared memory.
// May be a dependent launch; kEarly (common/rope_row.cuh) says what is done before the previous grid has ended.

#include "common/rope_row.cuh"
#if kRing
#include "common/rope_stream.cuh"
#endif

namespace hccupy {

// ---- a few rows ---------------------------------------------------------------------------------------------

template <class C>
struct RowUnits {
  using Rotated = RotatedHeads<C>;
  using V = Values<C>;
  static constexpr int count = Rotated::units + V::units;

  static __device__ __forceinline__ void load(const RopeArgs<C>& a, int token, int unit, uint4 (&raw)[2]) {
    if (unit < Rotated::units) {
      Rotated::load(a, token, unit, raw);
    } else if (unit < count) {
      V::load(a, token, unit - Rotated::units, raw);
    }
  }

  static __device__ __forceinline__ void prefetch(const RopeArgs<C>& a, int token, int unit) {
    if (unit < Rotated::units) {
      Rotated::prefetch(a, token, unit);
    } else if (unit < count) {
      V::prefetch(a, token, unit - Rotated::units);
    }
  }

  static __device__ __forceinline__ void prefetch_tail(const RopeArgs<C>& a, const Row& row, int unit) {
    if (unit < Rotated::units) {
      if constexpr (!C::has_out_k) Rotated::prefetch_tail(a, row, unit);
    } else if (unit < count) {
      if constexpr (!C::has_out_v) V::prefetch_tail(a, row, unit - Rotated::units);
    }
  }
};

// Asks for what the row will need by the metadata as it is before the previous grid has ended. Only addresses come of
// it.
template <class C>
__device__ __forceinline__ void look_ahead(const RopeArgs<C>& a, int token, int part, Guess& guess) {
  const Metadata& m = a.metadata;
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  if (m.requests == 0) return;
  Held held;
  held.request = guess.request;
  held.first = token;  // not looked up: the place does not matter here
  held.end = load_fresh(m.q_index + guess.request + 1);
  held.seq_len = load_fresh(m.seq_lens + guess.request);
  const Row row = locate_row<kPaged, C::has_null>(m, held, Guess{}, token);
  if (!row.placed) return;
  guess.position = row.position;
  RotatedHeads<C>::prefetch_angles(a, row.position);
  if (!kPaged || !row.stored) return;
  guess.column = row.position / m.block_size;
  if (!C::tail_zero || !row.last || row.slot + 1 >= m.block_size) return;
#pragma unroll
  for (int step = 0; step < C::steps; ++step) RowUnits<C>::prefetch_tail(a, row, part + step * C::parts);
}

// A warp for every kParts-th unit of a row, all of them in flight at once.
template <class C>
__device__ __forceinline__ void few_rows(const RopeArgs<C>& a) {
  using Rotated = RotatedHeads<C>;
  using Units = RowUnits<C>;
  static_assert(C::parts * C::steps >= Units::count, "the host must cover every q, k and v head");
  constexpr bool kPaged = !(C::has_out_k && C::has_out_v);
  const Metadata& m = a.metadata;
  const long long warp = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const long long row_warps = static_cast<long long>(m.tokens) * C::parts;
  if (warp >= row_warps) {
    wait_for_previous_grid();
    if constexpr (C::fp8) clear_more(a, warp - row_warps);
    return;
  }
  const int token = static_cast<int>(warp / C::parts);
  const int part = static_cast<int>(warp % C::parts);
  Guess guess = guess_request(m, token);
  if constexpr ((C::early & kEarlyRow) != 0) {
    if constexpr (Rotated::normed) {
      if (lane_index() * 128 < C::dim * static_cast<int>(sizeof *a.q_weight))
        prefetch_line(a.q_weight + lane_index() * 128 / sizeof *a.q_weight);
      if (lane_index() * 128 < C::dim * static_cast<int>(sizeof *a.k_weight))
        prefetch_line(a.k_weight + lane_index() * 128 / sizeof *a.k_weight);
    }
#pragma unroll
    for (int step = 0; step < C::steps; ++step) Units::prefetch(a, token, part + step * C::parts);
  }
  if constexpr ((C::early & kEarlyGuess) != 0) look_ahead(a, token, part, guess);
  wait_for_previous_grid();

  uint4 raw[C::steps][2];
#pragma unroll
  for (int step = 0; step < C::steps; ++step) Units::load(a, token, part + step * C::parts, raw[step]);
  typename Rotated::Weights weights;
  if (part < Rotated::units) Rotated::load_weights(a, Rotated::head(part) < C::q_heads, weights);
  Scales scales = load_scales(a);
  typename Rotated::Angles angles;
  if constexpr ((C::early & kEarlyGuess) != 0) {
    if (guess.position >= 0) Rotated::load_angles(a, guess.position, angles);
    if (guess.column >= 0) guess.page = load_fresh(m.block_table + guess.request * m.block_table_stride + guess.column);
  }
  const Held held = hold_row(m, guess, token);
  const Row row = locate_row<kPaged, C::has_null>(m, held, guess, token);
  if (row.placed && row.position != guess.position) Rotated::load_angles(a, row.position, angles);
  Rotated::add_offset(a, weights);
  invert<C>(scales);
#pragma unroll
  for (int step = 0; step < C::steps; ++step) {
    const int unit = part + step * C::parts;
    const bool only_q = (step + 1) * C::parts <= Rotated::q_units;  // whichever the warp
    if (only_q || unit < Rotated::units) {
      if (step > 0 && !only_q) {
        Rotated::load_weights(a, Rotated::head(unit) < C::q_heads, weights);
        Rotated::add_offset(a, weights);
      }
      Rotated::finish(a, row, token, unit, only_q, raw[step], angles, weights, scales);
    } else if (unit < Units::count) {
      Values<C>::finish(a, row, token, unit - Rotated::units, raw[step], scales);
    }
  }
}

}  // namespace hccupy

struct Config {
  static constexpr int qkv_dtype = kQkvDtype;
  static constexpr bool fp8 = kFp8;
  static constexpr int store_dtype = kFp8 ? hccupy::kFloat8E4m3 : kQkvDtype;  // uint8 and int8 caches hold e4m3
  static constexpr int q_weight_dtype = kQNormWeightDtype, k_weight_dtype = kKNormWeightDtype;
  static constexpr int q_heads = kQHeads, kv_heads = kKvHeads, dim = kHeadDim, v_dim = kVHeadDim;
  static constexpr bool interleaved = kRopeStyle == 1;
  static constexpr int policy = kQkNormPolicy;
  static constexpr bool tail_zero = kTail == 0;
  static constexpr bool has_null = kHasNullBlock, has_out_k = kHasOutK, has_out_v = kHasOutV;
  static constexpr int steps = kSteps, parts = kParts, early = kEarly, ring = kRing;
  static constexpr int read_align = kReadAlign, write_align = kWriteAlign, table_align = kTableAlign,
                       weight_align = kWeightAlign;
  using Lanes = hccupy::HeadLanes<kHeadDim, kRotaryDim, interleaved>;
#if kFp8
  static constexpr bool dynamic_q = kQQuant == 0, padded_scale = dynamic_q && kIsPrefill, bounded = kHasUpperMax;
#else
  static constexpr bool dynamic_q = false, padded_scale = false, bounded = false;
#endif
};

// One of the two a binary.
__device__ __forceinline__ void run(const hccupy::RopeArgs<Config>& args) {
  hccupy::let_next_grid_start();
#if kRing
  hccupy::many_rows(args);
#else
  hccupy::few_rows(args);
#endif
}

using In = hccupy::Element<kQkvDtype>::Type;
using Cache = hccupy::Element<kKeyCacheDtype>::Type;
using Store = hccupy::Element<Config::store_dtype>::Type;
using QWeight = hccupy::Element<kQNormWeightDtype>::Type;
using KWeight = hccupy::Element<kKNormWeightDtype>::Type;

#if !kFp8  // one entry a binary: the defines of the other op are not there
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    rope_norm_store_kv(Cache* key_cache, Cache* value_cache, const In* qkv, const float* cos_sin, const int* seq_lens,
                       const int* q_index, const int* block_table, const QWeight* q_norm_weight,
                       const KWeight* k_norm_weight, Store* q, Cache* out_k, Cache* out_v,
                       long long key_cache_stride_num_blocks, long long key_cache_stride_block_size,
                       long long key_cache_stride_kv_heads, long long value_cache_stride_num_blocks,
                       long long value_cache_stride_block_size, long long value_cache_stride_kv_heads,
                       long long qkv_stride_tokens, long long block_table_stride_requests, long long q_stride_tokens,
                       long long q_stride_q_heads, long long out_k_stride_tokens, long long out_k_stride_kv_heads,
                       long long out_v_stride_tokens, long long out_v_stride_kv_heads, float norm_eps,
                       float norm_weight_offset, int null_block, int tokens, int requests, int positions,
                       int num_blocks, int block_size, int max_blocks) {
  const hccupy::RopeArgs<Config> args{
      {seq_lens, q_index, block_table, block_table_stride_requests, tokens, requests, positions, num_blocks, block_size,
       max_blocks, null_block},
      qkv,
      qkv_stride_tokens,
      cos_sin,
      q_norm_weight,
      k_norm_weight,
      norm_eps,
      norm_weight_offset,
      key_cache,
      value_cache,
      {key_cache_stride_num_blocks, key_cache_stride_block_size, key_cache_stride_kv_heads},
      {value_cache_stride_num_blocks, value_cache_stride_block_size, value_cache_stride_kv_heads},
      q,
      out_k,
      out_v,
      {0, q_stride_tokens, q_stride_q_heads},
      {0, out_k_stride_tokens, out_k_stride_kv_heads},
      {0, out_v_stride_tokens, out_v_stride_kv_heads},
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      0.0f,
      0};
  run(args);
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) rope_norm_store_kv_fp8(
    Cache* key_cache, Cache* value_cache, const In* qkv, const float* cos_sin, const int* seq_lens, const int* q_index,
    const int* block_table, const QWeight* q_norm_weight, const KWeight* k_norm_weight, const float* k_scale,
    const float* v_scale, const float* q_scale_inv, Store* q, float* q_scale, int* split_k_flag, Cache* out_k,
    Cache* out_v, long long key_cache_stride_num_blocks, long long key_cache_stride_block_size,
    long long key_cache_stride_kv_heads, long long value_cache_stride_num_blocks,
    long long value_cache_stride_block_size, long long value_cache_stride_kv_heads, long long qkv_stride_tokens,
    long long block_table_stride_requests, long long q_stride_tokens, long long q_stride_q_heads,
    long long out_k_stride_tokens, long long out_k_stride_kv_heads, long long out_v_stride_tokens,
    long long out_v_stride_kv_heads, float norm_eps, float norm_weight_offset, int null_block, float upper_max,
    int max_q_len, int tokens, int requests, int positions, int num_blocks, int block_size, int max_blocks) {
  auto bytes = [](Cache* at) { return reinterpret_cast<Store*>(at); };
  const hccupy::RopeArgs<Config> args{
      {seq_lens, q_index, block_table, block_table_stride_requests, tokens, requests, positions, num_blocks, block_size,
       max_blocks, null_block},
      qkv,
      qkv_stride_tokens,
      cos_sin,
      q_norm_weight,
      k_norm_weight,
      norm_eps,
      norm_weight_offset,
      bytes(key_cache),
      bytes(value_cache),
      {key_cache_stride_num_blocks, key_cache_stride_block_size, key_cache_stride_kv_heads},
      {value_cache_stride_num_blocks, value_cache_stride_block_size, value_cache_stride_kv_heads},
      q,
      bytes(out_k),
      bytes(out_v),
      {0, q_stride_tokens, q_stride_q_heads},
      {0, out_k_stride_tokens, out_k_stride_kv_heads},
      {0, out_v_stride_tokens, out_v_stride_kv_heads},
      k_scale,
      v_scale,
      q_scale_inv,
      q_scale,
      split_k_flag,
      kHasUpperMax ? upper_max : 448.0f,
      (max_q_len + 127) / 128 * 128};
  run(args);
}
#endif
