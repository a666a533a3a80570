// RoPE over the heads of a row.
//
// A head is held by `lanes` neighbouring lanes of a warp. A lane owns slots, each of two chunks of neighbouring
// elements, so placed that both members of every rotary pair are in the same lane: no exchange between lanes.
// Which lane owns which element, and so the order of every sum, follows from the head alone: a row's bits depend
// neither on the launch nor on strides or alignment.
#pragma once

#include "common/vectors.cuh"

namespace hccupy {

// ---- a head in registers ------------------------------------------------------------------------------------

// NeoX pairs (i, i + R/2): a slot is chunk i of the first half and chunk i of the second. Interleaved pairs
// (2i, 2i + 1): they lie in one chunk. The dims behind kRotary are chunks that nothing rotates.
template <int kDim, int kRotary, bool kInterleaved>
struct HeadLanes {
  static_assert(kDim % 8 == 0, "head_dim must be a multiple of 8");
  static_assert(kRotary % 2 == 0 && kRotary <= kDim, "rotary_dim must be even and at most head_dim");
  static constexpr int half = kRotary / 2;
  static constexpr int chunk = common_divisor(common_divisor(kInterleaved ? kRotary : half, kDim), 8);
  static constexpr int rotary_slots = kInterleaved ? 0 : half / chunk;  // slots whose chunks are partners
  static constexpr int single_chunks = (kInterleaved ? kDim : kDim - kRotary) / chunk;  // chunks without a partner
  static constexpr int single_slots = (single_chunks + 1) / 2;
  static constexpr int slots = rotary_slots + single_slots;
  static constexpr int lanes = slots > 16 ? 32 : slots > 8 ? 16 : slots > 4 ? 8 : slots > 2 ? 4 : slots > 1 ? 2 : 1;
  static constexpr int per_lane = (slots + lanes - 1) / lanes;
  static constexpr int heads_per_warp = 32 / lanes;
  // Every lane has two chunks of 8 elements, in 16 bytes each (of a 16-bit type).
  static constexpr bool full = slots == lanes * per_lane && single_chunks % 2 == 0 && per_lane * chunk == 8;

  // First element of chunk 0 or 1 of a slot; a chunk that would start at or behind kDim does not exist.
  static __device__ __forceinline__ int element(int slot, int which) {
    const int single = slot - rotary_slots;
    if (single < 0) return which * half + slot * chunk;
    return kDim - single_chunks * chunk + (which * single_slots + single) * chunk;
  }
  static __device__ __forceinline__ bool exists(int slot, int which) {
    return slot < slots && element(slot, which) < kDim;
  }

  // Where in the cosine half of the table this chunk's angles start, and whether it is rotated at all.
  static __device__ __forceinline__ int angle(int slot, int which) {
    return kInterleaved ? element(slot, which) / 2 : slot * chunk;
  }
  static __device__ __forceinline__ bool rotated(int slot, int which) {
    return kInterleaved ? slot < slots && element(slot, which) < kRotary : slot < rotary_slots;
  }
};

// One rotary pair. The multiply-adds are written out, so that no compiler contracts them differently elsewhere.
__device__ __forceinline__ void rotate_pair(float& first, float& second, float a, float b, float c, float d) {
  const float turned = fmaf(first, a, -(second * b));
  second = fmaf(second, c, first * d);
  first = turned;
}

// 1 / sqrt(mean of squares + eps), to less than an ulp: the fast rsqrt and a Newton step. (Division and square root
// call a subroutine for their rare cases; here only infinity is one.)
template <int kDim>
__device__ __forceinline__ float inverse_rms_of_head(float sum_of_squares, float eps) {
  const float square = fmaf(sum_of_squares, 1.0f / kDim, eps);
  const float root = rsqrtf(square);
  const float better = fmaf(0.5f * root, fmaf(-square * root, root, 1.0f), root);
  return square > 3.402823466e38f ? 0.0f : better;
}

// 1 / x, rounded to nearest, for x from 1e-37 to 1e37: the fast reciprocal and a Newton step.
__device__ __forceinline__ float reciprocal(float x) {
  const float guess = fast_reciprocal(x);
  return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
}

// x / kDivisor, rounded to nearest, unless x is close to underflow: the quotient by the rounded reciprocal, put right.
template <int kDivisor>
__device__ __forceinline__ float divided_by(float x) {
  constexpr float kInverse = 1.0f / kDivisor;
  const float quotient = x * kInverse;
  return fmaf(fmaf(-quotient, static_cast<float>(kDivisor), x), kInverse, quotient);
}

// ---- sums and maxima of a head ----------------------------------------------------------------------------------

// A lane's part of the sum of squares, and of the largest magnitude: two chains each, to wait less. (Both reduced over
// lanes in one go, rotated first: ptxas puts one chain of shuffles behind the other all the same.)
template <int kPerLane, int kChunk>
__device__ __forceinline__ float squares(const float (&x)[kPerLane][2][kChunk]) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < kPerLane; ++k)
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[which] = fmaf(x[k][which][i], x[k][which][i], sum[which]);
  return sum[0] + sum[1];
}
template <int kPerLane, int kChunk>
__device__ __forceinline__ float largest(const float (&x)[kPerLane][2][kChunk]) {
  float most[2] = {fabsf(x[0][0][0]), fabsf(x[0][1][0])};
#pragma unroll
  for (int k = 0; k < kPerLane; ++k)
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kChunk; ++i) most[which] = fmaxf(most[which], fabsf(x[k][which][i]));
  return fmaxf(most[0], most[1]);
}

