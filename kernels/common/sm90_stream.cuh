// The streaming iHC kernel's shared memory: sizes, rings, barriers, and how tokens are dealt to clusters.
//
// A tile is up to 8 tokens; block `rank` of a cluster owns an equal share of the columns, of all channels. Each warp
// has one job and barriers in shared memory link them, so that the mma warps run tiles ahead of the apply warps:
//
// * mma, 8 warps: a chunk each, dots and squares; post_pre: y in place. kLanesAsk: asks for x of the first tile.
//   Waits for full, partials_empty; tells partials_full, empty, y_full.
// * apply, 4 warps: z of a token each, then of another; norm: squares told.
//   Waits for gates_full, norm_full; tells empty.
// * loader: makes the ring's barriers, bulk copies x into the stages. Waits for empty; tells full (bytes).
// * gates: makes the other barriers; works out the gates of its own tokens (kOwn) and tells them to all. Waits for
//   slot_full (bytes); tells gates_full (bytes).
// * storer: post_pre: bulk copies y to memory. Waits for y_full; tells empty.
//   kTwoLoaders: loads every other token instead.
// * teller: asks L2 for x of small batches (post_pre: also for the first tiles of large ones) before the previous
//   kernel ends. Then adds the 8 chunks of each tile and tells the blocks that have its tokens. Waits for
//   partials_full, and for gates_full of two tiles before; tells partials_empty, slot_full (bytes).
#pragma once

#include "common/sm90_ihc_baked.cuh"

