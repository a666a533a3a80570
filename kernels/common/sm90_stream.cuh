// The streaming iHC kernel's shared memory: sizes, rings, barriers, and how tokens are dealt to clusters.
//
// A tile is up to 8 tokens; block `rank` of a cluster of 8 owns hidden / 8 columns of all channels. Each warp has one job
// and barriers in shared memory link them, so that the mma warps run tiles ahead of the apply warps:
//
// | role    | warps | does                                                   | waits for              | tells            |
// | ------- | ----- | ------------------------------------------------------ | ---------------------- | ---------------- |
// | mma     | 8     | a chunk each: dots, squares; post_pre: y in place      | full, partials_empty   | partials_full, empty, y_full |
// | apply   | 4     | z of a tile from its gates, columns dealt to all lanes | gates_full, inverse_full | empty, sums_full |
// | loader  | 1     | bulk copies x into the ring of stages                  | empty                  | full (bytes)     |
// | gates   | 1     | adds the 8 chunks, tells all blocks, works out gates   | partials_full, slot_full | partials_empty, gates_full |
// | storer  | 1     | post_pre: bulk copies y to memory                      | y_full                 | empty            |
// | norm    | 1, 2  | asks L2 for x; norm: squares told, inverse RMS back    | sums_full, norm_full   | inverse_full     |
#pragma once

#include "common/sm90_ihc.cuh"

namespace hccupy {

struct Turn {  // index in a ring and the parity of its round
  int index = 0;
  unsigned int parity = 0;
  __device__ __forceinline__ void next(int size) {
    if (++index == size) index = 0, parity ^= 1;
  }
};

template <class Shape_>
struct StreamLayout {
  using Shape = Shape_;
  static constexpr int kHc = Shape::kHc, kXDtype = Shape::kXDtype, kVec = Shape::kVec;
  static constexpr bool kPost = Shape::kPost, kHasNorm = Shape::kHasNorm;
  static constexpr int kRanks = 8;
  static constexpr int kMmaWarps = 8, kApplyWarps = 4;
  static constexpr int kThreads = 512, kBlocks = 1;
  static constexpr int kColumns = Shape::kHidden / kRanks;
  static constexpr int kUnits = Shape::kChunkUnits;  // of one mma warp: a chunk
  static constexpr int kRowBytes = 2 * kColumns;
  // 64 bytes past a multiple of 128: the 8 lanes of a 16-byte access phase are 2 tokens x 64 bytes, on different banks.
  static constexpr int kTokenBytes = kHc * kRowBytes + 64;
  static constexpr int kPostBytes = kRowBytes + 64;
  static constexpr int kStageBytes = kTileTokens * (kTokenBytes + (kPost ? kPostBytes : 0));
  static constexpr int kSlotBytes = kRanks * kPartials * 4;
  static constexpr int kHalfTokens = kTileTokens / 2;  // the norm goes by half tiles: one half's exchange hides behind the other
  static constexpr int kNormBytes = kRanks * kHalfTokens * 4;
  static constexpr int kGroups = kColumns / 32;
  static constexpr int kGateBytes = kTileTokens * kHc * 4;
  static constexpr int kPerStageBytes =
      kStageBytes + 2 * kSlotBytes + kGateBytes + (kPost ? kGateBytes : 0) + (kHasNorm ? 4 * kNormBytes : 0) + 10 * 8;
  static constexpr int kFixedBytes = 2 * kMmaWarps * kPartials * 4 + (kHasNorm ? kColumns * 4 + kTileTokens * (kGroups + 1) * 4 : 0) + 8 * 8;
  static constexpr int kMostBytes = 232448;  // what a block may have on sm_90, and what the launch asks for
  static constexpr int kFit = (kMostBytes - kFixedBytes) / kPerStageBytes;
  static constexpr int kStages = kFit > 6 ? 6 : kFit;
  // A slot is written again 2 * kStages tiles later: a peer gets that far only after this block has loaded kStages tiles
  // further, hence has applied the slot's tile. One ring of kStages would let a fast peer overwrite an unread slot.
  static constexpr int kSlots = 2 * kStages;
  static constexpr int kWeightRegisters = kUnits * Shape::kHalf * UnitWeights<kXDtype, Shape::kHalf>::kRegisters;
  static constexpr int kInFlight = 2;  // 1 starves memory (89 us at 4096); 3 costs up to 7 us at 16384
  static constexpr int kPrefetch = 2;  // tiles asked for before the previous kernel ends: -0.3 us at 256 to 4096
  static constexpr bool kWide = kWeightRegisters > 144;
  // 200 / 72 / 40 is 1 to 3 % slower; with a norm 192 / 88 / 40 is 10 % slower (none of them spills).
  static constexpr bool kNarrow = kWeightRegisters <= 112, kRows = kNarrow && kVec < 8 && kWeightRegisters > 96;  // rows copied by lanes take registers of the loader
  // 64K registers of an SM: 256 mma threads, 128 of apply, 128 helpers. At hidden 6144: 200 / 72 / 40 costs up to 3 %, and
  // 192 / 88 / 40 with a norm 10 %, though neither spills.
  static constexpr int kMmaRegisters = kWide ? 208 : kRows ? 176 : kNarrow ? 184 : 200;
  static constexpr int kApplyRegisters = kWide ? 56 : kRows ? 104 : kNarrow ? 96 : 80;
  static constexpr int kHelperRegisters = kWide ? 40 : kRows ? 56 : kNarrow ? 48 : 32;
  static_assert(2 * kMmaRegisters + kApplyRegisters + kHelperRegisters == 512, "the warpgroups share what 512 threads of 128 registers start with");
  static_assert(kStages >= 2, "a ring needs two stages");
  static_assert(kWeightRegisters <= 168, "the weights of a chunk must fit in the registers of a warp");
  static_assert(kPartials * 4 % 16 == 0 && kStageBytes % 16 == 0 && kSlotBytes % 16 == 0, "the parts of shared memory stay aligned");

