// A tile of up to 8 iHC tokens in a cluster of blocks, its dots by tensor cores: pre, head and post_pre on sm_90 and
// newer, any hc and hidden, float32 too (sm90_ihc*.cuh has faster kernels for a few widths).
//
// Each block owns a run of columns of every channel: it stages them in its shared memory, multiplies them with w, gets
// the other blocks' sums, works out the gates as they all do, and mixes its columns. w comes from L2 once for a tile.
//
// Order of the sums, the same for every launch of one (hc, hidden, dtype, architecture): a unit is 64 columns of one
// channel, in one chain of mma from zero; then the units of a warp, the warps of a block, the blocks of the cluster,
// all of them compensated (WideSum). A token is a column of the mma: its bits do not depend on the others.
//
// Operands. The order of k is free, so lane (g, t) = (lane / 4, lane % 4) takes chunks t and t + 4 of the unit: 8
// neighbouring columns of token g, and of gate g of w, are the operands of four steps. w = high + low, both of 11 bits
// and in the rows 0-7 and 8-15 of one operand: off by at most 2^-24 of w. x of 16 bits is exact, float32 is cut in the
// same way.
#pragma once

#include "common/ihc_tile.cuh"

namespace hccupy {

// value = high + low, to 2^-24: high is the nearest of 11 bits, and tensor cores read 11 bits of low.
__device__ __forceinline__ void split_for_tf32(float value, float& high, float& low) {
  high = float_from_bits((float_bits(value) + 0x1000u) & 0xffffe000u);
  low = value - high;
}

// Config as for IhcTile without tokens and staged, and
//   ranks            blocks of a cluster; cluster c of n takes tokens [c * N / n, (c + 1) * N / n) of N, at most 8
template <class Config>
struct IhcTensor {
  static_assert(Config::hc >= 1 && Config::hc <= 8, "hc is 1 to 8");
  static constexpr int kDtype = Config::x_dtype;
  static constexpr int kChannels = Config::hc;
  static constexpr int kLength = Config::hidden;
  static constexpr int kGates = Config::gates;
  static constexpr int kSize = Config::vec;
  static constexpr int kClusterBlocks = Config::ranks;
  static constexpr int kBlockThreads = Config::threads;
  static constexpr int kTile = 8;
  using X = typename Element<kDtype>::Type;
  using Chunk = Pack<kDtype, kChunk>;
  static constexpr int kChunks = (kLength + kChunk - 1) / kChunk;
  static constexpr int kRowUnits = ((kChunks + 7) / 8 + kClusterBlocks - 1) / kClusterBlocks;  // of a channel and block
  static constexpr int kBlockChunks = 8 * kRowUnits;
  static constexpr int kUnits = kRowUnits * kChannels;  // of a block
  static constexpr bool kWholeUnits = kChunks * kChunk == kLength && kBlockChunks * kClusterBlocks == kChunks;
  static constexpr int kWarps = kBlockThreads / 32;
  static constexpr int kPanels = (kGates + 7) / 8;
  static constexpr int kSums = kGates + 1;  // per token: the dot products, then the sum of squares
  static constexpr bool kCut = kDtype == kFloat32;
  static constexpr int kChunkBytes = static_cast<int>(sizeof(Chunk));
  // Rows of tokens lie half a wavefront of the loads in multiply() apart: no bank conflicts.
  static constexpr int kTokenBytes = kChannels * kBlockChunks * kChunkBytes + (kCut ? 16 : 64);

  struct Shared {
    WideSum of_warps[kWarps][kTile * kSums];
    WideSum of_block[kTile * kSums];
    float2 norm_squares[kTile];
    float pre_gates[kTile][kChannels];
  };

  Shared& shared;
  int rank;
  int warp;
  int lane;
  int first_chunk;  // of this block
  int tokens;       // of this tile
  long long first_token;

  static __device__ __forceinline__ char* slot(int token, int channel, int chunk) {
    return reinterpret_cast<char*>(shared_bytes) + token * kTokenBytes + (channel * kBlockChunks + chunk) * kChunkBytes;
  }

  static __device__ __forceinline__ void sync_blocks() {
    if constexpr (kClusterBlocks > 1) {
      sync_cluster();
    } else {
      __syncthreads();
    }
  }

