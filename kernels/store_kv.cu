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
// them wins with kFewRows; else one of them wins each access of kAccess bytes.
//
// Baked: heads, dims, dtypes. Run time: tokens, requests, lengths and strides of the caches.
// Launch, store_kv: a row is kParts parts of kPartThreads x kDepth accesses, a block of kThreads has kThreads /
// kPartThreads parts, with kFewRows one. zero_kv_tail: requests x kParts warps in blocks of kThreads. May be dependent
// launches.

#include "common/vectors.cuh"

#if kStore  // one entry a binary: the defines of the other op are not there
using Cache = hccupy::Element<kCacheDtype>::Type;
using Slot = hccupy::Element<kSlotMappingDtype>::Type;

namespace hccupy {

// Does a later row go to the same slot? All threads of the block take part, four loads each in flight.
__device__ __forceinline__ bool superseded(const Slot* slot_mapping, Slot slot, int row, int rows) {
  constexpr int kBatch = 4;
  bool found = false;
#pragma unroll 1
  for (int first = row + 1 + static_cast<int>(threadIdx.x); first < rows; first += kThreads * kBatch) {
    Slot others[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) others[k] = slot_mapping[min(first + k * kThreads, rows - 1)];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) found = found || (others[k] == slot && first + k * kThreads < rows);
  }
  return __syncthreads_or(found) != 0;
}

// Piece `at` of a row: kAccess bytes, so many to a head.
__device__ __forceinline__ long long place_in_row(int at, long long stride_heads) {
  constexpr int kOfHead = kHeadDim * static_cast<int>(sizeof(Cache)) / kAccess;
  return at / kOfHead * stride_heads * static_cast<int>(sizeof(Cache)) + at % kOfHead * kAccess;
}

}  // namespace hccupy

extern "C" __global__ void __launch_bounds__(kThreads)
    store_kv(Cache* cache, const Cache* src, const Slot* slot_mapping, long long cache_stride_num_blocks,
             long long cache_stride_block_size, long long cache_stride_kv_heads, long long src_stride_tokens,
             long long src_stride_kv_heads, int null_block, int tokens, int num_blocks, int block_size) {
  using namespace hccupy;
  using Word = WordOf<kAccess>::Type;
  constexpr int kPieces = kKvHeads * kHeadDim * static_cast<int>(sizeof(Cache)) / kAccess;
  const unsigned int unit = blockIdx.x * (kThreads / kPartThreads) + threadIdx.x / kPartThreads;
  const int row = static_cast<int>(unit / kParts);
  const int first = static_cast<int>(unit % kParts * (kPartThreads * kDepth) + threadIdx.x % kPartThreads);
  const char* from = reinterpret_cast<const char*>(src + row * src_stride_tokens);

  // A prefetch consumes no value. H200, 256 rows: 2.0 -> 1.7 us; from 4096 rows on it changes nothing.
  if (kFewRows && row < tokens) {
    if (threadIdx.x == 0) prefetch_line(slot_mapping + row);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const int at = first + k * kPartThreads;
      if (at < kPieces && at % (128 / kAccess) == 0) prefetch_line(from + place_in_row(at, src_stride_kv_heads));
    }
  }

  wait_for_previous_grid();
  if (row >= tokens) return;
  const Slot slot = slot_mapping[row];
  Word words[kDepth];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    const int at = first + k * kPartThreads;
    if (at < kPieces) words[k] = load_once(reinterpret_cast<const Word*>(from + place_in_row(at, src_stride_kv_heads)));
  }
  let_next_grid_start();  // any sooner, and its waiting blocks are in the way of this grid's: 4096 rows 5.9 -> 5.3 us

  if (slot < 0 || (kFewRows && superseded(slot_mapping, slot, row, tokens))) return;
  unsigned long long page, place;
  if (static_cast<unsigned long long>(slot) >> 32 == 0) {  // a 64-bit division is a call
    page = static_cast<unsigned int>(slot) / static_cast<unsigned int>(block_size);
    place = static_cast<unsigned int>(slot) % static_cast<unsigned int>(block_size);
  } else {
    page = static_cast<unsigned long long>(slot) / static_cast<unsigned int>(block_size);
    place = static_cast<unsigned long long>(slot) % static_cast<unsigned int>(block_size);
  }
  if (page >= static_cast<unsigned int>(num_blocks) ||
      (kHasNullBlock && static_cast<long long>(page) == static_cast<long long>(null_block)))
    return;
  char* to = reinterpret_cast<char*>(cache + static_cast<long long>(page) * cache_stride_num_blocks +
                                     static_cast<long long>(place) * cache_stride_block_size);
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    const int at = first + k * kPartThreads;
    if (at < kPieces) store_once(reinterpret_cast<Word*>(to + place_in_row(at, cache_stride_kv_heads)), words[k]);
  }
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
  using namespace hccupy;
  const unsigned int unit = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int request = static_cast<int>(unit / kParts);
  const int part = static_cast<int>(unit % kParts);

  const int* table = block_table + request * block_table_stride_requests;

  // A length that the previous grid may still change: it only says which line of the table to ask L2 for. Volatile, so
  // that no cache keeps it for the load below.
  if (request < requests && threadIdx.x % 32 == 0 && part == 0) {
    const int seq_len = *static_cast<const volatile int*>(seq_lens + request);
    const int column = seq_len > 0 ? (seq_len - 1) / block_size : max_blocks;
    if (column < max_blocks) prefetch_line(table + column);
  }

  wait_for_previous_grid();
  if (request >= requests) return;
  // The first pages come with the length, in one trip to memory.
  const int early = lane_index() < max_blocks ? table[lane_index()] : 0;
  const int seq_len = seq_lens[request];
  if (seq_len <= 0) return;
  const int column = (seq_len - 1) / block_size;
  if (column >= max_blocks) return;
  const int page = column < 32 ? __shfl_sync(kFullMask, early, column) : table[column];
  let_next_grid_start();
  if (page < 0 || page >= num_blocks || (kHasNullBlock && page == null_block)) return;
  const int first = seq_len - column * block_size;
  constexpr int kBytes = static_cast<int>(sizeof(Cache));
  const auto clear = [&](auto vectors, Cache* cache, long long stride_blocks, long long stride_slots,
                         long long stride_heads) {
    Cache* slots = cache + page * stride_blocks + first * stride_slots;
    decltype(vectors)::clear(reinterpret_cast<char*>(slots), stride_heads * kBytes, stride_slots * kBytes,
                             block_size - first, part, kParts);
  };
  clear(Vectors<kAccess, kKvHeads, kHeadDim * kBytes>{}, key_cache, key_cache_stride_num_blocks,
        key_cache_stride_block_size, key_cache_stride_kv_heads);
  clear(Vectors<kAccess, kKvHeads, kVHeadDim * kBytes>{}, value_cache, value_cache_stride_num_blocks,
        value_cache_stride_block_size, value_cache_stride_kv_heads);
}
#endif
