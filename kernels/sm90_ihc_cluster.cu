// iHC pre, head and post_pre for few tokens on sm_90a: one cluster of blocks shares up to 8 tokens, everything in
// registers.
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
// Baked: hc (2 to 4), hidden, kRanks (of the streaming kernel, which fixes the order of the sums), the dtypes, kVec (8:
// x, y, z, w 16-byte aligned in address and strides; 4, 2, 1: elements an access of x and y may hold; the bits are the
// same). Launch: grid = 16 * clusters with 8 * clusters >= tokens, block = 32 * (kWarps + kGatesWarp): a warp for each
// group of 32 columns of a part, up to 16 of them (hc 2: 24; more spill); cluster 16, no dynamic shared memory. Tokens
// are split evenly over the clusters. With the programmatic attribute, w, scale and base are fetched before the
// previous kernel ends.
#include "common/sm90_ihc_baked.cuh"

namespace hccupy {

struct IhcKernel {
  using Shape = BakedShape;
  static constexpr int kRanks = 16;
  static constexpr int kWarps = Shape::kPartGroups;  // each: one group of 32 columns, all channels
  // And a warp for the gates that are only returned, unless it would leave a thread 96 registers instead of 128.
  static constexpr bool kGatesWarp = kWarps < 16;
  static constexpr int kThreads = (kWarps + kGatesWarp) * 32;
  static constexpr int kBlocks = 1;  // an SM; two (72 registers) spill and win nothing
  static constexpr int kUnits = 2 * kWarps;
  static constexpr int kBlockChunks = Shape::kPartChunks;
  static constexpr int kQuads = kPartials / 4;
  static constexpr bool kPostQuads = Shape::kOp != kHead && Shape::kPostRow == 4;  // post gates' dots stand apart
  // Who tells what, kBlockChunks lanes each: first dots of pre gates and squares, which all blocks want, then from the
  // next warp on dots of post gates, which block 0 wants.
  static constexpr int kCommon = kTileTokens + kTileTokens / 4, kPostFrom = (kCommon * kBlockChunks + 31) / 32 * 32;
  static constexpr int kTold = kPostQuads ? kPostFrom + kTileTokens * kBlockChunks : kCommon * kBlockChunks;
  static constexpr bool kRoom = kWarps <= 16;  // registers to keep more addresses in
  static_assert(kTold <= kThreads, "there are lanes for all quads");
  // The lanes of a quad read slots that would lie a multiple of 32 banks apart: 0.05 to 0.15 us at 1 to 16 tokens.
  static constexpr int kSlot = kPartials + 4, kNormSlot = kRanks + 4;
  static constexpr int kNormSums = 4 * kTileTokens + 8;  // of a warp: by tokens and lanes of a quad
  // The norm's squares are added in runs, every 4 kRunWarps-th octet in one: the stream kernel's lanes of a part.
  static constexpr int kRunWarps = Shape::kRanks / 2;
  static_assert(kWarps >= kRunWarps, "the first octet of every run is there");
  static_assert(kBlockChunks * Shape::kChunkUnits == kUnits, "chunks tile the units of a block");

  // Sum over the ranks of this lane's quarter, then over the quarters: the tree that the stream kernel uses too.
  template <class Value, class Read>
  static __device__ __forceinline__ Value quarter(Read read) {
    return Value{(read(0) + read(1)) + (read(2) + read(3))};
  }

