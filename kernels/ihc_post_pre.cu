// iHC post of one block and pre of the next, in one pass over the channel state.
//
//   y = ihc_post(x, residual, h_post), rounded to its dtype and written
//   z, h_post_next = ihc_pre(that y, ...)
//
//   argument     shape                  dtype
//   x            [tokens, hidden]       fp32, fp16, bf16; any stride on tokens
//   residual     [tokens, hc, hidden]   as x; any stride on tokens and hc
//   h_post       [tokens, hc]           fp32; any stride on tokens
//   w            [2 * hc, hc * hidden]  fp32, packed
//   hc_scale     [2]                    fp32
//   hc_base      [2 * hc]               fp32
//   rms_weight   [hidden]               fp32, fp16, bf16; null without the norm
//   y            [tokens, hc, hidden]   as x; any stride on tokens and hc; may be residual itself, with its strides
//   z            [tokens, hidden]       as x; any stride on tokens
//   h_post_next  [tokens, hc]           fp32; any stride on tokens
//
// Baked: hc, hidden, dtypes. Run time: tokens, strides, eps.
// Launch: as ihc_pre, with the same kThreads and kRanks, which the bits of z and h_post_next depend on. May be a
// dependent launch.

#if kRanks
#include "common/ihc_tensor.cuh"
#else
#include "common/ihc_tile.cuh"
#endif

namespace hccupy {

template <typename X>
struct IhcPostArgs {
  const X* x;
  const X* residual;
  const float* h_post;
  X* y;
  long long x_stride_tokens;
  long long residual_stride_tokens;
  long long residual_stride_hc;
  long long h_post_stride_tokens;
  long long y_stride_tokens;
  long long y_stride_hc;
};

// y of one chunk and channel.
template <int kDtype>
__device__ __forceinline__ Pack<kDtype, kChunk> post_chunk(float gate, const float (&added)[kChunk],
                                                           const Pack<kDtype, kChunk>& residual) {
  float values[kChunk];
  residual.to_floats(values);
#pragma unroll
  for (int e = 0; e < kChunk; ++e) values[e] = ihc_post_element(gate, added[e], values[e]);
  return Pack<kDtype, kChunk>::from_floats(values);
}

#if kRanks

// Writes y and stages it, a chunk of all channels at a time. It is read (as residual) by the thread that writes it,
// before it does.
template <class Config, typename X>
__device__ __forceinline__ void post_and_stage(const IhcTensor<Config>& tile, const IhcPostArgs<X>& args) {
  using Tile = IhcTensor<Config>;
  using Chunk = typename Tile::Chunk;
#pragma unroll 1
  for (int item = threadIdx.x; item < tile.tokens * Tile::kBlockChunks; item += Config::threads) {
    const int token = item / Tile::kBlockChunks, own = item % Tile::kBlockChunks, chunk = tile.first_chunk + own;
    const long long n = tile.first_token + token;
    const bool inside = chunk < Tile::kChunks;
    Chunk state[Config::hc], input = Chunk::zeros();
    float gates[Config::hc], added[kChunk];
#pragma unroll
    for (int channel = 0; channel < Config::hc; ++channel) {
      const X* row = args.residual + n * args.residual_stride_tokens + channel * args.residual_stride_hc;
      state[channel] = Chunk::zeros();
      if (inside) state[channel] = load_chunk<Config::x_dtype, Config::vec, Config::hidden, Reader::kOnce>(row, chunk);
      gates[channel] = args.h_post[n * args.h_post_stride_tokens + channel];
    }
    if (inside) {
      input = load_chunk<Config::x_dtype, Config::vec, Config::hidden, Reader::kOnce>(args.x + n * args.x_stride_tokens,
                                                                                      chunk);
    }
    input.to_floats(added);
#pragma unroll
    for (int channel = 0; channel < Config::hc; ++channel) {
      const Chunk result = inside ? post_chunk<Config::x_dtype>(gates[channel], added, state[channel]) : Chunk::zeros();
      X* row = args.y + n * args.y_stride_tokens + channel * args.y_stride_hc;
      if (inside) store_chunk<Config::x_dtype, Config::vec, Config::hidden>(row, chunk, result);
      result.store(Tile::slot(token, channel, own));
    }
  }
}

#else

// Writes y and stages it: the loads of a group of tokens are in flight before the first store. A chunk of y is read
// (as residual) by the thread that writes it, before it does.
template <class Config, typename X>
__device__ __forceinline__ void post_and_stage(const IhcTile<Config>& tile, const IhcPostArgs<X>& args) {
  using Tile = IhcTile<Config>;
  using Chunk = typename Tile::Chunk;
  constexpr int kGroup = tokens_in_flight(Config::tokens, (Config::hc + 1) * static_cast<int>(sizeof(Chunk)), 160);
  constexpr int kGroups = Config::tokens / kGroup;
#pragma unroll 1
  for (int step = 0; step < Tile::kPasses * kGroups; ++step) {
    const int pass = step / kGroups;
    const int first = step % kGroups * kGroup;
    const int chunk = Tile::chunk_of(pass);
    if (chunk >= Tile::kChunks) break;
    Chunk input[kGroup];
    Chunk state[kGroup][Config::hc];
    float gates[kGroup][Config::hc];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const long long n = tile.clamped(first + k);
      const X* row = args.residual + n * args.residual_stride_tokens;
#pragma unroll
      for (int channel = 0; channel < Config::hc; ++channel) {
        state[k][channel] = load_chunk<Config::x_dtype, Config::vec, Config::hidden, Reader::kOnce>(
            row + channel * args.residual_stride_hc, chunk);
        gates[k][channel] = args.h_post[n * args.h_post_stride_tokens + channel];
      }
      input[k] = load_chunk<Config::x_dtype, Config::vec, Config::hidden, Reader::kOnce>(
          args.x + n * args.x_stride_tokens, chunk);
    }
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const long long n = tile.clamped(first + k);
      float added[kChunk];
      input[k].to_floats(added);
#pragma unroll
      for (int channel = 0; channel < Config::hc; ++channel) {
        const Chunk result = post_chunk<Config::x_dtype>(gates[k][channel], added, state[k][channel]);
        if (tile.exists(first + k)) {
          X* row = args.y + n * args.y_stride_tokens + channel * args.y_stride_hc;
          store_chunk<Config::x_dtype, Config::vec, Config::hidden>(row, chunk, result);
        }
        if constexpr (Config::staged) result.store(Tile::slot(first + k, channel, pass));
      }
    }
  }
  // Unstaged rows are read again from y by load_once, which the compiler may not see as reading it.
  if constexpr (!Config::staged) __syncthreads();
}

