// Whose row is it, and where do its K and V lie in the paged caches?
#pragma once

#include "common/vectors.cuh"

namespace hccupy {

// ---- whose row is it ----------------------------------------------------------------------------------------

// The largest b with q_index[b] <= row, found by plain bisection of [0, requests). All 32 lanes take part and get
// the answer. Five steps a round: lane n looks where step n of the decision tree would look (numbered like a heap,
// root 1), then all walk the tree; one trip to memory where plain bisection makes five. Even with a q_index that
// is not sorted the answer is that of the plain loop, which the CPU path runs.
__device__ __forceinline__ int find_request(const int* q_index, int requests, int row) {
  const int node = lane_index();
  const int depth = (node >= 2) + (node >= 4) + (node >= 8) + (node >= 16);
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    int node_low = low;
    int node_high = high;
#pragma unroll 1
    for (int level = 3; level >= 0; --level) {
      const int middle = node_low + (node_high - node_low) / 2;
      const bool right = (node >> level & 1) != 0;
      if (level < depth) (right ? node_low : node_high) = middle;
    }
    bool right = false;
    if (node > 0 && node_high - node_low > 1) right = q_index[node_low + (node_high - node_low) / 2] <= row;
    const unsigned int rights = __ballot_sync(kFullMask, right);
    int at = 1;
#pragma unroll 1
    for (int level = 0; level < 5; ++level) {
      if (high - low > 1) {
        const int middle = low + (high - low) / 2;
        const int turn = static_cast<int>(rights >> at & 1u);
        (turn ? low : high) = middle;
        at = 2 * at + turn;
      }
    }
  }
  return low;
}

// The same for one lane alone.
__device__ __forceinline__ int find_request_alone(const int* q_index, int requests, int row) {
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (q_index[middle] <= row ? low : high) = middle;
  }
  return low;
}

// Does request b's part of q_index make sense, and does it hold this row? first <= row < end, 0 <= first, end <= tokens
// (and 0 is where the first request starts): by the sign bits of the differences, which take half as long as five
// comparisons that wait for each other. One that wraps around has another beside it that is negative.
__device__ __forceinline__ bool holds_row(int request, int first, int end, int row, int tokens) {
  const auto u = [](int value) { return static_cast<unsigned int>(value); };
  const unsigned int signs = (u(row) - u(first)) | (u(end) - 1u - u(row)) | u(first) | (u(tokens) - u(end));
  return static_cast<int>(signs) >= 0 && (request > 0 || first == 0);
}

// ---- where its K and V go -----------------------------------------------------------------------------------

struct Metadata {
  const int* seq_lens;
  const int* q_index;
  const int* block_table;
  long long block_table_stride;
  int tokens, requests, positions, num_blocks, block_size, max_blocks, null_block;
};

// kFresh: metadata that may be read before the previous grid has ended, as a guess, must never come from a cache that
// may be stale afterwards.
template <bool kFresh = true>
__device__ __forceinline__ int load_metadata(const int* from) {
  if constexpr (kFresh) return *static_cast<const volatile int*>(from);  // in a ?: both would be volatile
  return *from;
}

// A request's new tokens are the rows from `first` to before `end`.
struct Held {
  int request = -1;  // -1: the row is padding
  int first = 0, end = 0, seq_len = 0;

  __device__ __forceinline__ bool operator==(const Held& o) const {
    return request == o.request && first == o.first && end == o.end && seq_len == o.seq_len;
  }
};

template <bool kFresh = true>
__device__ __forceinline__ Held read_held(const Metadata& m, int request) {
  Held h;
  if (m.requests == 0) return h;
  h.request = request;
  h.first = load_metadata<kFresh>(m.q_index + request);
  h.end = load_metadata<kFresh>(m.q_index + request + 1);
  h.seq_len = load_metadata<kFresh>(m.seq_lens + request);
  return h;
}

// The request that is expected to hold a row. Right for plain decode, for the same number of new tokens everywhere, and
// for a single request.
struct Guess {
  int request;
  int middle = 0;      // what step `lane` of the bisection that ends at `request` looks at (0: that step is not taken)
  bool right = false;  // and the way it goes from there

  __device__ __forceinline__ Guess(const Metadata& m, int token) {
    if (m.tokens == m.requests) {
      request = token;
    } else {
      const int each = m.tokens > m.requests && m.requests > 0 ? m.tokens / m.requests : 1;
      request = token / each < m.requests ? token / each : m.requests - 1;
    }
    int low = 0;
    int high = m.requests;
#pragma unroll 1
    for (int step = 0; high - low > 1; ++step) {
      const int half = low + (high - low) / 2;
      const bool up = half <= request;
      if (step == lane_index()) {
        middle = half;
        right = up;
      }
      (up ? low : high) = half;
    }
  }

  // What this lane must see to know that the plain loop ends at `request`.
  __device__ __forceinline__ int look(const Metadata& m) const {
    return middle > 0 ? load_metadata(m.q_index + middle) : 0;
  }
  __device__ __forceinline__ bool astray(int seen, int row) const { return middle > 0 && (seen <= row) != right; }
};