  static __device__ __forceinline__ void run(const IhcArguments& a) {
    constexpr int kHc = Shape::kHc, kXDtype = Shape::kXDtype;
    using Access = Octet<Shape::kVec>;
    __shared__ __align__(16) float partials[kUnits][kPartials];
    __shared__ __align__(16) float slots[kRanks][kSlot];
    __shared__ __align__(16) float norm_sums[Shape::kHasNorm ? kWarps : 1][kNormSums];
    __shared__ __align__(16) float norm_slots[Shape::kHasNorm ? kTileTokens : 1][kNormSlot];
    __shared__ Barrier gates_full, posts_full, norm_full;

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = block_in_cluster();
    const int cluster = blockIdx.x / kRanks, clusters = gridDim.x / kRanks;
    int share = kTileTokens;  // the first clusters have a token more
    while (share * clusters > a.tokens) --share;
    const int larger = a.tokens - share * clusters;
    const int first = cluster * share + min(cluster, larger), count = share + (cluster < larger);
    const bool has_columns = warp < kWarps;
    const bool has_token = g < count;

    if (threadIdx.x == 0) {
      barrier_init(&gates_full, 1);
      barrier_init(&posts_full, 1);
      barrier_init(&norm_full, 1);
      fence_barrier_init();
      barrier_expect(&gates_full, kRanks * 16 * (count + (count + 3) / 4));
      if (kPostQuads && rank == 0) barrier_expect(&posts_full, kRanks * 16 * count);
      barrier_expect(&norm_full, kRanks * 4 * count);
    }
    cluster_arrive();
    let_next_grid_start();

    const int group = rank * kWarps + warp;
    const int column = Shape::column_of(group) + t * 8;
    Shape::Weights weights[2];
    if (has_columns) {
      float values[2][Shape::kHalf][8];
#pragma unroll
      for (int half = 0; half < 2; ++half) Shape::load_unit(a.w, 2 * group + half, lane, values[half]);
#pragma unroll
      for (int half = 0; half < 2; ++half) weights[half].split(values[half]);
    }
    const int out = (has_columns ? 0 : kHc) + t;
    const GateScales scales =
        GateScales::of<kHc>(out, t < kHc && out < Shape::kUsedOutputs, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
    float norm_weights[8];
    if constexpr (Shape::kHasNorm) {
      using N = Element<Shape::kNormDtype>;
#pragma unroll
      for (int k = 0; k < 8; ++k)
        norm_weights[k] = has_columns && Shape::has(group, t)
                              ? N::to_float(static_cast<const N::Type*>(a.rms_weight)[column + k])
                              : 0.0f;
    }

    // What needs no x is worked out, and kept, before the wait: of the chain from x to z, 4000 cycles at one token, the
    // integer arithmetic of each step is 50 to 100.
    const long long token = first + g;
    const long long tokens_stride = Shape::kPost ? a.residual_tokens : a.x_tokens,
                    hc_stride = 2 * (Shape::kPost ? a.residual_hc : a.x_hc);
    const char* from = (Shape::kPost ? a.residual : a.x) + 2 * (token * tokens_stride + column);
    // Not kept (1 token with a norm 2.49 -> 2.64 us), nor worked out where it is used (2.61; without 2.02 -> 2.13).
    char* to = a.z + 2 * (token * a.z_tokens + column);
    settle_early(from);

    // What this lane adds up, chunk `chunk` of a quad, and the peers that it tells.
    constexpr int kPeers = kRanks / kBlockChunks;
    const int thread = threadIdx.x, chunk = thread % kBlockChunks;
    const bool tells_post = thread >= kPostFrom;
    const int turn = (tells_post ? thread - kPostFrom : min(thread, kCommon * kBlockChunks - 1)) / kBlockChunks;
    const bool tells_squares = !tells_post && turn >= kTileTokens;
    const int quad = tells_squares ? kTileTokens + turn : 2 * min(turn, kTileTokens - 1) + tells_post;
    const int first_token = tells_squares ? 4 * (turn - kTileTokens) : turn;
    const bool idle = first_token >= count || (tells_post ? chunk > 0 : thread >= kCommon * kBlockChunks);
    int peers = idle ? 0 : tells_post ? 1 : kPeers;
    int part_at = chunk * Shape::kChunkUnits * kPartials + 4 * quad;
    unsigned int slot = shared_address(&slots[rank][4 * quad]), first_peer = chunk * kPeers;
    int dots_at = (4 * t) * kSlot + g * kOutputs, squares_at = (4 * t) * kSlot + kTileTokens * kOutputs + g;
    settle_early(peers), settle_early(part_at), settle_early(slot), settle_early(dots_at);
    if constexpr (kRoom && !Shape::kPost) settle_early(squares_at);

    // 16 lanes a token tell the norm's squares, as many as peers: lane n of kRunWarps has the octets of warps n, n +
    // kRunWarps, ... Loads of 16 bytes and sums inside a lane take less time than shuffles.
    constexpr int kTellers = kTileTokens * kRanks, kPasses = (kTellers + kWarps * 32 - 1) / (kWarps * 32);
    const int first_run = (kRunWarps > 4 ? lane : t) & (kRunWarps - 1);
    int run_at[kPasses];
    unsigned int norm_slot[kPasses], norm_told[kPasses];
    if constexpr (Shape::kHasNorm) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int teller = threadIdx.x + pass * kWarps * 32, told = min(teller / kRanks, kTileTokens - 1);
        run_at[pass] = first_run * kNormSums + 4 * told;
        norm_slot[pass] = peer_address(shared_address(&norm_slots[told][rank]), teller % kRanks);
        norm_told[pass] = peer_address(shared_address(&norm_full), teller % kRanks);
        if constexpr (kRoom) settle_early(run_at[pass]), settle_early(norm_slot[pass]), settle_early(norm_told[pass]);
      }
    }

