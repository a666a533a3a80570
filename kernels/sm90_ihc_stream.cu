// iHC pre, head and post_pre for many tokens on sm_90a: persistent clusters of 8 blocks, weights in registers, x read once.
//
//   r = 1 / sqrt(mean(x^2) + norm_eps);  gates = sigmoid((x w^T) r scale + base);  z = sum_i h_pre[i] x[i]
//   (post_pre: x is y = h_post x + residual, rounded and written; rms_weight: z is RMS-normalised)
//
// | argument            | shape                | dtype        |
// | ------------------- | -------------------- | ------------ |
// | x                   | [tokens, hc, hidden] | kXDtype      |  post_pre: [tokens, hidden]
// | residual, h_post    | [tokens, hc, hidden], [tokens, hc] | kXDtype, float32 |  post_pre only
// | w                   | [outputs, hc*hidden] | float32      |  outputs = 2 hc; head: hc
// | hc_scale, hc_base   | [2], [outputs]       | float32      |  head: [1]
// | rms_weight          | [hidden] or null     | kRmsWeightDtype |
// | y                   | [tokens, hidden]; post_pre: [tokens, hc, hidden] and z [tokens, hidden] | kXDtype |
// | h_post, h_post_next | [tokens, hc]         | float32      |  not for head
//
// Baked: hc (2, 4), hidden (a multiple of 1024, hc * hidden <= 28672), the dtypes, kVec (8: x, y, z, w 16-byte aligned in
// address and strides; 4, 2, 1: elements an access of x and y may hold; the bits are the same).
// Launch: grid = 8 * clusters (any number: tokens are dealt out), block = 512, cluster 8, shared bytes = kSharedBytes below.
//
// A tile is 8 tokens; block `rank` of a cluster owns hidden / 8 columns of all channels. Each warp has one job, and barriers
// in shared memory link them, so that the mma warps run tiles ahead of the apply warps:
//   loader  bulk copies x to a ring of stages          full[stage]    (two other helpers: the raw weights, through the last two stages)
//   mma     8 warps, a chunk each: dots and squares    partials[2] -> partials_full; post_pre: y in place -> y_full[stage]
//   pusher  adds the 8 chunks, tells all 8 blocks      slots[2 * kStages] (counted in bytes)
//   apply   4 warps, 2 tokens each: gates, then z      empty[stage]
//   storer  post_pre: bulk copies y to memory          empty[stage]
// A slot is written again 2 * kStages tiles later: a peer gets that far only after this block has loaded kStages tiles
// further, hence has applied the slot's tile. One ring of kStages would let a fast peer overwrite an unread slot.
#include "common/sm90_ihc_baked.cuh"

#include "common/sm90_ihc.cuh"

