// What the fp8 op writes beside the rows: zeros of q_scale where no token is, and split_k_flag. In units numbered with
// 32 bits (2^32 would be 550 GB of q_scale for every head): a division in 64 bits is a call of 100 instructions.
#pragma once

#include "common/rope_row.cuh"

namespace hccupy {

// Zeros in q_scale where no token is: lane = one place of one request.
template <class C>
__device__ __forceinline__ void clear_q_scale(const RopeArgs<C>& a, unsigned int unit) {
  const unsigned int per_request = static_cast<unsigned int>(a.padded_q_len) / 32;
  const int request = static_cast<int>(unit / per_request);
  const int place = static_cast<int>(unit % per_request) * 32 + lane_index();
  const Metadata& m = a.metadata;
  const long long token = static_cast<long long>(m.q_index[request]) + place;
  if (token >= 0 && token < m.tokens) {
    const int row = static_cast<int>(token);
    // That row writes its own element if the search gives it to this request (it may not where q_index is not sorted).
    if (holds_row(request, m.q_index[request], m.q_index[request + 1], row, m.tokens) &&
        find_request_alone(m.q_index, m.requests, row) == request)
      return;
  }
#pragma unroll 1
  for (int head = 0; head < C::q_heads; ++head)
    a.q_scale[(static_cast<long long>(request) * C::q_heads + head) * a.padded_q_len + place] = 0.0f;
}

template <class C>
__device__ __forceinline__ void clear_split_k_flag(const RopeArgs<C>& a, unsigned int unit) {
  const long long flags = static_cast<long long>(a.metadata.requests) * C::kv_heads;
#pragma unroll
  for (int k = 0; k < kFlagsPerWarp; k += 32) {
    const long long at = static_cast<long long>(unit) * kFlagsPerWarp + k + lane_index();
    if (at < flags) a.split_k_flag[at] = 0;
  }
}

// Number `unit` of the further work.
template <class C>
__device__ __forceinline__ void clear_more(const RopeArgs<C>& a, unsigned int unit) {
  const unsigned int scale_units = C::padded_scale ? a.metadata.requests * (a.padded_q_len / 32u) : 0;
  if (unit < scale_units) {
    clear_q_scale(a, unit);
  } else {
    clear_split_k_flag(a, unit - scale_units);
  }
}

template <class C>
__device__ __forceinline__ unsigned int more_units(const RopeArgs<C>& a) {
  const unsigned int requests = a.metadata.requests;
  const long long flags = static_cast<long long>(requests) * C::kv_heads;
  return (C::padded_scale ? requests * (a.padded_q_len / 32u) : 0) +
         static_cast<unsigned int>((flags + kFlagsPerWarp - 1) / kFlagsPerWarp);
}

}  // namespace hccupy