    if constexpr (Shape::kHasNorm && kRoom && !Shape::kPost) {
#pragma unroll
      for (int k = 0; k < 8; ++k) settle_early(norm_weights[k]);
    }

    // x may still be in the making: asking L2 for its lines consumes nothing, and warms the address translation.
    if (has_columns && has_token && t == 0 && Shape::has(group, t)) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) prefetch_line(from + i * hc_stride);
      if constexpr (Shape::kPost) {
        prefetch_line(a.x + 2 * (token * a.x_tokens + column));
        if (warp == 0) prefetch_line(a.h_post + token * a.h_post_tokens);
      }
    }
    cluster_wait();
    wait_for_previous_grid();

    uint4 x[kHc] = {};
    if (has_columns && has_token && Shape::has(group, t)) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) x[i] = Access::load(from + i * hc_stride);
      if constexpr (Shape::kPost) {
        float post[8], h[kHc];
        unpack<kXDtype>(Access::load(a.x + 2 * (token * a.x_tokens + column)), post);
#pragma unroll
        for (int i = 0; i < kHc; ++i) h[i] = a.h_post[token * a.h_post_tokens + i];
#pragma unroll
        for (int i = 0; i < kHc; ++i) {
          x[i] = post_octet<kXDtype>(post, x[i], h[i]);
          Access::store(a.y + 2 * (token * a.y_tokens + i * a.y_hc + column), x[i]);
        }
      }
    }
    if (has_columns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Shape::Sums sums;
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) {
          const int channel = half * Shape::kHalf + b;
          if (channel < kHc) sums.add(weights[half], b, x[channel]);
        }
        store_partials<1>(partials[2 * warp + half], sums.result(weights[half]), lane);
      }
    }
    __syncthreads();

    // The block's chunks, then its tree; the lanes of a quad's chunks share the peers to tell.
    if (warp * 32 < kTold) {
      float4 sum;
#pragma unroll
      for (int u = 0; u < Shape::kChunkUnits; ++u) {
        const float4 part = *reinterpret_cast<const float4*>(&partials[u][part_at]);
        sum = u == 0 ? part : sum + part;
      }
#pragma unroll
      for (int mask = 1; mask < kBlockChunks; mask *= 2) sum = sum + shuffle_xor(sum, mask);
      const auto tell = [&](int peer, Barrier& barrier) {
        store_peer(peer_address(slot, peer), sum, peer_address(shared_address(&barrier), peer));
      };
      if (peers == kPeers) {
#pragma unroll
        for (int j = 0; j < kPeers; ++j) tell(first_peer + j, gates_full);
      } else if (kPostQuads && peers == 1) {
        tell(0, posts_full);
      }
    }
    float values[kHc][8];  // while the sums are on their way
