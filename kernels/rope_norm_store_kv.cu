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
// them finds zeros (common/rope_tail.cuh says when and why).
//
// Baked: heads, dims, dtypes, norm policy, rope style. Run time: tokens, requests, all lengths and strides of caches.
// Launch: a unit is 1 KB of qkv (common/rope_row.cuh), a warp has up to kSteps units of a row, kParts warps have a row.
//   few rows      (common/rope_few.cuh)    tokens x kParts warps in blocks of up to kThreads, then, for the fp8
//   outputs,
//                 ceil(requests * padded / 32) for q_scale in prefill with dynamic q and ceil(requests * kv_heads /
//                 128) for split_k_flag
//   kBulk         (common/rope_block.cuh)  a block of kParts + 1 warps a row; the row and its angles in shared memory
//   kMany         (common/rope_many.cuh)   ceil(tokens / n) x kParts warps for n rows a warp (at most 32), in blocks of
//                 kThreads; per warp kRing KB of shared memory, and kAhead + 1 rows of cos_sin (common/rope_stage.cuh)
//   kTogether     (common/rope_narrow.cuh) a unit has one head of several rows: a multiple of ceil(tokens / those)
//   warps
//                 in blocks of one; kRing KB of shared memory. Not baked: kSteps, kParts
// May be a dependent launch; kEarly (common/rope_args.cuh) says what is done before the previous grid has ended.

#if kTogether
#include "common/rope_narrow.cuh"
#elif kMany
#include "common/rope_many.cuh"
#elif kBulk
#include "common/rope_block.cuh"
#else
#include "common/rope_few.cuh"
#endif

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
  static constexpr int steps = kSteps, parts = kParts, early = kEarly, threads = kThreads;
  static constexpr bool many = kMany, bulk = kBulk, together = kTogether;
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
#if kTogether
  hccupy::narrow_rows(args);
#elif kMany
  hccupy::many_rows(args);
#elif kBulk
  hccupy::row_a_block(args);
#else
  hccupy::few_rows(args);
#endif
}

using In = hccupy::Element<kQkvDtype>::Type;
using Cache = hccupy::Element<kKeyCacheDtype>::Type;
using Store = hccupy::Element<Config::store_dtype>::Type;
using QWeight = hccupy::Element<kQNormWeightDtype>::Type;
using KWeight = hccupy::Element<kKNormWeightDtype>::Type;

__device__ __forceinline__ Store* stored(Cache* at) { return reinterpret_cast<Store*>(at); }

// RopeArgs up to what only fp8 has, from the parameters that both entries have.
// clang-format off
#define ROPE_ARGS                                                                                             \
  {seq_lens, q_index, block_table, block_table_stride_requests, tokens, requests, positions, num_blocks,      \
   block_size, max_blocks, null_block},                                                                       \
  qkv, qkv_stride_tokens, cos_sin, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset,                \
  stored(key_cache), stored(value_cache),                                                                     \
  {key_cache_stride_num_blocks, key_cache_stride_block_size, key_cache_stride_kv_heads},                      \
  {value_cache_stride_num_blocks, value_cache_stride_block_size, value_cache_stride_kv_heads},                \
  q, stored(out_k), stored(out_v), {0, q_stride_tokens, q_stride_q_heads},                                    \
  {0, out_k_stride_tokens, out_k_stride_kv_heads}, {0, out_v_stride_tokens, out_v_stride_kv_heads}
// clang-format on

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
  run({ROPE_ARGS});
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
  run({ROPE_ARGS, k_scale, v_scale, q_scale_inv, q_scale, split_k_flag, kHasUpperMax ? upper_max : 448.0f,
       (max_q_len + 127) / 128 * 128});
}
#endif