namespace hccupy {

// Index in a ring and the parity of its round. Worked out from the tile's number: state that is kept costs registers,
// and spills.
template <int kSize>
struct Turn {
  int index;
  unsigned int parity;
  __device__ __forceinline__ explicit Turn(unsigned int tile) : index(tile % kSize), parity(tile / kSize & 1) {}
};

struct StreamLayout {
  using Shape = BakedShape;
  static constexpr int kHc = Shape::kHc, kXDtype = Shape::kXDtype, kVec = Shape::kVec;
  static constexpr bool kPost = Shape::kPost, kHasNorm = Shape::kHasNorm;
  static constexpr int kRanks = Shape::kRanks;
  static constexpr int kMmaWarps = 8, kApplyWarps = 4;
  static constexpr int kThreads = 512, kBlocks = 1;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kUnits = Shape::kChunkUnits;  // of one mma warp: a chunk
  static constexpr int kRowBytes = 2 * kColumns;
  // 64 bytes past a multiple of 128: the 8 lanes of a 16-byte access phase are 2 tokens x 64 bytes, on different banks.
  static constexpr int kTokenBytes = (kHc * kRowBytes + 127) / 128 * 128 + 64;
  static constexpr int kPostBytes = (kRowBytes + 127) / 128 * 128 + 64;
  static constexpr int kStageBytes = kTileTokens * (kTokenBytes + (kPost ? kPostBytes : 0));
  static constexpr int kTokenQuads = 3;  // what a slice says of a token, 4 floats each: dots, dots, sum of squares
  static constexpr int kQuads = kTileTokens * kTokenQuads, kDotQuads = 2 * kTileTokens;
  // Block n works out the gates of token n; of fewer than 8 blocks, of tokens n, n + kRanks, ... Of 16, the first 8 do
  // so in even tiles, the others in odd ones: a tile takes them longer, with more slots to add.
  static constexpr int kOwn = kRanks < kTileTokens ? kTileTokens / kRanks : 1;
  static constexpr bool kAlternate = kRanks > kTileTokens;
  static constexpr int kSlotBytes = kOwn * kRanks * kTokenQuads * 16;
  // A peer tells tile n once it has the gates of tile n - 2. This block told those after it had read all of slot n - 3;
  // where it has tiles by turns, all of slot n - 2, which is the same one as slot n then.
  static constexpr int kSlots = kAlternate ? 2 : 3;
  static constexpr int kGateBytes = kTileTokens * kHc * 4;
  static constexpr int kPerStageBytes = kStageBytes + kGateBytes + (kPost ? kGateBytes : 0) + 5 * 8;
  static constexpr int kHalfTokens = kTileTokens / 2;
  static constexpr int kNormBytes = kRanks * kTileTokens * 4;  // what a tile's norm exchange brings
  static constexpr int kFixedBytes = 2 * kMmaWarps * kQuads * 16 + kSlots * kSlotBytes +
                                     (kHasNorm ? kColumns * 4 + 2 * kNormBytes : 0) + (6 + kSlots) * 8;
  static constexpr int kMostBytes = 232448;  // what a block may have on sm_90, and what the launch asks for
  static constexpr int kFit = (kMostBytes - kFixedBytes) / kPerStageBytes;
  static constexpr int kStages = kFit > 6 ? 6 : kFit;
  static constexpr int kWeightRegisters = kUnits * Shape::kHalf * UnitWeights<kXDtype, Shape::kHalf>::kRegisters;
  // Rows so short that asking for them, one by one, takes longer than their bytes. In clusters of 16 a second warp asks
  // for every other token then: hidden 8192, 16384 tokens 357 -> 321 us, 10240 416 -> 400; hc 8, hidden 6144 847 ->
  // 731, 4096 800 -> 543. In clusters of 8 (hc 4, 4096: 173 -> 164 us) it costs 1024 tokens 14.6 -> 15.1.
  static constexpr bool kShortRows = kRowBytes <= 1280;
  // One or two tiles: the first is asked for by the mma lanes, each the octets that it multiplies. The loader takes 70
  // cycles a row, 1.1 us a tile, and multiplying starts with the last one's bytes. us, 112 tokens 5.7 -> 5.0, 64 4.28
  // -> 4.18, post_pre 112 7.4 -> 6.8.
  static constexpr bool kLanesAsk = baked::lanes_ask;
  static constexpr bool kAsyncRows = kVec == 2 || kVec == 4;  // no bulk copies, but cp.async
  static constexpr bool kTwoLoaders = kShortRows && (kRanks == 16 || kHc > 4) && kVec == 8 && !kPost;
  // Tiles asked for at once. 1 starves memory (89 us at 4096) and 3 costs up to 7 us at 16384, but for small tiles of
  // short rows: hidden 4096 173 -> 169 us, 2048 89 -> 87; those of 5120, 41 KB, lose (199 -> 202).
  static constexpr int kInFlight = kTwoLoaders || (kShortRows && kStageBytes < 40960 && !kPost) ? 3 : 2;
  static constexpr bool kWide = kWeightRegisters > 144;
  static constexpr bool kNarrow = kWeightRegisters <= 112 && kHc <= 4,
                        kRows = kNarrow && kVec < 8 &&
                                kWeightRegisters > 96;  // rows copied by lanes take registers of the loader
  // 64K registers of an SM: 256 mma threads, 128 of apply, 128 helpers. Norm without post: the apply warps are the
  // bottleneck and work at two tokens at once, for which 80 registers are too few. Elsewhere no split differs by 1 %.
  static constexpr bool kApplyBound = kHasNorm && !kPost && !kWide && kHc <= 4 &&
                                      kUnits <= (Shape::kPadded ? 5
                                                 : kNarrow      ? 7
                                                                : 6);
  // post_pre over 4 channels: units that are not kept apart are worth more than the apply warps' next octets (hc 8,
  // hidden 6144, 16384 tokens 1461 -> 1330 us).
  static constexpr bool kLean = kPost && kVec == 8 && kHc > 4 && kHc != 7;
  static constexpr int kMmaRegisters = kWide || kLean ? 208 : kRows ? 176 : kNarrow || kApplyBound ? 192 : 200;
  static constexpr int kHelperRegisters = kRows ? 56 : kLean ? 32 : 40;
  static constexpr int kApplyRegisters = 512 - 2 * kMmaRegisters - kHelperRegisters;
  static_assert(2 * kMmaRegisters + kApplyRegisters + kHelperRegisters == 512,
                "the warpgroups share what 512 threads of 128 registers start with");
  static_assert(kStages >= 2, "a ring needs two stages");
  static_assert(!kLanesAsk || (kVec == 8 && Shape::kSides == 1), "lanes ask for 16 bytes, and for no tile twice");
  static_assert(kWeightRegisters <= 168, "the weights of a chunk must fit in the registers of a warp");
  static_assert(kStageBytes % 16 == 0, "the parts of shared memory stay aligned");

  char* stages;        // [kStages][kStageBytes]: tokens of x (post_pre: residual, then y), then post_pre's x
  float* partials;     // [2][kMmaWarps][kQuads][4]: dots of 8 tokens, then squares
  float* slots;        // [kSlots][kOwn][kRanks][kTokenQuads][4]: of this block's tokens
  float* gates;        // [kStages][kTileTokens][kHc]: pre gates
  float* h_in;         // [kStages][kTileTokens][kHc]: post_pre's h_post
  float* norm_weight;  // [kColumns]
  float* norm_slots;   // [2][kTileTokens][kRanks]
  int2* places;        // [kStages]: first token and number of tokens of the tile there, from the loader
  Barrier *full, *empty, *y_full, *gates_full, *slot_full, *partials_full, *partials_empty, *norm_full;
  int rank, lane, tiles;
  int side;                              // 0, or 1: the post gates of over 4 channels (see side_of)
  int cluster, clusters, share, larger;  // clusters of this side, and which of them this one is

