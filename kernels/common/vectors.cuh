// Vectors of one slot of a paged cache, one a head, moved by one warp: cleared, looked at, asked for.
#pragma once

#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace hccupy {

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// The same value in all lanes, known as such to the compiler: then addresses are worked out once a warp.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// kHeads vectors of kVectorBytes each, stride_bytes apart, in pieces of at most kAlign bytes.
template <int kAlign, int kHeads, int kVectorBytes>
struct Vectors {
  static constexpr int piece = common_divisor(common_divisor(kVectorBytes, kAlign), 16);
  static constexpr int of_vector = kVectorBytes / piece;
  static constexpr int count = kHeads * of_vector;
  using Word = typename WordOf<piece>::Type;

  static __device__ __forceinline__ long long place(int at, long long stride_bytes) {
    return at / of_vector * stride_bytes + at % of_vector * piece;
  }

  // Clears share `part` of `parts`, a warp each, of `slots` slots that are slot_bytes apart. A lane keeps its places in
  // a slot, and small slots are cleared several at a time, so a store costs an addition. (With every place worked out
  // anew a warp went 75 to 140 cycles from one store to the next. First to leave L2: one row of 64/8 heads 2.27 ->
  // 2.14 us, 16 rows 3.32 -> 2.78.)
  static __device__ __forceinline__ void clear(char* first, long long stride_bytes, long long slot_bytes, int slots,
                                               int part, int parts) {
    constexpr int kBeside = count < 32 ? 32 / count : 1;
    constexpr int kRounds = (count + 31) / 32;
    const int lane = lane_index();
    if (count < 32 && lane >= kBeside * count) return;
    const int start = count < 32 ? lane % count : lane;
    int slot = part * kBeside + (count < 32 ? lane / count : 0);
    char* to = first + slot * slot_bytes;
    const long long step_bytes = parts * kBeside * slot_bytes;
#pragma unroll(kRounds < 4 ? 4 / kRounds : 1)
    for (; slot < slots; slot += parts * kBeside, to += step_bytes) {
#pragma unroll(kRounds <= 8 ? kRounds : 4)
      for (int round = 0; round < kRounds; ++round) {
        const int at = round * 32 + start;
        if (count > 32 && count % 32 != 0 && at >= count) break;
        Word zero;
        memset(&zero, 0, sizeof zero);
        store_once(reinterpret_cast<Word*>(to + place(at, stride_bytes)), zero);
      }
    }
  }

  // Not 0 if one of the first kLooked pieces has a bit set, in the lane that sees it. Up to 8 loads in flight.
  template <int kLooked>
  static __device__ __forceinline__ unsigned int bits(const char* first, long long stride_bytes) {
    constexpr int kRounds = (kLooked + 31) / 32;
    unsigned int found = 0;
#pragma unroll(kRounds <= 8 ? kRounds : 4)
    for (int step = 0; step < kRounds; ++step) {
      const int at = step * 32 + lane_index();
      if (kLooked % 32 != 0 && at >= kLooked) break;
      const Word word = load_once(reinterpret_cast<const Word*>(first + place(at, stride_bytes)));
      unsigned int words[(sizeof word + 3) / 4] = {};
      memcpy(words, &word, sizeof word);
#pragma unroll
      for (unsigned int part : words) found |= part;
    }
    return found;
  }

  // Asks for their lines in L2 (of the first kSome vectors).
  template <int kSome>
  static __device__ __forceinline__ void prefetch(const char* first, long long stride_bytes) {
    constexpr int kLines = (kVectorBytes + 127) / 128;
#pragma unroll 1
    for (int at = lane_index(); at < kSome * kLines; at += 32)
      prefetch_line(first + at / kLines * stride_bytes + at % kLines * 128);
  }
};

}  // namespace hccupy
