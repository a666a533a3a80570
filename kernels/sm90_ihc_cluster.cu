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
  // The lanes of a quad read slots that would lie a multiple of 32 banks apart: 0.05 to 0.15 us at 1 to 16 tokens.
  static constexpr int kSlot = kPartials + 4, kNormSlot = kRanks + 4;
  static constexpr int kNormSums = 4 * kTileTokens + 8;  // of a warp: by tokens and lanes of a quad
  // The norm's squares are added in runs, every 4 kRunWarps-th octet in one: the stream kernel's lanes of a part.
  static constexpr int kRunWarps = Shape::kRanks / 2;
  static_assert(kWarps >= kRunWarps, "the first octet of every run is there");
  static_assert(kBlockChunks * Shape::kChunkUnits == kUnits, "chunks tile the units of a block");

  // Sum over the ranks of this lane's quarter, then over the quarters: the tree that the stream kernel uses too.
  template <class Value, class Read>
  static __device__ __forceinline__ Value quarter(int t, Read read) {
    const int rank = 4 * t;
    return Value{(read(rank) + read(rank + 1)) + (read(rank + 2) + read(rank + 3))};
  }

  static __device__ __forceinline__ void run(const IhcArguments& a) {
    constexpr int kHc = Shape::kHc, kXDtype = Shape::kXDtype;
    using Access = Octet<Shape::kVec>;
    __shared__ __align__(16) float partials[kUnits][kPartials];
    __shared__ __align__(16) float slots[kRanks][kSlot];
    __shared__ __align__(16) float norm_sums[Shape::kHasNorm ? kWarps : 1][kNormSums];
    __shared__ __align__(16) float norm_slots[Shape::kHasNorm ? kTileTokens : 1][kNormSlot];
    __shared__ Barrier gates_full, norm_full;

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
      barrier_init(&norm_full, 1);
      fence_barrier_init();
      barrier_expect(&gates_full, kRanks * 16 * (2 * count + 2));
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

    // x may still be in the making: asking L2 for its lines consumes nothing, and warms the address translation.
    const long long token = first + g;
    const char* from = Shape::kPost ? a.residual : a.x;
    const long long tokens_stride = Shape::kPost ? a.residual_tokens : a.x_tokens,
                    hc_stride = Shape::kPost ? a.residual_hc : a.x_hc;
    if (has_columns && has_token && t == 0 && Shape::has(group, t)) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) prefetch_line(from + 2 * (token * tokens_stride + i * hc_stride + column));
      if constexpr (Shape::kPost) {
        prefetch_line(a.x + 2 * (token * a.x_tokens + column));
        if (warp == 0) prefetch_line(a.h_post + token * a.h_post_tokens);
      }
    }
    wait_for_previous_grid();

    uint4 x[kHc] = {};
    if (has_columns && has_token && Shape::has(group, t)) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) x[i] = Access::load(from + 2 * (token * tokens_stride + i * hc_stride + column));
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
    cluster_wait();

    // The block's chunks, then its tree; the lanes of a quad's chunks share the peers to tell.
    if (warp * 32 < kQuads * kBlockChunks) {
      const int quad = min(static_cast<int>(threadIdx.x) / kBlockChunks, kQuads - 1),
                chunk = threadIdx.x % kBlockChunks;
      float4 sum;
#pragma unroll
      for (int u = 0; u < Shape::kChunkUnits; ++u) {
        const float4 part = *reinterpret_cast<const float4*>(&partials[chunk * Shape::kChunkUnits + u][4 * quad]);
        sum = u == 0 ? part : sum + part;
      }
#pragma unroll
      for (int mask = 1; mask < kBlockChunks; mask *= 2) sum = sum + shuffle_xor(sum, mask);
      const bool wanted =
          static_cast<int>(threadIdx.x) < kQuads * kBlockChunks && (quad >= 2 * kTileTokens || (quad >> 1) < count);
      if (wanted) {
        constexpr int kPeers = kRanks / kBlockChunks;
#pragma unroll
        for (int j = 0; j < kPeers; ++j) {
          const int peer = chunk * kPeers + j;
          store_peer(peer_address(shared_address(&slots[rank][4 * quad]), peer), sum,
                     peer_address(shared_address(&gates_full), peer));
        }
      }
    }
    barrier_wait_cluster(&gates_full, 0);

    // Every warp works out the gates of its own lanes: a second block barrier would cost more.
    const auto gate_of = [&](int base, const GateScales& by) {  // base: row of A of the quad's first lane
      float4 dots = {};
      float squares = 0.0f;
      if (has_token) {
        const int quad = g * kOutputs + (base & 4);
        dots = quarter<float4>(t, [&](int r) { return *reinterpret_cast<const float4*>(&slots[r][quad]); });
        squares = quarter<float>(t, [&](int r) { return slots[r][kTileTokens * kOutputs + g]; });
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
    const float gate = gate_of(has_columns ? 0 : Shape::kPostRow, scales);
    if (!has_columns) {
      return_gates(gate);
      return;
    }
    float h[kHc], z[8];
#pragma unroll
    for (int i = 0; i < kHc; ++i) h[i] = __shfl_sync(0xffffffffu, gate, (lane & ~3) | i);
    reduce_channels<kXDtype, kHc>(x, h, z);
    if constexpr (Shape::kHasNorm) {
      if constexpr (Shape::kRoundBeforeNorm) unpack<kXDtype>(pack<kXDtype>(z), z);
      norm_sums[warp][lane] = octet_squares(z);
      sync_threads<kWarps * 32>();
      // 16 lanes a token, as many as peers: lane n of kRunWarps has the octets of warps n, n + kRunWarps, ... Loads of
      // 16 bytes and sums inside a lane take less time than shuffles.
      constexpr int kTellers = kTileTokens * kRanks, kPasses = (kTellers + kWarps * 32 - 1) / (kWarps * 32);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const unsigned int teller = threadIdx.x + pass * kWarps * 32;
        if (teller < kTellers) {
          const int token_of_tile = teller / kRanks, peer = teller % kRanks,
                    first = (kRunWarps > 4 ? lane : t) & (kRunWarps - 1);
          const float* from = &norm_sums[first][4 * token_of_tile];
          float4 runs = *reinterpret_cast<const float4*>(from);
#pragma unroll
          for (int w = kRunWarps; w < kWarps; w += kRunWarps) {
            if (w + kRunWarps <= kWarps || w + first < kWarps)
              runs = runs + *reinterpret_cast<const float4*>(from + w * kNormSums);
          }
          const float sum = warp_tree<kRunWarps>(across(runs));
          if (token_of_tile < count)
            store_peer(peer_address(shared_address(&norm_slots[token_of_tile][rank]), peer), sum,
                       peer_address(shared_address(&norm_full), peer));
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
    if (has_token && Shape::has(group, t)) Access::store(a.z + 2 * (token * a.z_tokens + column), pack<kXDtype>(z));
    if (!kGatesWarp && Shape::kOp != kHead && rank == 0 && warp == 0) {
      const GateScales next = GateScales::of<kHc>(kHc + t, t < kHc, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
      return_gates(gate_of(Shape::kPostRow, next));
    }
  }
};

}  // namespace hccupy

#include "common/sm90_ihc_entry.cuh"
