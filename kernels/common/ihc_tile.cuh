// A tile of iHC tokens in one block: everything that pre, head and post_pre do once the channel rows are there.
//
// A channel row is cut into chunks of 8 elements. Thread t owns chunks t, t + kBlockThreads, ... of every channel of
// every token of the tile: it loads them, multiplies them with w, mixes them and stores the result, so the rows
// staged in shared memory are private to their thread and need no barrier.
//
// Order of the sums, the same for every launch of one (hc, hidden): the elements of a chunk, the chunks of a thread,
// the lanes of a warp, the warps of the block; all but the first carry the lost bits along (WideSum), because the
// gates must be right also when thousands of large terms cancel. Access size,
// tile size and staging change how elements travel, never what is added to what: a token's bits do not depend on them.
#pragma once

#include "common/ihc.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"

namespace hccupy {

constexpr int kChunk = 8;

enum class Reader { kOnce, kShared };  // which load of ptx.cuh

// Chunk `chunk` of a row of kLength elements, in accesses of kSize elements; zeros behind the end of the row.
template <int kDtype, int kSize, int kLength, Reader kReader>
__device__ __forceinline__ Pack<kDtype, kChunk> load_chunk(const typename Element<kDtype>::Type* row, int chunk) {
  static_assert(kLength % kSize == 0, "an access must not straddle the end of the row");
  using Part = Pack<kDtype, kSize>;
  Pack<kDtype, kChunk> result;
#pragma unroll
  for (int first = 0; first < kChunk; first += kSize) {
    const int element = chunk * kChunk + first;
    Part part = Part::zeros();
    if (kLength % kChunk == 0 || element < kLength) {
      part = kReader == Reader::kOnce ? Part::load_once(row + element) : Part::load_shared(row + element);
    }
    memcpy(reinterpret_cast<char*>(result.words) + first * sizeof(*row), part.words, sizeof part.words);
  }
  return result;
}

template <int kDtype, int kSize, int kLength>
__device__ __forceinline__ void store_chunk(typename Element<kDtype>::Type* row, int chunk,
                                            const Pack<kDtype, kChunk>& values) {
  using Part = Pack<kDtype, kSize>;
#pragma unroll
  for (int first = 0; first < kChunk; first += kSize) {
    const int element = chunk * kChunk + first;
    Part part;
    memcpy(part.words, reinterpret_cast<const char*>(values.words) + first * sizeof(*row), sizeof part.words);
    if (kLength % kChunk == 0 || element < kLength) part.store_whole(row + element);
  }
}

// Tokens whose rows a thread loads at once: as many as fit `limit` bytes of registers, a divisor of `tokens`.
__device__ constexpr int tokens_in_flight(int tokens, int bytes_each, int limit) {
  while (tokens % 2 == 0 && tokens * bytes_each > limit) tokens /= 2;
  return tokens;
}

__device__ __forceinline__ float dot_product(const float (&a)[kChunk], const float (&b)[kChunk]) {
  float dot = a[0] * b[0];
#pragma unroll
  for (int k = 1; k < kChunk; ++k) dot = fmaf(a[k], b[k], dot);
  return dot;
}

// Mixed channels of one chunk, in fp32 or, as the unfused pair would have them, rounded to the dtype.
template <int kDtype, int kChannels, bool kRound, class Read>
__device__ __forceinline__ void mix_channels(Read read, const float (&h_pre)[kChannels], float (&mixed)[kChunk]) {
  float channels[kChannels][kChunk];
#pragma unroll
  for (int channel = 0; channel < kChannels; ++channel) read(channel).to_floats(channels[channel]);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    float column[kChannels];
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) column[channel] = channels[channel][k];
    mixed[k] = ihc_mix<kChannels>(h_pre, column);
  }
  if constexpr (kRound) Pack<kDtype, kChunk>::from_floats(mixed).to_floats(mixed);
}

// Config holds the baked values under the names of the axes (the k names are macros of the command line):
//   x_dtype, hc, hidden
//   gates            rows of w: 2 * hc (pre gates, then post gates), or hc (pre gates only)
//   has_rms_weight, rms_weight_dtype, round_before_norm
//   vec, weight_vec  elements per access of x, y and rms_weight; of w
//   threads, tokens  of a block: w is fetched once for all its tokens
//   staged           rows are kept in shared memory; otherwise they are read again from L2
template <class Config>
struct IhcTile {
  static_assert(Config::hc >= 1 && Config::hc <= 8, "hc is 1 to 8");
  static_assert(Config::threads % 32 == 0, "a block is whole warps");
  static_assert(Config::tokens == 1 || Config::tokens == 2 || Config::tokens == 4, "a tile is 1, 2 or 4 tokens");
  static constexpr int kDtype = Config::x_dtype;
  static constexpr int kChannels = Config::hc;
  static constexpr int kLength = Config::hidden;
  static constexpr int kGates = Config::gates;
  static constexpr int kSize = Config::vec;
  static constexpr int kBlockThreads = Config::threads;
  static constexpr int kTile = Config::tokens;
  using X = typename Element<kDtype>::Type;
  using Chunk = Pack<kDtype, kChunk>;
  static constexpr int kChunks = (kLength + kChunk - 1) / kChunk;
  static constexpr int kPasses = (kChunks + kBlockThreads - 1) / kBlockThreads;
  static constexpr int kWarps = kBlockThreads / 32;
  static constexpr int kSums = kGates + 1;  // per token: the dot products, then the sum of squares