#endif

template <class Config, typename X>
__device__ __forceinline__ void ihc_post_pre_body(const IhcPostArgs<X>& post, const IhcPreArgs<Config>& pre,
                                                  int tokens) {
#if kRanks
  IhcTensor<Config>::run(pre, tokens, [&](const auto& tile) { post_and_stage(tile, post); });
#else
  let_next_grid_start();
  prefetch_to_l2<Config::threads>(pre.w, static_cast<long long>(Config::gates) * Config::hc * Config::hidden * 4);
  wait_for_previous_grid();

  const IhcTile<Config> tile{post.y, post.y_stride_tokens, post.y_stride_hc,
                             static_cast<long long>(blockIdx.x) * Config::tokens, tokens};
  post_and_stage(tile, post);
  ihc_pre_tile(tile, pre);
#endif
}

}  // namespace hccupy

using X = hccupy::Element<kXDtype>::Type;
using R = hccupy::Element<kRmsWeightDtype>::Type;

struct Config {
  static constexpr int x_dtype = kXDtype, hc = kHc, hidden = kHidden, gates = 2 * kHc;
  static constexpr bool has_rms_weight = kHasRmsWeight, round_before_norm = kRoundBeforeNorm;
  static constexpr int rms_weight_dtype = kRmsWeightDtype;
  static constexpr int vec = kVec, weight_vec = kWeightVec, threads = kThreads;
#if kRanks
  static constexpr int ranks = kRanks;
#else
  static constexpr int tokens = kTileTokens;
  static constexpr bool staged = kStaged;
#endif
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    ihc_post_pre(const X* x, const X* residual, const float* h_post, const float* w, const float* hc_scale,
                 const float* hc_base, const R* rms_weight, X* y, X* z, float* h_post_next, long long x_stride_tokens,
                 long long residual_stride_tokens, long long residual_stride_hc, long long h_post_stride_tokens,
                 long long y_stride_tokens, long long y_stride_hc, long long z_stride_tokens,
                 long long h_post_next_stride_tokens, float norm_eps, float hc_eps, float magnitude, float rms_eps,
                 int tokens) {
  hccupy::ihc_post_pre_body<Config, X>({x, residual, h_post, y, x_stride_tokens, residual_stride_tokens,
                                        residual_stride_hc, h_post_stride_tokens, y_stride_tokens, y_stride_hc},
                                       {w, hc_scale, hc_base, rms_weight, z, h_post_next, z_stride_tokens,
                                        h_post_next_stride_tokens, norm_eps, hc_eps, magnitude, rms_eps},
                                       tokens);
}
