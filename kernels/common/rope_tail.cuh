// The slots behind a request's last token, in its page, become zero bytes (tail zero).
//
// Rewriting whole tails at each decode step would cost more than the rest of the op. So, unless the page's first slot
// is among this call's tokens (nobody has cleared the page then), a warp first looks at two slots: all of the one right
// behind the last token, where the tokens of a rolled-back draft begin, and half of the heads of the last one in the
// page, which a page that was never cleared has. Only if all of that is zero the tail is left as it is.
#pragma once

#include "common/rope_row.cuh"

namespace hccupy {

template <class C>
struct Tail {
  using Store = typename RopeArgs<C>::Store;
  static constexpr int store_bytes = sizeof(Store);
  static constexpr bool exists = C::tail_zero && !(C::has_out_k && C::has_out_v);

  const RopeArgs<C>& a;
  const Row& row;
  int behind;  // slots to look after

  __device__ __forceinline__ Tail(const RopeArgs<C>& args, const Row& of) : a(args), row(of) {
    behind = exists && row.stored && row.last ? a.metadata.block_size - 1 - row.slot : 0;
  }
  __device__ __forceinline__ bool fresh() const { return row.place >= row.slot; }
  __device__ __forceinline__ bool to_look_at() const { return behind > 0 && !fresh(); }

  // do_cache(type with the geometry of a slot, its first slot behind, bytes from slot to slot, from head to head) for
  // the caches that are written; kOneBody: one body of code for both where it can be.
  template <bool kOneBody, class Do>
  __device__ __forceinline__ void each_cache(Do do_cache) const {
    const auto one = [&](auto vectors, Store* cache, const typename RopeArgs<C>::Strides& s) {
      do_cache(vectors, reinterpret_cast<char*>(a.at(cache, s, row.page, row.slot + 1, 0)), s.slot * store_bytes,
               s.head * store_bytes);
    };
    using OfK = Vectors<C::write_align, C::kv_heads, C::dim * store_bytes>;
    using OfV = Vectors<C::write_align, C::kv_heads, C::v_dim * store_bytes>;
    if constexpr (kOneBody && C::dim == C::v_dim) {
#pragma unroll 1
      for (int v = C::has_out_k; v < (C::has_out_v ? 1 : 2); ++v)
        one(OfK{}, v ? a.value_cache : a.key_cache, v ? a.value : a.key);
    } else {
      if constexpr (!C::has_out_k) one(OfK{}, a.key_cache, a.key);
      if constexpr (!C::has_out_v) one(OfV{}, a.value_cache, a.value);
    }
  }

  // Not 0, in some lane, if the tail is to be cleared. Few rows: both caches in one trip to memory (48 registers).
  __device__ __forceinline__ unsigned int look() const {
    unsigned int found = 0;
    each_cache<(C::bulk || C::many)>([&](auto vectors, const char* first, long long slot, long long head) {
      using Of = decltype(vectors);
      found |= Of::template bits<Of::count>(first, head);
      found |= Of::template bits<(Of::count + 1) / 2>(first + (behind - 1) * slot, head);
    });
    return found;
  }

  __device__ __forceinline__ void prefetch() const {
    each_cache<true>([&](auto vectors, const char* first, long long slot, long long head) {
      using Of = decltype(vectors);
      Of::template prefetch<C::kv_heads>(first, head);
      Of::template prefetch<(C::kv_heads + 1) / 2>(first + (behind - 1) * slot, head);
    });
  }

  // Part `part` of `parts`.
  __device__ __forceinline__ void clear(int part, int parts) const {
    each_cache<true>([&](auto vectors, char* first, long long slot, long long head) {
      decltype(vectors)::clear(first, head, slot, behind, part, parts);
    });
  }
};

// Warp `part` of the `parts` of a row that look after its tail; all of them must come here.
template <class C>
__device__ __forceinline__ void look_after_tail(const RopeArgs<C>& a, const Row& row, int part, int parts) {
  if constexpr (Tail<C>::exists) {
    const Tail<C> tail(a, row);
    if (tail.behind <= 0) return;
    const bool fresh = tail.fresh();  // then all warps of the row share the slots
    if (fresh || (part == parts - 1 && __any_sync(kFullMask, tail.look() != 0)))
      tail.clear(fresh ? part : 0, fresh ? parts : 1);
  }
}

}  // namespace hccupy