  const X* rows;  // channel rows in global memory, for the unstaged case
  long long stride_tokens;
  long long stride_hc;
  long long first_token;
  int tokens;

  __device__ __forceinline__ bool exists(int token) const { return first_token + token < tokens; }

  // A token behind the last reads the last one's row; nothing is stored for it.
  __device__ __forceinline__ long long clamped(int token) const {
    return exists(token) ? first_token + token : tokens - 1LL;
  }

  static __device__ __forceinline__ int chunk_of(int pass) {
    return pass * kBlockThreads + static_cast<int>(threadIdx.x);
  }

  static __device__ __forceinline__ char* slot(int token, int channel, int pass) {
    return reinterpret_cast<char*>(shared_bytes) +
           (((token * kChannels + channel) * kPasses + pass) * kBlockThreads + static_cast<int>(threadIdx.x)) *
               static_cast<int>(sizeof(Chunk));
  }

  __device__ __forceinline__ Chunk read_global(int token, int channel, int pass) const {
    const X* row = rows + clamped(token) * stride_tokens + channel * stride_hc;
    return load_chunk<kDtype, kSize, kLength, Reader::kOnce>(row, chunk_of(pass));
  }

  __device__ __forceinline__ Chunk read(int token, int channel, int pass) const {
    if constexpr (Config::staged) {
      return Chunk::load(slot(token, channel, pass));
    } else {
      return read_global(token, channel, pass);
    }
  }

  // The loads of a group of tokens are in flight before the first of them is stored.
  __device__ __forceinline__ void stage() const {
    constexpr int kGroup = tokens_in_flight(kTile, kChannels * static_cast<int>(sizeof(Chunk)), 256);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (chunk_of(pass) >= kChunks) break;
#pragma unroll 1
      for (int first = 0; first < kTile; first += kGroup) {
        Chunk chunks[kGroup][kChannels];
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
#pragma unroll
          for (int channel = 0; channel < kChannels; ++channel)
            chunks[k][channel] = read_global(first + k, channel, pass);
        }
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
#pragma unroll
          for (int channel = 0; channel < kChannels; ++channel)
            chunks[k][channel].store(slot(first + k, channel, pass));
        }
      }
    }
  }

  // sums[token * kSums + gate] += x . w[gate]; the last of a token's kSums is its sum of squares. This thread's share.
  __device__ __forceinline__ void multiply(const float* w, WideSum (&sums)[kTile * kSums]) const {
#pragma unroll
    for (int k = 0; k < kTile * kSums; ++k) sums[k] = {0.0f, 0.0f};
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (chunk_of(pass) >= kChunks) break;
#pragma unroll 1
      for (int channel = 0; channel < kChannels; ++channel) {
        float values[kTile][kChunk];
#pragma unroll
        for (int token = 0; token < kTile; ++token) {
          read(token, channel, pass).to_floats(values[token]);
          sums[token * kSums + kGates].sum += dot_product(values[token], values[token]);
        }
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          float weights[kChunk];
          const float* row = w + (gate * kChannels + channel) * kLength;
          load_chunk<kFloat32, Config::weight_vec, kLength, Reader::kShared>(row, chunk_of(pass)).to_floats(weights);
#pragma unroll
          for (int token = 0; token < kTile; ++token) {
            sums[token * kSums + gate].add_compensated(dot_product(values[token], weights));
          }
        }
      }
    }
  }

  template <bool kRound>
  __device__ __forceinline__ void mix(int token, int pass, const float (&h_pre)[kChannels],
                                      float (&mixed)[kChunk]) const {
    mix_channels<kDtype, kChannels, kRound>([&](int channel) { return read(token, channel, pass); }, h_pre, mixed);
  }
};

// What pre, head and the second half of post_pre are given.
template <class Config>
struct IhcPreArgs {
  const float* w;
  const float* hc_scale;
  const float* hc_base;
  const typename Element<Config::rms_weight_dtype>::Type* rms_weight;
  typename Element<Config::x_dtype>::Type* y;
  float* h_post;  // not touched by head
  long long y_stride_tokens;
  long long h_post_stride_tokens;
  float norm_eps;
  float hc_eps;
  float magnitude;
  float rms_eps;
};

// The gate `gate` of a token with such sums.
template <class Config>
__device__ __forceinline__ float gate_of(const IhcPreArgs<Config>& args, int gate, WideSum dot, WideSum squares) {
  const bool is_pre = gate < Config::hc;
  const float inverse = inverse_rms(squares.rounded(), static_cast<float>(Config::hc) * Config::hidden, args.norm_eps);
  return ihc_gate(dot.rounded(), inverse, args.hc_scale[is_pre ? 0 : 1], args.hc_base[gate],
                  is_pre ? 1.0f : args.magnitude, args.hc_eps);
}