namespace hccupy {

template <class Shape>
struct IhcStream {
  static constexpr int kHc = Shape::kHc, kXDtype = Shape::kXDtype, kVec = Shape::kVec;
  static constexpr int kRanks = 8;
  static constexpr int kMmaWarps = 8, kApplyWarps = 4;
  static constexpr int kThreads = 512, kBlocks = 1;
  static constexpr int kColumns = Shape::kHidden / kRanks;
  static constexpr int kUnits = Shape::kChunkUnits;  // of one mma warp: a chunk
  static constexpr int kRowBytes = 2 * kColumns;
  // 64 bytes past a multiple of 128: the 8 lanes of a 16-byte access phase are 2 tokens x 64 bytes, on different banks.
  static constexpr int kTokenBytes = kHc * kRowBytes + 64;
  static constexpr int kPostBytes = kRowBytes + 64;
  static constexpr int kStageBytes = kTileTokens * (kTokenBytes + (Shape::kPost ? kPostBytes : 0));
  static constexpr int kSlotBytes = kRanks * kPartials * 4;
  static constexpr int kNormSlotBytes = kRanks * kTileTokens * 4;
  static constexpr int kPerStageBytes =
      kStageBytes + 2 * kSlotBytes + (Shape::kPost ? kTileTokens * kHc * 4 : 0) + (Shape::kHasNorm ? 2 * kNormSlotBytes : 0) + 7 * 8;
  static constexpr int kFixedBytes = 2 * kMmaWarps * kPartials * 4 + 6 * 8 + (Shape::kHasNorm ? kColumns * 4 + kTileTokens * (kColumns / 32) * 4 : 0);
  static constexpr int kMostBytes = 232448;  // what a block may have on sm_90
  static constexpr int kFit = (kMostBytes - kFixedBytes) / kPerStageBytes;
  static constexpr int kStages = kFit > 6 ? 6 : kFit;
  static constexpr int kSlots = 2 * kStages;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kPerStageBytes;
  static constexpr int kWeightRegisters = kUnits * Shape::kHalf * UnitWeights<kXDtype, Shape::kHalf>::kRegisters;
  static constexpr int kInFlight = 2;  // 1 starves memory (89 us at 4096), 3 costs 1 to 7 us at 1024 to 16384
  static constexpr int kUnitsAtOnce = kWeightRegisters <= 96 ? 3 : 1;
  static constexpr bool kWide = kWeightRegisters > 144;
  static constexpr int kMmaRegisters = kWide ? 208 : 200, kApplyRegisters = kWide ? 64 : 80, kHelperRegisters = 32;
  // Bulk-copied weights come through the last two stages of the ring, in rows of (channel, output); 16 bytes more a row keep the 8
  // lanes of an access on different banks.
  static constexpr bool kBulkWeights = kVec == 8;
  static constexpr int kWeightRowBytes = 4 * kColumns + 16;
  static constexpr int kWeightRows = Shape::kUsedOutputs * kHc;
  static constexpr int kWeightStages = 2;
  static_assert(kWeightRows * kWeightRowBytes <= kWeightStages * kStageBytes && kWeightRows <= 32, "weights fit in two stages");
  static_assert(kStages >= 2, "a ring needs two stages");
  static_assert(kWeightRegisters <= 168, "the weights of a chunk must fit in the registers of a warp");
  static_assert(kPartials * 4 % 16 == 0 && kStageBytes % 16 == 0 && kSlotBytes % 16 == 0, "the parts of shared memory stay aligned");

  char* stages;        // [kStages][kStageBytes]: tokens of x (post_pre: residual, then y), then post_pre's x
  float* partials;     // [2][kMmaWarps][kPartials]
  float* slots;        // [kSlots][kRanks][kPartials]
  float* h_in;         // [kStages][kTileTokens][kHc]
  float* norm_slots;   // [kSlots][kRanks][kTileTokens]
  float* norm_weight;  // [kColumns]
  float* norm_groups;  // [kTileTokens][kColumns / 32]
  Barrier *full, *empty, *y_full, *slot_full, *norm_full, *partials_full, *partials_empty, *weights_full, *weights_read;
  int rank, lane, tiles, rounds, cluster, clusters, rest_first, rest_count;

  __device__ __forceinline__ void place() {
    char* at = reinterpret_cast<char*>(shared_bytes);
    const auto take = [&](int bytes) {
      char* start = at;
      at += bytes;
      return start;
    };
    stages = take(kStages * kStageBytes);
    partials = reinterpret_cast<float*>(take(2 * kMmaWarps * kPartials * 4));
    slots = reinterpret_cast<float*>(take(kSlots * kSlotBytes));
    if constexpr (Shape::kPost) h_in = reinterpret_cast<float*>(take(kStages * kTileTokens * kHc * 4));
    if constexpr (Shape::kHasNorm) {
      norm_slots = reinterpret_cast<float*>(take(kSlots * kNormSlotBytes));
      norm_weight = reinterpret_cast<float*>(take(kColumns * 4));
      norm_groups = reinterpret_cast<float*>(take(kTileTokens * (kColumns / 32) * 4));
    }
    full = reinterpret_cast<Barrier*>(take(kStages * 8));
    empty = reinterpret_cast<Barrier*>(take(kStages * 8));
    y_full = reinterpret_cast<Barrier*>(take(kStages * 8));
    slot_full = reinterpret_cast<Barrier*>(take(kSlots * 8));
    norm_full = reinterpret_cast<Barrier*>(take(kSlots * 8));
    partials_full = reinterpret_cast<Barrier*>(take(2 * 8));
    partials_empty = reinterpret_cast<Barrier*>(take(2 * 8));
    weights_full = reinterpret_cast<Barrier*>(take(8));
    weights_read = reinterpret_cast<Barrier*>(take(8));
  }