// All 32 lanes take part and get the answer. A right guess costs one trip to memory.
__device__ __forceinline__ Held hold_row(const Metadata& m, const Guess& g, int row) {
  Held h = read_held(m, g.request);
  if (__any_sync(kFullMask, g.astray(g.look(m), row))) h = read_held(m, find_request(m.q_index, m.requests, row));
  if (!holds_row(h.request, h.first, h.end, row, m.tokens)) h.request = -1;
  return h;
}

// Up to kMost requests, a lane each: one trip to memory, asked for at once, serves every row of a warp.
struct Requests {
  static constexpr int kMost = 31;
  int index, seq_len;

  template <bool kFresh>
  static __device__ __forceinline__ Requests read(const Metadata& m) {
    const int lane = lane_index();
    return {lane <= m.requests ? load_metadata<kFresh>(m.q_index + lane) : 0,
            lane < m.requests ? load_metadata<kFresh>(m.seq_lens + lane) : 0};
  }
  __device__ __forceinline__ bool operator==(const Requests& o) const {
    return index == o.index && seq_len == o.seq_len;
  }
  // Whose is the row? By the plain bisection, every lane for a row of its own; all 32 take part.
  __device__ __forceinline__ Held held(const Metadata& m, int row) const {
    if (m.requests == 0 || m.requests > kMost)
      return read_held<false>(m, find_request_alone(m.q_index, m.requests, row));
    int low = 0;
    int high = m.requests;
#pragma unroll 1
    for (int most = m.requests; most > 1; most = (most + 1) / 2) {
      const int middle = low + (high - low) / 2;
      const int first = __shfl_sync(kFullMask, index, middle);
      if (high - low > 1) (first <= row ? low : high) = middle;
    }
    Held h;
    h.request = low;
    h.first = __shfl_sync(kFullMask, index, low);
    h.end = __shfl_sync(kFullMask, index, low + 1);
    h.seq_len = __shfl_sync(kFullMask, seq_len, low);
    return h;
  }
};

struct Row {
  int request = -1;     // -1: padding
  int place = 0;        // among its request's new tokens
  bool last = false;    // the last of them
  bool placed = false;  // its position is a row of cos_sin
  bool live = false;    // and its page is good or null: q is computed; otherwise q is zero
  bool stored = false;  // K and V are written
  int position = 0;
  int column = -1;  // of the block table (-1: not to be read; of a row that was handed over, only that is known)
  int page = 0;
  int slot = 0;  // in the page

  Row() = default;
  __device__ __forceinline__ Row(int its_request, int its_place, int its_position, int its_page, int its_slot,
                                 int flags)
      : request(its_request),
        place(its_place),
        last((flags & 1) != 0),
        placed((flags & 2) != 0),
        live((flags & 4) != 0),
        stored((flags & 8) != 0),
        position(its_position),
        column((flags & 16) != 0 ? 0 : -1),
        page(its_page),
        slot(its_slot) {}
  __device__ __forceinline__ int flags() const {
    return last | placed << 1 | live << 2 | stored << 3 | (column >= 0) << 4;
  }

  // That of another lane.
  __device__ __forceinline__ Row of_lane(int lane) const {
    const auto of = [lane](int value) { return __shfl_sync(kFullMask, value, lane); };
    return {of(request), of(place), of(position), of(page), of(slot), of(flags())};
  }
};

// Row, without its default values: shared memory starts undefined.
struct SharedRow {
  int request, place, position, page, slot, flags;

  __device__ __forceinline__ void put(const Row& row) {
    request = row.request;
    place = row.place;
    position = row.position;
    page = row.page;
    slot = row.slot;
    flags = row.flags();
  }
  __device__ __forceinline__ Row get() const { return {request, place, position, page, slot, flags}; }
};

// All but the page. kPaged: there is one.
template <bool kPaged>
__device__ __forceinline__ Row place_row(const Metadata& m, const Held& h, int token) {
  Row row;
  if (h.request < 0 || !holds_row(h.request, h.first, h.end, token, m.tokens)) return row;
  row.request = h.request;
  row.place = token - h.first;
  row.last = token == h.end - 1;
  // h.end - token is positive, so only a negative length wraps around.
  const unsigned int position = static_cast<unsigned int>(h.seq_len) - static_cast<unsigned int>(h.end - token);
  if (h.seq_len < 0 || position >= static_cast<unsigned int>(m.positions)) return row;
  row.position = static_cast<int>(position);
  row.placed = true;
  row.live = !kPaged;
  if constexpr (kPaged) {
    const int column = row.position / m.block_size;
    row.slot = row.position - column * m.block_size;
    if (column < m.max_blocks) row.column = column;
  }
  return row;
}

template <bool kFresh = true>
__device__ __forceinline__ int read_page(const Metadata& m, const Row& row) {
  return row.column < 0 ? 0 : load_metadata<kFresh>(m.block_table + row.request * m.block_table_stride + row.column);
}

template <bool kHasNull>
__device__ __forceinline__ void put_page(const Metadata& m, int page, Row& row) {
  if (row.column < 0) return;
  row.page = page;
  const bool null = kHasNull && page == m.null_block;
  row.stored = !null && page >= 0 && page < m.num_blocks;
  row.live = null || row.stored;
}

}  // namespace hccupy