// For kCount units at once, a head of each in the same kLanes lanes. These add up (or compare) for the first unit in
// their lower half, for the second in their upper half, each half with all lanes: 3 shuffles for two sums where a
// butterfly each takes 6, and what follows from a sum is worked out once for both.
template <int kLanes, int kCount>
__device__ __forceinline__ bool upper_of_head() {
  return kCount == 2 && (lane_index() & kLanes / 2) != 0;
}
// (of, combine) over the head's lanes, of this lane's unit.
template <int kLanes, int kCount, class Combine>
__device__ __forceinline__ float of_head(const float (&of)[kCount], Combine combine) {
  const bool upper = upper_of_head<kLanes, kCount>();
  float value = of[0];
  if constexpr (kCount == 2) {
    value = upper ? of[1] : of[0];
    const float other = upper ? of[0] : of[1];
    value = combine(value, __shfl_xor_sync(kFullMask, other, kLanes / 2));
  }
#pragma unroll
  for (int offset = kLanes / 2 / kCount; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

// ---- accesses ------------------------------------------------------------------------------------------------------

// A pack moved in accesses of at most kAlign bytes, which its address is a multiple of.
enum class Cached { kOnce, kShared };  // which load of ptx.cuh

template <int kAlign, int kDtype, int kVec, Cached kCached>
__device__ __forceinline__ Pack<kDtype, kVec> load_aligned(const typename Element<kDtype>::Type* from) {
  constexpr int kFit = kAlign / static_cast<int>(sizeof *from) > 0 ? kAlign / static_cast<int>(sizeof *from) : 1;
  constexpr int kPart = kFit < kVec ? kFit : kVec;
  Pack<kDtype, kVec> result;
#pragma unroll
  for (int first = 0; first < kVec; first += kPart) {
    using Part = Pack<kDtype, kPart>;
    const Part part = kCached == Cached::kOnce ? Part::load_once(from + first) : Part::load_shared(from + first);
    memcpy(reinterpret_cast<char*>(result.words) + first * sizeof *from, part.words, sizeof part.words);
  }
  return result;
}

template <int kAlign, int kDtype, int kVec>
__device__ __forceinline__ void store_aligned(typename Element<kDtype>::Type* to, const Pack<kDtype, kVec>& values) {
  constexpr int kFit = kAlign / static_cast<int>(sizeof *to) > 0 ? kAlign / static_cast<int>(sizeof *to) : 1;
  constexpr int kPart = kFit < kVec ? kFit : kVec;
#pragma unroll
  for (int first = 0; first < kVec; first += kPart) {
    Pack<kDtype, kPart> part;
    memcpy(part.words, reinterpret_cast<const char*>(values.words) + first * sizeof *to, sizeof part.words);
    part.store_whole(to + first);
  }
}

}  // namespace hccupy