// Mixed channels of one chunk to their row of y, normalised if asked.
template <class Config>
__device__ __forceinline__ void store_mixed(const IhcPreArgs<Config>& args, long long token, int chunk, float inverse,
                                            float (&mixed)[kChunk]) {
  if constexpr (Config::has_rms_weight) {
    float weights[kChunk];
    load_chunk<Config::rms_weight_dtype, Config::vec, Config::hidden, Reader::kShared>(args.rms_weight, chunk)
        .to_floats(weights);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) mixed[k] = mixed[k] * inverse * weights[k];
  }
  store_chunk<Config::x_dtype, Config::vec, Config::hidden>(args.y + token * args.y_stride_tokens, chunk,
                                                            Pack<Config::x_dtype, kChunk>::from_floats(mixed));
}

// Bring this block's share of w, and the norm weight, to L2: 128-byte lines dealt out over the grid.
template <int kBlockThreads>
__device__ __forceinline__ void prefetch_to_l2(const void* from, long long bytes) {
  for (long long line = static_cast<long long>(blockIdx.x) * kBlockThreads + threadIdx.x; line * 128 < bytes;
       line += static_cast<long long>(gridDim.x) * kBlockThreads) {
    prefetch_line(static_cast<const char*>(from) + line * 128);
  }
}

// Gates, mix and folded norm of a tile whose rows are staged (or lie in global memory).
template <class Config>
__device__ __forceinline__ void ihc_pre_tile(const IhcTile<Config>& tile, const IhcPreArgs<Config>& args) {
  using Tile = IhcTile<Config>;
  constexpr int kSums = Tile::kSums;
  constexpr int kTile = Tile::kTile;
  constexpr int kGates = Tile::kGates;
  constexpr int kChannels = Tile::kChannels;
  constexpr int kLength = Tile::kLength;
  constexpr bool kRoundMix = Config::has_rms_weight && Config::round_before_norm;
  __shared__ WideSum warp_totals[Tile::kWarps][kTile * kSums];
  __shared__ float pre_gates[kTile][kChannels];
  __shared__ float warp_squares[kTile][Tile::kWarps];
  const int warp = threadIdx.x / 32;

  WideSum sums[kTile * kSums];
  tile.multiply(args.w, sums);
  warp_sums(sums, warp_totals[warp]);
  __syncthreads();

  // One thread a gate.
  for (int k = threadIdx.x; k < kTile * kGates; k += Config::threads) {
    const int token = k / kGates;
    const int gate = k % kGates;
    WideSum dot{0.0f, 0.0f};
    WideSum squares{0.0f, 0.0f};
#pragma unroll 1
    for (int from = 0; from < Tile::kWarps; ++from) {
      dot = dot + warp_totals[from][token * kSums + gate];
      squares = squares + warp_totals[from][token * kSums + kGates];
    }
    const float value = gate_of(args, gate, dot, squares);
    if (gate < kChannels) {
      pre_gates[token][gate] = value;
    } else if (tile.exists(token)) {
      args.h_post[(tile.first_token + token) * args.h_post_stride_tokens + gate - kChannels] = value;
    }
  }
  __syncthreads();

  // Sum of squares of the mix. It is mixed again below: cheaper than keeping it.
  if constexpr (Config::has_rms_weight) {
#pragma unroll 1
    for (int token = 0; token < kTile; ++token) {
      float squares = 0.0f;
#pragma unroll 1
      for (int pass = 0; pass < Tile::kPasses; ++pass) {
        if (Tile::chunk_of(pass) >= Tile::kChunks) break;
        float mixed[kChunk];
        tile.template mix<kRoundMix>(token, pass, pre_gates[token], mixed);
#pragma unroll
        for (int k = 0; k < kChunk; ++k) squares = fmaf(mixed[k], mixed[k], squares);
      }
      squares = warp_sum(squares);
      if (threadIdx.x % 32 == 0) warp_squares[token][warp] = squares;
    }
    __syncthreads();
  }

#pragma unroll 1
  for (int token = 0; token < kTile; ++token) {
    if (!tile.exists(token)) break;
    float inverse = 1.0f;
    if constexpr (Config::has_rms_weight) {
      float squares = 0.0f;
#pragma unroll
      for (int from = 0; from < Tile::kWarps; ++from) squares += warp_squares[token][from];
      inverse = inverse_rms(squares, kLength, args.rms_eps);
    }
#pragma unroll 1
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      const int chunk = Tile::chunk_of(pass);
      if (chunk >= Tile::kChunks) break;
      float mixed[kChunk];
      tile.template mix<kRoundMix>(token, pass, pre_gates[token], mixed);
      store_mixed(args, tile.first_token + token, chunk, inverse, mixed);
    }
  }
}

}  // namespace hccupy
