// RoPE over the heads of a row, and where that row's K and V lie in a paged cache.
//
// A head is held by `lanes` neighbouring lanes of a warp. A lane owns slots, each of two chunks of neighbouring
// elements, so placed that both members of every rotary pair are in the same lane: no exchange between lanes.
// Which lane owns which element, and so the order of every sum, follows from the head alone: a row's bits depend
// neither on the launch nor on strides or alignment.
#pragma once

#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace hccupy {

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

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
__device__ __forceinline__ void rotate_pair(float& first, float& second, float cosine, float sine) {
  const float turned = fmaf(first, cosine, -(second * sine));
  second = fmaf(second, cosine, first * sine);
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
  const float guess = __fdividef(1.0f, x);
  return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
}

// x / kDivisor, rounded to nearest, unless x is close to underflow: the quotient by the rounded reciprocal, put right.
template <int kDivisor>
__device__ __forceinline__ float divided_by(float x) {
  constexpr float kInverse = 1.0f / kDivisor;
  const float quotient = x * kInverse;
  return fmaf(fmaf(-quotient, static_cast<float>(kDivisor), x), kInverse, quotient);
}

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
    part.store(to + first);
  }
}

// Pack::to_floats, with one instruction for each bf16 of a pair.
template <int kDtype, int kSize>
__device__ __forceinline__ void unpack(const Pack<kDtype, kSize>& pack, float (&values)[kSize]) {
  if constexpr (kDtype == kBfloat16 && kSize % 2 == 0) {
    unsigned int words[kSize / 2];
    memcpy(words, pack.words, sizeof words);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      values[2 * i] = float_from_bits(words[i] << 16);
      values[2 * i + 1] = float_from_bits(words[i] & 0xffff0000u);
    }
  } else {
    pack.to_floats(values);
  }
}

// ---- whose row is it ----------------------------------------------------------------------------------------

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

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
#pragma unroll
    for (int level = 3; level >= 0; --level) {
      const int middle = node_low + (node_high - node_low) / 2;
      const bool right = (node >> level & 1) != 0;
      if (level < depth) (right ? node_low : node_high) = middle;
    }
    bool right = false;
    if (node > 0 && node_high - node_low > 1) right = q_index[node_low + (node_high - node_low) / 2] <= row;
    const unsigned int rights = __ballot_sync(kFullMask, right);
    int at = 1;
#pragma unroll
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

// Does request b's part of q_index make sense, and does it hold this row?
__device__ __forceinline__ bool holds_row(int request, int first, int end, int row, int tokens) {
  return first <= row && row < end && first >= 0 && end <= tokens && (request > 0 || first == 0);
}

// ---- where its K and V go -----------------------------------------------------------------------------------

struct Metadata {
  const int* seq_lens;
  const int* q_index;
  const int* block_table;
  long long block_table_stride;
  int tokens, requests, positions, num_blocks, block_size, max_blocks, null_block;
};

// Where a row is expected to be. Only a hint: `Held` and `Row` come out right whatever it says.
struct Guess {
  int request;
  int middle = 0;      // what step `lane` of the bisection that ends at `request` looks at (0: that step is not taken)
  bool right = false;  // and the way it goes from there
  int position = -1;   // -1: unknown
  int column = -1;     // of the block table, for that position
  int page = -1;       // in that column
};

// Metadata may be read before the previous grid has ended, to know what to prefetch: never from a cache that may be
// stale afterwards.
__device__ __forceinline__ int load_fresh(const int* from) { return *static_cast<const volatile int*>(from); }

// Right for plain decode, for the same number of new tokens everywhere, and for a single request.
__device__ __forceinline__ Guess guess_request(const Metadata& m, int token) {
  Guess g;
  if (m.tokens == m.requests) {
    g.request = token;
  } else {
    const int each = m.tokens > m.requests && m.requests > 0 ? m.tokens / m.requests : 1;
    g.request = token / each < m.requests ? token / each : m.requests - 1;
  }
  int low = 0;
  int high = m.requests;
  for (int step = 0; high - low > 1; ++step) {
    const int middle = low + (high - low) / 2;
    const bool right = middle <= g.request;
    if (step == lane_index()) {
      g.middle = middle;
      g.right = right;
    }
    (right ? low : high) = middle;
  }
  return g;
}

// The request that holds a row.
struct Held {
  int request = -1;  // -1: padding
  int first = 0;     // its new tokens are the rows from here
  int end = 0;       // to before here
  int seq_len = 0;
};