  // Rows of x to shared memory, zeros behind their ends; everything is in flight at once.
  __device__ __forceinline__ void stage(const X* x, long long stride_tokens, long long stride_hc) const {
    constexpr int kBytes = kSize * static_cast<int>(sizeof(X));
    const int count = tokens * kChannels * kBlockChunks;
#pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x); item < count; item += kBlockThreads) {
      const int row = item / kBlockChunks, own = item % kBlockChunks, chunk = first_chunk + own;
      const X* from = x + (first_token + row / kChannels) * stride_tokens + row % kChannels * stride_hc;
      char* to = slot(row / kChannels, row % kChannels, own);
      if constexpr (kBytes < 4) {  // no asynchronous copy is as small
        (chunk < kChunks ? load_chunk<kDtype, kSize, kLength, Reader::kOnce>(from, chunk) : Chunk::zeros()).store(to);
      } else {
        constexpr int kAccess = kBytes < 16 ? kBytes : 16;
#pragma unroll
        for (int at = 0; at < kChunkBytes; at += kAccess) {
          const int element = chunk * kChunk + at / static_cast<int>(sizeof(X));
          if (element < kLength) {
            async_copy<kAccess>(to + at, from + element);
          } else {
            memset(to + at, 0, kAccess);
          }
        }
      }
    }
    async_commit();
    async_wait<0>();
  }

  // The 8 weights at `from`; zeros where the row has ended `left` elements behind it.
  static __device__ __forceinline__ void load_weights(const float* from, int left, float (&weights)[kChunk]) {
    using Part = Pack<kFloat32, Config::weight_vec>;
#pragma unroll
    for (int first = 0; first < kChunk; first += Config::weight_vec) {
      Part part = Part::zeros();
      if (kWholeUnits || first < left) part = Part::load_shared(from + first);
#pragma unroll
      for (int k = 0; k < Config::weight_vec; ++k) weights[first + k] = part.at(k);
    }
  }

  // The warp's sums of x . w and of squares, to shared memory. A unit is two halves: the weights of the one arrive
  // while the other is multiplied.
  __device__ __forceinline__ void multiply(const float* w) const {
    constexpr int kHalf = 4 * kChunk;
    const int first = (first_chunk + lane % 4) * kChunk;
    const float* rows[kPanels];
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {  // lanes without a gate have another's, and nobody asks for it
      const int gate = min(panel * 8 + lane / 4, kGates - 1);
      rows[panel] = w + static_cast<long long>(gate) * kChannels * kLength + first;
    }
    float weights[2][kPanels][kChunk];
    const auto load_half = [&](int unit, int half) {
      const int place = unit % kRowUnits * (2 * kHalf) + half * kHalf, offset = unit / kRowUnits * kLength + place;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        load_weights(rows[panel] + offset, kLength - first - place, weights[half][panel]);
    };

    WideSum dots[kPanels][2] = {}, squares = {};
    const char* const row_of_x = slot(min(lane / 4, tokens - 1), 0, lane % 4);
    load_half(min(warp, kUnits - 1), 0);
#pragma unroll 1
    for (int unit = warp; unit < kUnits; unit += kWarps) {
      float sums[kPanels][4] = {}, small[kPanels][4] = {}, square = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 0) {
          load_half(unit, 1);
        } else {
          load_half(min(unit + kWarps, kUnits - 1), 0);
        }
        float values[kChunk];
        Chunk::load(row_of_x + (unit * 8 + half * 4) * kChunkBytes).to_floats(values);
        square += dot_product(values, values);
#pragma unroll
        for (int step = 0; step < kChunk; step += 2) {
          float b[2] = {values[step], values[step + 1]}, b_low[2];
          if constexpr (kCut) {
            split_for_tf32(values[step], b[0], b_low[0]);
            split_for_tf32(values[step + 1], b[1], b_low[1]);
          }
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            float a[4];
            split_for_tf32(weights[half][panel][step], a[0], a[1]);
            split_for_tf32(weights[half][panel][step + 1], a[2], a[3]);
            mma_tf32(sums[panel], a, b);
            if constexpr (kCut) mma_tf32(small[panel], a, b_low);
          }
        }
      }
      squares = squares +
                WideSum{square, 0.0f};  // not by Kahan's step: squares may overflow, and their sum is then Inf, not NaN
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float low = sums[panel][2 + j];
          if constexpr (kCut) low += small[panel][j];
          dots[panel][j].add_compensated(low + sums[panel][j]);
        }
      }
    }