  // Whole tiles are interleaved over the clusters; the tokens that are left are dealt out evenly as one smaller tile each.
  __device__ __forceinline__ void deal(int tokens) {
    // Read anew in each role (volatile): values kept from before the roles part would cost the mma warps registers.
    unsigned int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    cluster = block / kRanks;
    rank = block % kRanks;
    clusters = gridDim.x / kRanks;
    rounds = tokens / (kTileTokens * clusters);
    const int dealt = rounds * kTileTokens * clusters, rest = tokens - dealt;
    const int begin = rest * cluster / clusters, end = rest * (cluster + 1) / clusters;  // rest < 8 * clusters: no overflow
    rest_first = dealt + begin;
    rest_count = end - begin;
    tiles = rounds + (rest_count > 0);
  }
  __device__ __forceinline__ int tile_first(int tile) const { return tile < rounds ? (tile * clusters + cluster) * kTileTokens : rest_first; }
  __device__ __forceinline__ int tile_count(int tile) const { return tile < rounds ? kTileTokens : rest_count; }

  struct Turn {  // index of a ring and the parity of its round
    int index = 0;
    unsigned int parity = 0;
    __device__ __forceinline__ void next(int size) {
      if (++index == size) index = 0, parity ^= 1;
    }
  };

  // ---- loader ---------------------------------------------------------------------------------------------------

  // One row of kRowBytes by the whole warp, for memory that bulk copies cannot reach.
  __device__ __forceinline__ void copy_row(char* to, const char* from) const {
    using Word = typename WordOf<2 * kVec>::Type;
    constexpr int kWords = kRowBytes / (2 * kVec);
#pragma unroll 8
    for (int k = lane; k < kWords; k += 32) reinterpret_cast<Word*>(to)[k] = reinterpret_cast<const Word*>(from)[k];
  }

  // The raw weights of this block, by two warps: a bulk copy a lane is a serial loop, 16 halve it.
  __device__ __forceinline__ char* weight_rows() const { return stages + (kStages - kWeightStages) * kStageBytes; }
  __device__ __forceinline__ void load_weight_rows(const IhcArguments& a, int half) const {
    constexpr int kRows = kWeightRows / 2;
    if (lane == 0) barrier_expect(weights_full, kRows * 4 * kColumns);
    __syncwarp();
    const int from = half * kRows + lane, output = from / kHc, channel = from % kHc;
    if (lane < kRows)
      bulk_load(weight_rows() + (channel * Shape::kUsedOutputs + output) * kWeightRowBytes, a.w + static_cast<long long>(from) * Shape::kHidden + rank * kColumns,
                4 * kColumns, weights_full);
  }