// All 32 lanes take part and get the answer. A right guess costs one trip to memory; so does a single request.
__device__ __forceinline__ Held hold_row(const Metadata& m, const Guess& g, int row) {
  Held h;
  if (m.requests == 0) return h;
  h.first = load_fresh(m.q_index + g.request);
  h.end = load_fresh(m.q_index + g.request + 1);
  h.seq_len = load_fresh(m.seq_lens + g.request);
  h.request = g.request;
  if (m.requests > 1) {
    const bool astray = g.middle > 0 && (load_fresh(m.q_index + g.middle) <= row) != g.right;
    if (__any_sync(kFullMask, astray)) {
      h.request = find_request(m.q_index, m.requests, row);
      h.first = m.q_index[h.request];
      h.end = m.q_index[h.request + 1];
      h.seq_len = m.seq_lens[h.request];
    }
  }
  if (!holds_row(h.request, h.first, h.end, row, m.tokens)) h.request = -1;
  return h;
}

struct Row {
  int request = -1;     // -1: padding
  int place = 0;        // among its request's new tokens
  bool last = false;    // the last of them
  bool placed = false;  // its position is a row of cos_sin
  bool live = false;    // and its page is good or null: q is computed; otherwise q is zero
  bool stored = false;  // K and V are written
  int position = 0;
  int page = 0;
  int slot = 0;  // in the page
};

// kPaged: the block table is read, except where `g` has the entry already.
template <bool kPaged, bool kHasNull>
__device__ __forceinline__ Row locate_row(const Metadata& m, const Held& h, const Guess& g, int token) {
  Row row;
  if (h.request < 0) return row;
  row.request = h.request;
  row.place = token - h.first;
  row.last = token == h.end - 1;
  const long long position = static_cast<long long>(h.seq_len) - (h.end - token);
  if (position < 0 || position >= m.positions) return row;
  row.position = static_cast<int>(position);
  row.placed = true;
  if constexpr (!kPaged) {
    row.live = true;
    return row;
  }
  const int column = row.position / m.block_size;
  if (column >= m.max_blocks) return row;
  row.page = g.page;
  if (column != g.column || h.request != g.request)
    row.page = load_fresh(m.block_table + h.request * m.block_table_stride + column);
  row.slot = row.position - column * m.block_size;
  const bool null = kHasNull && row.page == m.null_block;
  row.stored = !null && row.page >= 0 && row.page < m.num_blocks;
  row.live = null || row.stored;
  return row;
}

// ---- zeros --------------------------------------------------------------------------------------------------

// The bytes of kHeads vectors of kVectorBytes each, written by one warp in accesses of at most kAlign bytes.
template <int kAlign, int kHeads, int kVectorBytes>
__device__ __forceinline__ void clear_vectors(char* first, long long stride_bytes) {
  constexpr int kPiece = common_divisor(common_divisor(kVectorBytes, kAlign), 16);
  constexpr int kPieces = kVectorBytes / kPiece;
  using Word = typename WordOf<kPiece>::Type;
#pragma unroll 4
  for (int at = lane_index(); at < kHeads * kPieces; at += 32) {
    Word zero;
    memset(&zero, 0, sizeof zero);
    *reinterpret_cast<Word*>(first + at / kPieces * stride_bytes + at % kPieces * kPiece) = zero;
  }
}

// Not 0 if one of those vectors has a bit set, in the lane that sees it.
template <int kAlign, int kHeads, int kVectorBytes>
__device__ __forceinline__ unsigned int bits_of_vectors(const void* first, long long stride_bytes) {
  constexpr int kPiece = common_divisor(common_divisor(kVectorBytes, kAlign), 16);
  constexpr int kPieces = kVectorBytes / kPiece;
  using Word = typename WordOf<kPiece>::Type;
  unsigned int found = 0;
#pragma unroll 4
  for (int at = lane_index(); at < kHeads * kPieces; at += 32) {
    const Word word = load_once(reinterpret_cast<const Word*>(static_cast<const char*>(first) +
                                                              at / kPieces * stride_bytes + at % kPieces * kPiece));
    unsigned int words[(sizeof word + 3) / 4] = {};
    memcpy(words, &word, sizeof word);
#pragma unroll
    for (unsigned int bits : words) found |= bits;
  }
  return found;
}

}  // namespace hccupy