#pragma unroll
    for (int i = 0; i < kHc; ++i) {
      unpack<kXDtype>(x[i], values[i]);
#pragma unroll
      for (int k = 0; k < 8; ++k) settle(values[i][k]);
    }
    barrier_wait_cluster(&gates_full, 0);

    // Every warp works out the gates of its own lanes: a second block barrier would cost more.
    const auto gate_of = [&](int base, const GateScales& by) {  // base: row of A of the quad's first lane
      float4 dots = {};
      float squares = 0.0f;
      if (has_token) {
        dots =
            quarter<float4>([&](int r) { return *reinterpret_cast<const float4*>(&slots[r][dots_at + (base & 4)]); });
        squares = quarter<float>([&](int r) { return slots[r][squares_at]; });
      }
      // A lane needs its own output alone: it passes on the half of the dots that it does not, then half of the rest.
      const int part = (base + t) & 3;
      const bool odd = part & 1, upper = part & 2;
      const float low = (odd ? dots.y : dots.x) + __shfl_xor_sync(0xffffffffu, odd ? dots.x : dots.y, 1);
      const float high = (odd ? dots.w : dots.z) + __shfl_xor_sync(0xffffffffu, odd ? dots.z : dots.w, 1);
      const float dot = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
      squares = warp_tree<4>(squares);
      return by.gate<static_cast<int>(Shape::kDepth)>(dot, squares, a.norm_eps);
    };
    const auto return_gates = [&](float gate) {
      if (Shape::kOp != kHead && rank == 0 && has_token && t < kHc) a.h_next[token * a.h_next_tokens + t] = gate;
    };
    if (kPostQuads && !has_columns) {
      if (rank > 0) return;  // block 0 returns the gates
      barrier_wait_cluster(&posts_full, 0);
    }
    const float gate = gate_of(has_columns ? 0 : Shape::kPostRow, scales);
    if (!has_columns) {
      return_gates(gate);
      return;
    }
    float h[kHc], z[8];
#pragma unroll
    for (int i = 0; i < kHc; ++i) h[i] = __shfl_sync(0xffffffffu, gate, (lane & ~3) | i);
#pragma unroll
    for (int i = 0; i < kHc; ++i) add_channel(i, values[i], h[i], z);
    if constexpr (Shape::kHasNorm) {
      if constexpr (Shape::kRoundBeforeNorm) unpack<kXDtype>(pack<kXDtype>(z), z);
      norm_sums[warp][lane] = octet_squares(z);
      sync_threads<kWarps * 32>();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const unsigned int teller = threadIdx.x + pass * kWarps * 32;
        if (teller < kTellers) {
          const float* runs_of = &norm_sums[0][run_at[pass]];
          float4 runs = *reinterpret_cast<const float4*>(runs_of);
#pragma unroll
          for (int w = kRunWarps; w < kWarps; w += kRunWarps) {
            if (w + kRunWarps <= kWarps || w + first_run < kWarps)
              runs = runs + *reinterpret_cast<const float4*>(runs_of + w * kNormSums);
          }
          const float sum = warp_tree<kRunWarps>(across(runs));
          if (teller / kRanks < count) store_peer(norm_slot[pass], sum, norm_told[pass]);
        }
      }
      barrier_wait_cluster(&norm_full, 0);
      float quarters[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) quarters[k] = across(*reinterpret_cast<const float4*>(&norm_slots[g][4 * k]));
      const float sum = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
      const float inverse = norm_inverse<Shape::kHidden>(sum, a.rms_eps);
#pragma unroll
      for (int k = 0; k < 8; ++k) z[k] = z[k] * inverse * norm_weights[k];
    }
    if (has_token && Shape::has(group, t)) Access::store(to, pack<kXDtype>(z));
    if (!kGatesWarp && Shape::kOp != kHead && rank == 0 && warp == 0) {
      const GateScales next = GateScales::of<kHc>(kHc + t, t < kHc, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
      if (kPostQuads) barrier_wait_cluster(&posts_full, 0);
      return_gates(gate_of(Shape::kPostRow, next));
    }
  }
};

}  // namespace hccupy

#include "common/sm90_ihc_entry.cuh"
