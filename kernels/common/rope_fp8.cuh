// What the fp8 op writes beside the rows: zeros of q_scale where no token is, and split_k_flag.
#pragma once

#include "common/rope_row.cuh"

namespace hccupy {

// Zeros in q_scale where no token is: lane = one place of one request.
template <class C>
__device__ __forceinline__ void clear_q_scale(const RopeArgs<C>& a, long long unit) {
  const int per_request = a.padded_q_len / 32;
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
__device__ __forceinline__ void clear_split_k_flag(const RopeArgs<C>& a, long long unit) {
  const long long flags = static_cast<long long>(a.metadata.requests) * C::kv_heads;
#pragma unroll
  for (int k = 0; k < kFlagsPerWarp; k += 32) {
    const long long at = unit * kFlagsPerWarp + k + lane_index();
    if (at < flags) a.split_k_flag[at] = 0;
  }
}

// Number `unit` of the further work.
template <class C>
__device__ __forceinline__ void clear_more(const RopeArgs<C>& a, long long unit) {
  const long long scale_units =
      C::padded_scale ? static_cast<long long>(a.metadata.requests) * (a.padded_q_len / 32) : 0;
  if (unit < scale_units) {
    clear_q_scale(a, unit);
  } else {
    clear_split_k_flag(a, unit - scale_units);
  }
}

template <class C>
__device__ __forceinline__ long long more_units(const RopeArgs<C>& a) {
  const long long requests = a.metadata.requests;
  return (C::padded_scale ? requests * (a.padded_q_len / 32) : 0) +
         (requests * C::kv_heads + kFlagsPerWarp - 1) / kFlagsPerWarp;
}

}  // namespace hccupy
