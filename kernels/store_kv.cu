// store_kv: dense K or V rows to the slots of a paged cache. zero_kv_tail: clear what lies behind each request's last
// token.
//
//   store_kv      cache[slot / block_size, slot % block_size] = src[row], slot = slot_mapping[row]
//   zero_kv_tail  cache[last page, seq_len % block_size :] = 0 if the last block is not full, for both caches
//
//   argument                shape                                            dtype
//   cache, key_, value_..   [num_blocks, block_size, kv_heads, (v_)head_dim]  any of 1, 2 or 4 bytes; unit inner stride
//   src                     [tokens, kv_heads, head_dim]                     as cache; any stride on tokens and heads
//   slot_mapping            [tokens]                                         int64, int32
//   seq_lens, block_table   [requests], [requests, max_blocks]               int32
//
// Slots and pages out of range, and those of null_block, are skipped. Where rows of store_kv share a slot, the last of
// them wins up to kSearch rows; above, one of them wins each access of kAccess bytes.
//
// Baked: heads, dims, dtypes. Run time: tokens, requests, lengths and strides of the caches.
// Launch: one warp per unit, blocks of up to kThreads; tokens x kParts units, requests x kParts for zero_kv_tail. May
// be a dependent launch.

#include "common/vectors.cuh"

namespace hccupy {

// One warp copies its part of a row: kDepth accesses a lane, all loads before the first store.
template <int kWordBytes, int kRowHeads, int kHeadBytes, int kRowParts>
__device__ __forceinline__ void copy_row(char* to, long long to_stride, const char* from, long long from_stride,
                                         int part) {
  using Word = typename WordOf<kWordBytes>::Type;
  constexpr int kPieces = kHeadBytes / kWordBytes;
  constexpr int kDepth = 4;
  for (int start = part * 32 * kDepth; start < kRowHeads * kPieces; start += kRowParts * 32 * kDepth) {
    Word words[kDepth];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const int at = start + k * 32 + lane_index();
      if (at < kRowHeads * kPieces)
        words[k] =
            load_once(reinterpret_cast<const Word*>(from + at / kPieces * from_stride + at % kPieces * kWordBytes));
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const int at = start + k * 32 + lane_index();
      if (at < kRowHeads * kPieces)
        *reinterpret_cast<Word*>(to + at / kPieces * to_stride + at % kPieces * kWordBytes) = words[k];
    }
  }
}

// Does a later row of a short call go to the same slot? All 32 lanes take part.
template <int kMostRows, typename Slot>
__device__ __forceinline__ bool superseded(const Slot* slot_mapping, int row, int rows) {
  if (rows > kMostRows) return false;
  const Slot slot = slot_mapping[row];
  bool found = false;
  for (int at = row + 1 + lane_index(); at < rows; at += 32) found = found || slot_mapping[at] == slot;
  return __ballot_sync(kFullMask, found) != 0;
}

}  // namespace hccupy

#if kStore  // one entry a binary: the defines of the other op are not there
using Cache = hccupy::Element<kCacheDtype>::Type;
using Slot = hccupy::Element<kSlotMappingDtype>::Type;

extern "C" __global__ void __launch_bounds__(kThreads)
    store_kv(Cache* cache, const Cache* src, const Slot* slot_mapping, long long cache_stride_num_blocks,
             long long cache_stride_block_size, long long cache_stride_kv_heads, long long src_stride_tokens,
             long long src_stride_kv_heads, int null_block, int tokens, int num_blocks, int block_size) {
  hccupy::let_next_grid_start();
  hccupy::wait_for_previous_grid();
  const long long unit = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (unit >= static_cast<long long>(tokens) * kParts) return;
  const int row = static_cast<int>(unit / kParts);
  const long long slot = slot_mapping[row];
  if (slot < 0 || hccupy::superseded<kSearch>(slot_mapping, row, tokens)) return;
  const long long page = slot / block_size;
  if (page >= num_blocks || (kHasNullBlock && page == null_block)) return;
  constexpr int kBytes = static_cast<int>(sizeof(Cache));
  hccupy::copy_row<kAccess, kKvHeads, kHeadDim * kBytes, kParts>(
      reinterpret_cast<char*>(cache + page * cache_stride_num_blocks + slot % block_size * cache_stride_block_size),
      cache_stride_kv_heads * kBytes, reinterpret_cast<const char*>(src + row * src_stride_tokens),
      src_stride_kv_heads * kBytes, static_cast<int>(unit % kParts));
}
#else
using Cache = hccupy::Element<kKeyCacheDtype>::Type;

extern "C" __global__ void __launch_bounds__(kThreads)
    zero_kv_tail(Cache* key_cache, Cache* value_cache, const int* seq_lens, const int* block_table,
                 long long key_cache_stride_num_blocks, long long key_cache_stride_block_size,
                 long long key_cache_stride_kv_heads, long long value_cache_stride_num_blocks,
                 long long value_cache_stride_block_size, long long value_cache_stride_kv_heads,
                 long long block_table_stride_requests, int null_block, int requests, int num_blocks, int block_size,
                 int max_blocks) {
  hccupy::let_next_grid_start();
  hccupy::wait_for_previous_grid();
  const long long unit = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (unit >= static_cast<long long>(requests) * kParts) return;
  const int request = static_cast<int>(unit / kParts);
  const int seq_len = seq_lens[request];
  if (seq_len <= 0) return;
  const int column = (seq_len - 1) / block_size;
  if (column >= max_blocks) return;
  const int page = block_table[request * block_table_stride_requests + column];
  if (page < 0 || page >= num_blocks || (kHasNullBlock && page == null_block)) return;
  constexpr int kBytes = static_cast<int>(sizeof(Cache));
  const int first = seq_len - column * block_size;
  for (int slot = first + static_cast<int>(unit % kParts); slot < block_size; slot += kParts) {
    hccupy::Vectors<kAccess, kKvHeads, kHeadDim * kBytes>::clear(
        reinterpret_cast<char*>(key_cache + page * key_cache_stride_num_blocks + slot * key_cache_stride_block_size),
        key_cache_stride_kv_heads * kBytes);
    hccupy::Vectors<kAccess, kKvHeads, kVHeadDim * kBytes>::clear(
        reinterpret_cast<char*>(value_cache + page * value_cache_stride_num_blocks +
                                slot * value_cache_stride_block_size),
        value_cache_stride_kv_heads * kBytes);
  }
}
#endif