  __device__ __forceinline__ void load_tiles(const IhcArguments& a) {
    const long long column = static_cast<long long>(rank) * kColumns;
    const char* from = (Shape::kPost ? a.residual : a.x) + 2 * column;
    const long long token_stride = 2 * (Shape::kPost ? a.residual_tokens : a.x_tokens), hc_stride = 2 * (Shape::kPost ? a.residual_hc : a.x_hc);
    Turn turn, come;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile_first(tile), count = tile_count(tile);
      // Memory serves all that is asked for alike: with every stage in flight the first tile comes when the last does.
      if (tile >= kInFlight) {
        barrier_wait(&full[come.index], come.parity);
        come.next(kStages);
      }
      char* stage = stages + turn.index * kStageBytes;
      Barrier* barrier = &full[turn.index];
      barrier_wait(&empty[turn.index], turn.parity ^ 1);
      if (kBulkWeights && tile < kStages && tile >= kStages - kWeightStages) barrier_wait(weights_read, 0);
      if constexpr (kVec == 8) {
        if (lane == 0) barrier_expect(barrier, count * (kHc + (Shape::kPost ? 1 : 0)) * kRowBytes);
        __syncwarp();
        const int token = lane / kHc, channel = lane % kHc;
        if (token < count)
          bulk_load(stage + token * kTokenBytes + channel * kRowBytes, from + (first + token) * token_stride + channel * hc_stride, kRowBytes, barrier);
        if constexpr (Shape::kPost) {
          if (lane < count)
            bulk_load(stage + kTileTokens * kTokenBytes + lane * kPostBytes, a.x + 2 * ((first + lane) * a.x_tokens + column), kRowBytes, barrier);
        }
      } else {
        for (int row = 0; row < count * kHc; ++row) {
          const int token = row / kHc, channel = row % kHc;
          copy_row(stage + token * kTokenBytes + channel * kRowBytes, from + (first + token) * token_stride + channel * hc_stride);
        }
        if constexpr (Shape::kPost) {
          for (int token = 0; token < count; ++token)
            copy_row(stage + kTileTokens * kTokenBytes + token * kPostBytes, a.x + 2 * ((first + token) * a.x_tokens + column));
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
      }
      if constexpr (Shape::kPost) {
        const int token = lane / kHc, channel = lane % kHc;
        if (token < count) copy_word(h_in + (turn.index * kTileTokens + token) * kHc + channel, a.h_post + (first + token) * a.h_post_tokens + channel);
        copy_words_arrive(barrier);
      }
      turn.next(kStages);
    }
  }

  // ---- mma ------------------------------------------------------------------------------------------------------