#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int gate = panel * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (gate < kGates) shared.of_warps[warp][(2 * (lane % 4) + j) * kSums + gate] = dots[panel][j];
      }
    }
    squares = squares + shuffle_xor(squares, 2);
    squares = squares + shuffle_xor(squares, 1);
    if (lane % 4 == 0) shared.of_warps[warp][lane / 4 * kSums + kGates] = squares;
  }

  // Sum `which` of the token over the blocks.
  __device__ __forceinline__ WideSum of_cluster(int which) const {
    WideSum sum{0.0f, 0.0f};
#pragma unroll
    for (int from = 0; from < kClusterBlocks; ++from) {
      const float2 part = load_of_block(reinterpret_cast<const float2*>(&shared.of_block[which]), from);
      sum = sum + WideSum{part.x, part.y};
    }
    return sum;
  }

  __device__ __forceinline__ void gates(const IhcPreArgs<Config>& args) const {
    for (int k = threadIdx.x; k < kTile * kSums; k += kBlockThreads) {
      WideSum sum{0.0f, 0.0f};
#pragma unroll
      for (int from = 0; from < kWarps; ++from) sum = sum + shared.of_warps[from][k];
      shared.of_block[k] = sum;
    }
    sync_blocks();
    for (int k = threadIdx.x; k < tokens * kGates; k += kBlockThreads) {
      const int token = k / kGates, gate = k % kGates;
      const float value = gate_of(args, gate, of_cluster(token * kSums + gate), of_cluster(token * kSums + kGates));
      if (gate < kChannels) {
        shared.pre_gates[token][gate] = value;
      } else if (rank == 0) {
        args.h_post[(first_token + token) * args.h_post_stride_tokens + gate - kChannels] = value;
      }
    }
    __syncthreads();
  }

  template <bool kRound>
  __device__ __forceinline__ void mix(int token, int own, const float (&h_pre)[kChannels],
                                      float (&mixed)[kChunk]) const {
    mix_channels<kDtype, kChannels, kRound>([&](int channel) { return Chunk::load(slot(token, channel, own)); }, h_pre,
                                            mixed);
  }

  __device__ __forceinline__ void read_gates(int token, float (&h_pre)[kChannels]) const {
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) h_pre[channel] = shared.pre_gates[token][channel];
  }

  // A warp a token. With the norm the squares of the mix first; it is mixed again below: cheaper than keeping it.
  __device__ __forceinline__ void apply(const IhcPreArgs<Config>& args) const {
    constexpr bool kRoundMix = Config::has_rms_weight && Config::round_before_norm;
    if constexpr (Config::has_rms_weight) {
#pragma unroll 1
      for (int token = warp; token < tokens; token += kWarps) {
        float h_pre[kChannels], squares = 0.0f;
        read_gates(token, h_pre);
#pragma unroll 1
        for (int chunk = lane; chunk < kBlockChunks; chunk += 32) {
          float mixed[kChunk];
          mix<kRoundMix>(token, chunk, h_pre, mixed);
#pragma unroll
          for (int k = 0; k < kChunk; ++k) squares = fmaf(mixed[k], mixed[k], squares);
        }
        squares = warp_sum(squares);
        if (lane == 0) shared.norm_squares[token] = float2{squares, 0.0f};
      }
      sync_blocks();
    }
#pragma unroll 1
    for (int token = warp; token < tokens; token += kWarps) {
      float h_pre[kChannels], inverse = 1.0f;
      read_gates(token, h_pre);
      if constexpr (Config::has_rms_weight) {
        float squares = 0.0f;
#pragma unroll
        for (int from = 0; from < kClusterBlocks; ++from) squares += load_of_block(&shared.norm_squares[token], from).x;
        inverse = inverse_rms(squares, kLength, args.rms_eps);
      }
#pragma unroll 1
      for (int own = lane; own < kBlockChunks && first_chunk + own < kChunks; own += 32) {
        float mixed[kChunk];
        mix<kRoundMix>(token, own, h_pre, mixed);
        store_mixed(args, first_token + token, first_chunk + own, inverse, mixed);
      }
    }
  }

  // stage_rows(tile) puts the tile's rows into its slots.
  template <class StageRows>
  static __device__ __forceinline__ void run(const IhcPreArgs<Config>& args, int all_tokens, StageRows stage_rows) {
    __shared__ Shared shared;
    let_next_grid_start();
    prefetch_to_l2<kBlockThreads>(args.w, static_cast<long long>(kGates) * kChannels * kLength * 4);
    wait_for_previous_grid();

    const int rank = block_in_cluster();
    const long long cluster = blockIdx.x / kClusterBlocks, clusters = gridDim.x / kClusterBlocks;
    const long long first = all_tokens * cluster / clusters;
    const IhcTensor tile{shared,
                         rank,
                         static_cast<int>(threadIdx.x) / 32,
                         static_cast<int>(threadIdx.x) % 32,
                         rank * kBlockChunks,
                         static_cast<int>(all_tokens * (cluster + 1) / clusters - first),
                         first};
    stage_rows(tile);
    __syncthreads();
    tile.multiply(args.w);
    __syncthreads();
    tile.gates(args);
    tile.apply(args);
    if constexpr (kClusterBlocks > 1) sync_blocks();  // others may still read this block's sums
  }
};

}  // namespace hccupy