  __device__ __forceinline__ void place() {
    char* at = reinterpret_cast<char*>(shared_bytes);
    const auto take = [&](int bytes) {
      char* start = at;
      at += bytes;
      return start;
    };
    const auto floats = [&](int bytes) { return reinterpret_cast<float*>(take(bytes)); };
    const auto barriers = [&](int count) { return reinterpret_cast<Barrier*>(take(8 * count)); };
    stages = take(kStages * kStageBytes);
    partials = floats(2 * kMmaWarps * kQuads * 16);
    slots = floats(kSlots * kSlotBytes);
    gates = floats(kStages * kGateBytes);
    if constexpr (kPost) h_in = floats(kStages * kGateBytes);
    if constexpr (kHasNorm) {
      norm_weight = floats(kColumns * 4);
      norm_slots = floats(2 * kNormBytes);
    }
    places = reinterpret_cast<int2*>(take(kStages * 8));
    full = barriers(kStages), empty = barriers(kStages), y_full = barriers(kStages), gates_full = barriers(kStages);
    slot_full = barriers(kSlots), partials_full = barriers(2), partials_empty = barriers(2), norm_full = barriers(2);
  }

  // By one lane that elect.sync has named: by several, the compiler makes loops with a fence a barrier, 2.3 us in all,
  // which everything that a launch starts with waited for. The loader makes those of the ring, and needs no others to
  // ask for its first tiles; the gates warp makes the rest.
  __device__ __forceinline__ void make_ring_barriers() const {
    if (elect_lane()) {
#pragma unroll
      for (int k = 0; k < kStages; ++k) {
        barrier_init(&full[k], 1 + (kPost || kAsyncRows ? 32 : 0) + (kLanesAsk && k == 0 ? kMmaWarps * 32 : 0));
        barrier_init(&empty[k], kMmaWarps + kApplyWarps + (kPost ? 1 : 0));
      }
      fence_barrier_init();
      fence_bulk();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void make_other_barriers() const {
    if (elect_lane()) {
#pragma unroll
      for (int k = 0; k < kStages; ++k) {
        barrier_init(&gates_full[k], 1);
        if constexpr (kPost) barrier_init(&y_full[k], kMmaWarps);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        barrier_init(&partials_full[k], kMmaWarps);
        barrier_init(&partials_empty[k], 1);
      }
#pragma unroll
      for (int k = 0; k < kSlots; ++k) barrier_init(&slot_full[k], 1);
#pragma unroll
      for (int k = 0; k < 2 && kHasNorm; ++k) barrier_init(&norm_full[k], 1);
      fence_barrier_init();
#pragma unroll
      for (int k = 0; k < kSlots; ++k) barrier_expect(&slot_full[k], kSlotBytes);
#pragma unroll
      for (int k = 0; k < 2 && kHasNorm; ++k) barrier_expect(&norm_full[k], kNormBytes);
    }
    __syncwarp();
  }

  // Read anew (volatile): kept from role to role or tile to tile it costs registers.
  static __device__ __forceinline__ int fresh_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }

  // Tokens are split evenly over the tiles of the fewest rounds: no round is a remainder of one token a cluster, which
  // would cost the time of a whole tile. A round is one run of memory; the first `larger` tiles have a token more.
  __device__ __forceinline__ void deal(int tokens) {
    // Read anew by each role (volatile): values kept from before the roles part would cost the mma warps registers.
    unsigned int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    cluster = block / kRanks, rank = block % kRanks;
    clusters = gridDim.x / kRanks;
    side = 0;
    constexpr bool kApart = Shape::kSides > Shape::kPasses;  // some clusters work on one side, the others on the other
    if constexpr (kApart) {  // 7 clusters: 4 and 3, which take 1.4 and 1.05 us a tile at hc 8, hidden 6144
      const int first = (clusters + 1) / 2;
      side = cluster >= first;
      cluster -= side ? first : 0;
      clusters = side ? clusters - first : first;
    }
    const unsigned int most = kTileTokens * clusters;
    // None where there are fewer tokens than clusters.
    tiles = cluster < tokens ? (static_cast<unsigned int>(tokens) + most - 1) / most : 0;
    tiles *= Shape::kPasses;
  }
  // With two passes, all tiles of the post gates come first.
  __device__ __forceinline__ int side_of(int tile) const {
    return Shape::kPasses == 2 ? tile < tiles / 2 : Shape::kSides == 2 ? side : 0;
  }
  __device__ __forceinline__ int number_of(int tile) const {
    if (Shape::kPasses == 2 && tile >= tiles / 2) tile -= tiles / 2;
    return tile * clusters + cluster;
  }
  // What the loader needs beyond; the other roles find a tile's place in `places`.
  __device__ __forceinline__ void deal_shares(int tokens) {
    const unsigned int all = static_cast<unsigned int>(tiles / Shape::kPasses) * clusters;
    share = kTileTokens;
    while (share * all > tokens) --share;  // a division would take longer
    larger = tokens - share * all;
  }
  __device__ __forceinline__ int tile_first(int tile) const {
    const int number = number_of(tile);
    return number * share + min(number, larger);
  }
  __device__ __forceinline__ int tile_count(int tile) const { return share + (number_of(tile) < larger); }
};

}  // namespace hccupy