  // Shape::load_unit from the rows in shared memory; `unit` counts from this block's first.
  __device__ __forceinline__ void read_unit(int unit, float (&values)[Shape::kHalf][8]) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int b = 0; b < Shape::kHalf; ++b) {
#pragma unroll
      for (int k = 0; k < 8; ++k) values[b][k] = 0.0f;
      if (g < Shape::kUsedOutputs) {
        const int row = ((unit & 1) * Shape::kHalf + b) * Shape::kUsedOutputs + g;
        const float4* from = reinterpret_cast<const float4*>(weight_rows() + row * kWeightRowBytes + ((unit >> 1) * 32 + t * 8) * 4);
        const float4 low = from[0], high = from[1];
        values[b][0] = low.x, values[b][1] = low.y, values[b][2] = low.z, values[b][3] = low.w;
        values[b][4] = high.x, values[b][5] = high.y, values[b][6] = high.z, values[b][7] = high.w;
      }
    }
  }

  __device__ __forceinline__ void multiply_tiles(const IhcArguments& a, int warp) {
    const int g = lane >> 2, t = lane & 3;
    const int first_unit = (rank * kMmaWarps + warp) * kUnits;
    // The grid has one row, but the compiler does not know, so that a test of it ends a basic block: without that, ptxas
    // interleaves the units until weights spill (64 bytes at every register count tried, 200 to 240).
    unsigned int rows;
    asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(rows));
    typename Shape::Weights weights[kUnits];
    {
      float values[kUnits][Shape::kHalf][8];
      if constexpr (kBulkWeights) {
        barrier_wait(weights_full, 0);
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) Shape::load_unit(a.w, first_unit + u, lane, values[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if constexpr (kBulkWeights) read_unit(warp * kUnits + u, values[u]);
        weights[u].split(values[u]);
        if (rows == 100 + u) return;
      }
      if constexpr (kBulkWeights) {
        __syncwarp();
        if (lane == 0) barrier_arrive(weights_read);
      }
    }
    cluster_wait();
    Turn turn, pair;
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(&full[turn.index], turn.parity);
      char* stage = stages + turn.index * kStageBytes;
      float h[kHc];
      if constexpr (Shape::kPost) {
#pragma unroll
        for (int i = 0; i < kHc; ++i) h[i] = h_in[(turn.index * kTileTokens + g) * kHc + i];
      }
      const auto place = [&](int u, int b) {
        const int unit = warp * kUnits + u;
        return reinterpret_cast<uint4*>(stage + g * kTokenBytes + ((unit & 1) * Shape::kHalf + b) * kRowBytes + (unit >> 1) * 64 + t * 16);
      };
      const auto post_place = [&](int u) {
        return reinterpret_cast<uint4*>(stage + kTileTokens * kTokenBytes + g * kPostBytes + ((warp * kUnits + u) >> 1) * 64 + t * 16);
      };
      float4 total;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint4 v[Shape::kHalf], v_post;
        if constexpr (Shape::kPost) v_post = *post_place(u);
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) v[b] = *place(u, b);
        UnitSums sums;
        if constexpr (Shape::kPost) {
          float post[8];
          unpack<kXDtype>(v_post, post);
#pragma unroll
          for (int b = 0; b < Shape::kHalf; ++b) {
            v[b] = post_octet<kXDtype>(post, v[b], (warp * kUnits + u) & 1 ? h[Shape::kHalf + b] : h[b]);
            *place(u, b) = v[b];
          }
        }
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) sums.add(weights[u], b, v[b]);
        total = u == 0 ? sums.result(weights[u]) : total + sums.result(weights[u]);
        if (u % kUnitsAtOnce == kUnitsAtOnce - 1 && rows == 200 + u) return;
      }
      if constexpr (Shape::kPost) {
        fence_bulk();
        __syncwarp();
        if (lane == 0) barrier_arrive(&y_full[turn.index]);
      }
      barrier_wait(&partials_empty[pair.index], pair.parity ^ 1);
      store_partials(partials + (pair.index * kMmaWarps + warp) * kPartials, total, lane);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&partials_full[pair.index]);
        barrier_arrive(&empty[turn.index]);
      }
      turn.next(kStages);
      pair.next(2);
    }
  }

  // ---- pusher ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void push_tiles() {
    constexpr int kQuads = kPartials / 4;
    const int quad = lane < kQuads ? lane : kQuads - 1;
    Turn slot, pair;
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(&partials_full[pair.index], pair.parity);
      const float* from = partials + pair.index * kMmaWarps * kPartials + 4 * quad;
      const auto chunk = [&](int k) { return *reinterpret_cast<const float4*>(from + k * kPartials); };
      const float4 sum = ((chunk(0) + chunk(1)) + (chunk(2) + chunk(3))) + ((chunk(4) + chunk(5)) + (chunk(6) + chunk(7)));
      __syncwarp();
      if (lane == 0) barrier_arrive(&partials_empty[pair.index]);
      if (lane < kQuads) {
        const unsigned int to = shared_address(slots + (slot.index * kRanks + rank) * kPartials + 4 * quad), barrier = shared_address(&slot_full[slot.index]);
#pragma unroll
        for (int peer = 0; peer < kRanks; ++peer) store_peer(peer_address(to, peer), sum, peer_address(barrier, peer));
      }
      slot.next(kSlots);
      pair.next(2);
    }
  }

  // ---- apply ----------------------------------------------------------------------------------------------------

  // Octets of this warp's two tokens in order, 32 lanes side by side: no bank conflict, 512-byte stores.
  static constexpr int kOctets = kColumns / 8;
  static constexpr int kSteps = 2 * kOctets / 32;
  static_assert(2 * kOctets % 32 == 0, "hidden / 1024 is whole, so are the steps");

  __device__ __forceinline__ void channels(const char* stage, int token, int octet, uint4 (&x)[kHc]) const {
#pragma unroll
    for (int i = 0; i < kHc; ++i) x[i] = *reinterpret_cast<const uint4*>(stage + token * kTokenBytes + i * kRowBytes + octet * 16);
  }

  struct Gates {
    float h[2][kHc];
  };

  // Waits for the tile's slot and gives each lane the pre gates of the warp's two tokens. Lane = (token, output, half of the ranks).
  __device__ __forceinline__ Gates gates(const IhcArguments& a, const GateScales& scales, int warp, Turn slot, long long first, int count) const {
    const int token = 2 * warp + (lane >> 4), out = (lane >> 1) & 7, half = lane & 1;
    barrier_wait_cluster(&slot_full[slot.index], slot.parity);
    if (warp == 0 && lane == 0) barrier_expect(&slot_full[slot.index], kSlotBytes);
    const float* from = slots + (slot.index * kRanks + 4 * half) * kPartials;
    const float* dots = from + token * kOutputs + out;
    const float* squares = from + kTileTokens * kOutputs + token;
    float dot = (dots[0] + dots[kPartials]) + (dots[2 * kPartials] + dots[3 * kPartials]);
    float square = (squares[0] + squares[kPartials]) + (squares[2 * kPartials] + squares[3 * kPartials]);
    dot += __shfl_xor_sync(0xffffffffu, dot, 1);
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    const float gate = scales.template gate<static_cast<int>(Shape::kDepth)>(dot, square, a.norm_eps);
    if (Shape::kOp != kHead && rank == token && token < count && half == 0 && out >= kHc && out < 2 * kHc)
      a.h_next[(first + token) * a.h_next_tokens + out - kHc] = gate;
    Gates result;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) result.h[k][i] = __shfl_sync(0xffffffffu, gate, k * 16 + i * 2);
    }
    return result;
  }

  __device__ __forceinline__ void mix(const char* stage, int warp, const Gates& gates, int step, float (&z)[8], int& which, int& octet) const {
    const int index = step * 32 + lane;
    which = index >= kOctets;
    octet = index - which * kOctets;
    uint4 x[kHc];
    channels(stage, 2 * warp + which, octet, x);
    float h[kHc];
#pragma unroll
    for (int i = 0; i < kHc; ++i) h[i] = which ? gates.h[1][i] : gates.h[0][i];
    reduce_channels<kXDtype, kHc>(x, h, z);
  }

  // With a norm, z waits for its sum of squares: rounded in registers where they suffice, else in the stage: in the place of channel 0 (not rounded: of channels 0 and 1), or of
  // post's x where y must stay. Each lane reads what it wrote.
  static constexpr bool kKeepsRegisters = Shape::kHasNorm && Shape::kRoundBeforeNorm && !kWide;
  static constexpr bool kKeepsZ = !kKeepsRegisters && Shape::kHasNorm && (Shape::kRoundBeforeNorm || !Shape::kPost);
  static constexpr int kHeld = kKeepsRegisters ? kSteps : 1;
  static __device__ __forceinline__ uint4* kept(char* stage, int token, int octet) {
    return reinterpret_cast<uint4*>(stage + (Shape::kPost ? kTileTokens * kTokenBytes + token * kPostBytes : token * kTokenBytes) + octet * 16);
  }

  // Sum of squares of z over this block's columns for the warp's two tokens, told to all blocks.
  __device__ __forceinline__ void push_norm(char* stage, int warp, const Gates& gates, Turn turn, int slot, uint4 (&held)[kHeld]) const {
    constexpr int kGroups = kColumns / 32;
    constexpr int kUnroll = kKeepsRegisters ? kSteps : 2;
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      float z[8];
      int which, octet;
      mix(stage, warp, gates, step, z, which, octet);
      uint4* place = kept(stage, 2 * warp + which, octet);
      if constexpr (Shape::kRoundBeforeNorm) {
        const uint4 rounded = pack<kXDtype>(z);
        if constexpr (kKeepsRegisters) {
          held[step] = rounded;
        } else {
          *place = rounded;
        }
        unpack<kXDtype>(rounded, z);
      } else if constexpr (kKeepsZ) {
        float4* low = reinterpret_cast<float4*>(place);
        low[0] = float4{z[0], z[1], z[2], z[3]};
        low[kRowBytes / 16] = float4{z[4], z[5], z[6], z[7]};
      }
      float sum = octet_squares(z);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if ((lane & 3) == 0) norm_groups[(2 * warp + which) * kGroups + (octet >> 2)] = sum;
    }
    __syncwarp();
    if (kKeepsRegisters && lane == 0) barrier_arrive(&empty[turn.index]);
    if (lane < 2 * kRanks) {
      const int token = 2 * warp + (lane & 1), peer = lane >> 1;
      const float sum = norm_block_sum<Shape>(kGroups, [&](int k) { return norm_groups[token * kGroups + k]; });
      store_peer(peer_address(shared_address(norm_slots + (slot * kRanks + rank) * kTileTokens + token), peer), sum,
                 peer_address(shared_address(&norm_full[slot]), peer));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_tile(const IhcArguments& a, char* stage, int warp, const Gates& gates, Turn slot, long long first, int count, const uint4 (&held)[kHeld]) const {
    float inverse[2] = {};
    if constexpr (Shape::kHasNorm) {
      barrier_wait_cluster(&norm_full[slot.index], slot.parity);
      if (warp == 0 && lane == 0) barrier_expect(&norm_full[slot.index], kNormSlotBytes);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* from = norm_slots + slot.index * kRanks * kTileTokens + 2 * warp + k;
        const auto block = [&](int r) { return from[r * kTileTokens]; };
        const float sum = ((block(0) + block(1)) + (block(2) + block(3))) + ((block(4) + block(5)) + (block(6) + block(7)));
        inverse[k] = inverse_rms(sum, static_cast<float>(Shape::kHidden), a.rms_eps);
      }
    }
    constexpr int kUnroll = Shape::kHasNorm && !kKeepsRegisters ? 2 : kSteps;
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      float z[8];
      int which, octet;
      if constexpr (kKeepsZ || kKeepsRegisters) {
        const int index = step * 32 + lane;
        which = index >= kOctets;
        octet = index - which * kOctets;
        const uint4* place = kept(stage, 2 * warp + which, octet);
        if constexpr (kKeepsRegisters) {
          unpack<kXDtype>(held[step], z);
        } else if constexpr (Shape::kRoundBeforeNorm) {
          unpack<kXDtype>(*place, z);
        } else {
          const float4 low = *reinterpret_cast<const float4*>(place), high = *reinterpret_cast<const float4*>(place + kRowBytes / 16);
          z[0] = low.x, z[1] = low.y, z[2] = low.z, z[3] = low.w, z[4] = high.x, z[5] = high.y, z[6] = high.z, z[7] = high.w;
        }
      } else {
        mix(stage, warp, gates, step, z, which, octet);
      }
      if constexpr (Shape::kHasNorm) {
        const float factor = which ? inverse[1] : inverse[0];
        const float4* scale = reinterpret_cast<const float4*>(norm_weight + octet * 8);
        const float4 low = scale[0], high = scale[1];
        const float scales[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) z[k] = z[k] * factor * scales[k];
      }
      const int token = 2 * warp + which;
      if (token < count) Octet<kVec>::store(a.z + 2 * ((first + token) * a.z_tokens + rank * kColumns + octet * 8), pack<kXDtype>(z));
    }
    if constexpr (kKeepsZ) fence_bulk();  // the stage is refilled by bulk copies
  }

  __device__ __forceinline__ void apply_tiles(const IhcArguments& a, int warp) {
    const int out = (lane >> 1) & 7;
    const GateScales scales = GateScales::of<kHc>(out, out < Shape::kUsedOutputs, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
    if constexpr (Shape::kHasNorm) {
      using N = Element<Shape::kNormDtype>;
      const typename N::Type* from = static_cast<const typename N::Type*>(a.rms_weight) + rank * kColumns;
      for (int k = warp * 32 + lane; k < kColumns; k += kApplyWarps * 32) norm_weight[k] = N::to_float(from[k]);
      asm volatile("bar.sync 1, %0;" ::"n"(kApplyWarps * 32) : "memory");
    }
    cluster_wait();
    wait_for_previous_grid();
    Turn turn, slot, last_turn, last_slot;
    Gates last;
    uint4 held[kHeld];
    constexpr int kLate = Shape::kHasNorm ? 1 : 0;  // with a norm, a tile is stored one pass after its squares went out
    for (int tile = 0; tile < tiles + kLate; ++tile) {
      Gates now;
      char* stage = stages + turn.index * kStageBytes;
      if (tile < tiles) {
        if constexpr (Shape::kPost) {
          barrier_wait(&y_full[turn.index], turn.parity);
        } else {
          barrier_wait(&full[turn.index], turn.parity);
        }
        now = gates(a, scales, warp, slot, tile_first(tile), tile_count(tile));
        if (Shape::kHasNorm && !kKeepsRegisters) push_norm(stage, warp, now, turn, slot.index, held);
      }
      const int done = tile - kLate;
      if (done >= 0) {
        const Turn t = Shape::kHasNorm ? last_turn : turn, s = Shape::kHasNorm ? last_slot : slot;
        store_tile(a, stages + t.index * kStageBytes, warp, Shape::kHasNorm ? last : now, s, tile_first(done), tile_count(done), held);
        if (!kKeepsRegisters) {
          __syncwarp();
          if (lane == 0) barrier_arrive(&empty[t.index]);
        }
      }
      if (kKeepsRegisters && tile < tiles) push_norm(stage, warp, now, turn, slot.index, held);
      if constexpr (Shape::kHasNorm) last = now, last_turn = turn, last_slot = slot;
      turn.next(kStages);
      slot.next(kSlots);
    }
  }

  // ---- storer (post_pre) ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void store_posts(const IhcArguments& a) {
    char* to = a.y + 2LL * rank * kColumns;
    Turn turn;
    for (int tile = 0; tile < tiles; ++tile) {
      const long long first = tile_first(tile);
      const int count = tile_count(tile);
      char* stage = stages + turn.index * kStageBytes;
      barrier_wait(&y_full[turn.index], turn.parity);
      if constexpr (kVec == 8) {
        const int token = lane / kHc, channel = lane % kHc;
        if (token < count)
          bulk_store(to + 2 * ((first + token) * a.y_tokens + channel * a.y_hc), stage + token * kTokenBytes + channel * kRowBytes, kRowBytes);
        bulk_commit();
        bulk_wait_read();
      } else {
        for (int row = 0; row < count * kHc; ++row) {
          const int token = row / kHc, channel = row % kHc;
          copy_row(to + 2 * ((first + token) * a.y_tokens + channel * a.y_hc), stage + token * kTokenBytes + channel * kRowBytes);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[turn.index]);
      turn.next(kStages);
    }
  }

  // ---------------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void run(const IhcArguments& a) {
    IhcStream s;
    s.place();
    s.lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    if (warp == 0) {
      if (s.lane < kStages) {
        barrier_init(&s.full[s.lane], 1 + (Shape::kPost ? 32 : 0));
        barrier_init(&s.empty[s.lane], kMmaWarps + kApplyWarps + (Shape::kPost ? 1 : 0));
        barrier_init(&s.y_full[s.lane], kMmaWarps);
      }
      if (s.lane < kSlots) barrier_init(&s.slot_full[s.lane], 1), barrier_init(&s.norm_full[s.lane], 1);
      if (s.lane < 2) barrier_init(&s.partials_full[s.lane], kMmaWarps), barrier_init(&s.partials_empty[s.lane], 1);
      if (s.lane == 0) barrier_init(s.weights_full, 2), barrier_init(s.weights_read, kMmaWarps);
      fence_barrier_init();
      if (s.lane < kSlots) {
        barrier_expect(&s.slot_full[s.lane], kSlotBytes);
        if (Shape::kHasNorm) barrier_expect(&s.norm_full[s.lane], kNormSlotBytes);
      }
    }
    __syncthreads();
    cluster_arrive();
    let_next_grid_start();
    // A block may end once its own tiles are done: every byte that peers send it has arrived by then.
    if (warp < kMmaWarps) {
      take_registers<kMmaRegisters>();
      s.deal(a.tokens);
      s.multiply_tiles(a, warp);
    } else if (warp < kMmaWarps + kApplyWarps) {
      give_registers<kApplyRegisters>();
      s.deal(a.tokens);
      s.apply_tiles(a, warp - kMmaWarps);
    } else {
      give_registers<kHelperRegisters>();
      s.deal(a.tokens);
      const int helper = warp - kMmaWarps - kApplyWarps;
      if (kBulkWeights && (helper == 1 || helper == 2)) s.load_weight_rows(a, helper - 1);
      cluster_wait();
      wait_for_previous_grid();
      if (helper == 0) {
        s.load_tiles(a);
      } else if (helper == 1) {
        s.push_tiles();
      } else if (Shape::kPost && helper == 2) {
        s.store_posts(a);
      }
    }
  }
};

template <class Shape>
using IhcKernel = IhcStream<Shape>;

}  // namespace hccupy

#include "common/sm90_ihc_entry.cuh"