  char* stages;        // [kStages][kStageBytes]: tokens of x (post_pre: residual, then y), then post_pre's x
  float* partials;     // [2][kMmaWarps][kPartials]
  float* slots;        // [kSlots][kRanks][kPartials]
  float* gates;        // [kStages][kTileTokens][kHc]: pre gates
  float* h_in;         // [kStages][kTileTokens][kHc]: post_pre's h_post
  float* norm_slots;   // [kSlots][2 halves][kRanks][kHalfTokens]
  float* norm_weight;  // [kColumns]
  float* norm_groups;  // [kTileTokens][kGroups]
  float* inverse;      // [kTileTokens]
  Barrier *full, *empty, *y_full, *gates_full, *slot_full, *norm_full, *partials_full, *partials_empty, *sums_full, *inverse_full;
  int rank, lane, tiles;
  int cluster, round_tokens, longer_rounds, share, spare;

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
    partials = floats(2 * kMmaWarps * kPartials * 4);
    slots = floats(kSlots * kSlotBytes);
    gates = floats(kStages * kGateBytes);
    if constexpr (kPost) h_in = floats(kStages * kGateBytes);
    if constexpr (kHasNorm) {
      norm_slots = floats(kSlots * 2 * kNormBytes);
      norm_weight = floats(kColumns * 4);
      norm_groups = floats(kTileTokens * kGroups * 4);
      inverse = floats(kTileTokens * 4);
    }
    full = barriers(kStages), empty = barriers(kStages), y_full = barriers(kStages), gates_full = barriers(kStages);
    slot_full = barriers(kSlots), norm_full = barriers(2 * kSlots);
    partials_full = barriers(2), partials_empty = barriers(2), sums_full = barriers(2), inverse_full = barriers(2);
  }

  __device__ __forceinline__ void make_barriers() const {
    if (lane < kStages) {
      barrier_init(&full[lane], 1 + (kPost ? 32 : 0));
      barrier_init(&empty[lane], kMmaWarps + kApplyWarps + (kPost ? 1 : 0));
      barrier_init(&y_full[lane], kMmaWarps);
      barrier_init(&gates_full[lane], 1);
    }
    if (lane < kSlots) barrier_init(&slot_full[lane], 1);
    if (kHasNorm && lane < 2 * kSlots) barrier_init(&norm_full[lane], 1);
    if (lane < 2) {
      barrier_init(&partials_full[lane], kMmaWarps), barrier_init(&partials_empty[lane], 1);
      if (kHasNorm) barrier_init(&sums_full[lane], kApplyWarps), barrier_init(&inverse_full[lane], 1);
    }
    fence_barrier_init();
    fence_bulk();
    if (lane < kSlots) barrier_expect(&slot_full[lane], kSlotBytes);
    if (kHasNorm && lane < 2 * kSlots) barrier_expect(&norm_full[lane], kNormBytes);
    __syncwarp();
  }

  // Tokens are split evenly over the fewest rounds of tiles, a round's tokens evenly over the clusters: no round is a
  // remainder of one token a cluster, which would cost the time of a whole tile. A round is one run of memory.
  __device__ __forceinline__ void deal(int tokens) {
    // Read anew in each role (volatile): values kept from before the roles part would cost the mma warps registers.
    unsigned int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    cluster = block / kRanks;
    rank = block % kRanks;
    const unsigned int clusters = gridDim.x / kRanks, most = kTileTokens * clusters;
    const unsigned int rounds = (static_cast<unsigned int>(tokens) + most - 1) / most;
    round_tokens = static_cast<unsigned int>(tokens) / rounds, longer_rounds = tokens - round_tokens * rounds;
    share = static_cast<unsigned int>(round_tokens) / clusters, spare = round_tokens - share * clusters;
    tiles = tile_count(0) > 0 ? rounds : 0;  // a cluster without tokens: only where one round has fewer tokens than clusters
  }
  __device__ __forceinline__ int tile_first(int tile) const {
    return tile * round_tokens + min(tile, longer_rounds) + cluster * share + min(cluster, spare + (tile < longer_rounds));
  }
  __device__ __forceinline__ int tile_count(int tile) const { return share + (cluster < spare + (tile < longer_rounds)); }
};

}  // namespace hccupy
