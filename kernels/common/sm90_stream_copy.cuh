// The streaming iHC kernel's copies: x into the ring of stages, post_pre's y out of it.
#pragma once

#include "common/sm90_stream.cuh"

namespace hccupy {

struct StreamCopy : StreamLayout {
  static constexpr int kTileRows = kTileTokens * kHc;
  static_assert(kTileRows <= 32 || kShortRows, "longer rows are copied a lane each");

  // One row of kRowBytes by the whole warp, for memory that bulk copies cannot reach.
  __device__ __forceinline__ void copy_row(char* to, const char* from) const {
    using Word = typename WordOf<2 * kVec>::Type;
    constexpr int kWords = kRowBytes / (2 * kVec);
    constexpr bool kEven = kRanks == 8 && kColumns < 896 && kWords % 32 == 0;
    constexpr int kAtOnce = kEven ? 8 : kVec == 4 ? 2 : 4;  // more spill
#pragma unroll kAtOnce
    for (int k = lane; k < kWords; k += 32) reinterpret_cast<Word*>(to)[k] = reinterpret_cast<const Word*>(from)[k];
  }

  // copy(token, channel) for the rows of a tile: a row a lane, or all (of every step-th token from `first` on) by one
  // lane. The compiler puts a loop over the lanes around a bulk copy, 70 cycles a copy and 1.1 us a tile, unless one
  // lane asks for it that elect.sync has named. Short rows wait for that (hidden 4096, 16384 tokens: 208 -> 176 us); at
  // 6144 the bytes take longer, and copies that come slower are even better (512 tokens 12.6, by one lane 14.5).
  template <class Copy>
  __device__ __forceinline__ void each_row(int first, int step, int count, Copy copy) const {
    if constexpr (kShortRows) {
      if (elect_lane()) {
#pragma unroll 1
        for (int token = first; token < count; token += step) {
#pragma unroll
          for (int channel = 0; channel < kHc; ++channel) copy(token, channel);
        }
      }
    } else if (lane / kHc < count) {
      copy(lane / kHc, lane % kHc);
    }
  }

  struct Source {
    const char* rows;
    long long token_stride, hc_stride;
    __device__ __forceinline__ Source(const IhcArguments& a, int rank)
        : rows((kPost ? a.residual : a.x) + 2LL * rank * kColumns),
          token_stride(2 * (kPost ? a.residual_tokens : a.x_tokens)),
          hc_stride(2 * (kPost ? a.residual_hc : a.x_hc)) {}
    __device__ __forceinline__ const char* row(long long token, int channel) const {
      return rows + token * token_stride + channel * hc_stride;
    }
  };

  // Before the wait for the previous grid, which may still be making x: L2 fetches the first round of tiles, kOwn
  // tokens a block, and stays coherent. Small batches alone: memory would serve it before the weights, and the copy
  // engine takes 0.8 us for it (512 tokens: none 12.3, one round 12.8, four 15.7 us; 64 tokens 5.0 and 4.6).
  static __device__ __forceinline__ void prefetch_token(const IhcArguments& a) {
    if (kVec == 8 && elect_lane() && blockIdx.x < a.tokens && a.tokens <= 3 * kTileTokens * gridDim.x / kRanks) {
      const Source from(a, 0);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const long long token = blockIdx.x + static_cast<long long>(own) * gridDim.x;
        if (own > 0 && token >= a.tokens) break;
#pragma unroll
        for (int channel = 0; channel < kHc; ++channel) bulk_prefetch(from.row(token, channel), 2 * Shape::kHidden);
        if constexpr (kPost) bulk_prefetch(a.x + 2 * token * a.x_tokens, 2 * Shape::kHidden);
      }
    }
    __syncwarp();
  }

  // post_pre's larger batches: line by line, of the block's own first tiles, before the loader is ready. 1024 tokens
  // 35.6 -> 34.7 us; but pre 19.5 -> 20.0: its weights then come later.
  __device__ __forceinline__ void prefetch_tiles(const IhcArguments& a) {
    if (a.tokens <= 3 * kTileTokens * clusters) return;
    deal_shares(a.tokens);
    const Source from(a, rank);
#pragma unroll 1
    for (int tile = 0; tile < kInFlight; ++tile) {
#pragma unroll
      for (int n = 0; n < kTileRows; n += 32) {
        if ((n + lane) / kHc < tile_count(tile)) {
          const char* row = from.row(tile_first(tile) + (n + lane) / kHc, (n + lane) % kHc);
#pragma unroll
          for (int line = 0; line < kRowBytes; line += 128) prefetch_line(row + line);
        }
      }
    }
  }

  // Memory serves all that is asked for alike: with every stage in flight the first tile comes when the last does.
  __device__ __forceinline__ void wait_for_stage(int tile, Turn<kStages> turn) const {
    if (tile >= kInFlight) {
      const Turn<kStages> come(tile - kInFlight);
      barrier_wait(&full[come.index], come.parity);
    }
    barrier_wait(&empty[turn.index], turn.parity ^ 1);
  }

  // kTwoLoaders: tokens 1, 3, 5 and 7. The first tiles are all the loader's, which starts sooner; it also expects the
  // bytes of both.
  __device__ __forceinline__ void load_odd_tokens(const IhcArguments& a) {
    deal_shares(a.tokens);
    const Source from(a, rank);
#pragma unroll 1
    for (int tile = kInFlight; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      const int first = tile_first(tile);
      wait_for_stage(tile, turn);
      each_row(1, 2, tile_count(tile), [&](int token, int channel) {
        bulk_load(stages + turn.index * kStageBytes + token * kTokenBytes + channel * kRowBytes,
                  from.row(first + token, channel), kRowBytes, &full[turn.index]);
      });
      __syncwarp();
    }
  }

  __device__ __forceinline__ void load_tiles(const IhcArguments& a) {
    deal_shares(a.tokens);
    const Source from(a, rank);
    const char* post = a.x + 2LL * rank * kColumns;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      const int first = tile_first(tile), count = tile_count(tile);
      if (tile == kInFlight) cluster_wait();  // not before: the first tiles need no peer
      wait_for_stage(tile, turn);
      char* stage = stages + turn.index * kStageBytes;
      Barrier* barrier = &full[turn.index];
      if (lane == 0) places[turn.index] = int2{first, count};
      if (kVec == 8 && lane == 0) barrier_expect(barrier, count * (kHc + (kPost ? 1 : 0)) * kRowBytes);
      if (tile == 0) wait_for_previous_grid();  // as late as can be
      if constexpr (kVec == 8) {
        __syncwarp();
        each_row(0, kTwoLoaders && tile >= kInFlight ? 2 : 1, count, [&](int token, int channel) {
          bulk_load(stage + token * kTokenBytes + channel * kRowBytes, from.row(first + token, channel), kRowBytes,
                    barrier);
        });
        if constexpr (kPost) {
          if (lane < count)
            bulk_load(stage + kTileTokens * kTokenBytes + lane * kPostBytes, post + 2 * ((first + lane) * a.x_tokens),
                      kRowBytes, barrier);
        }
      } else {
        for (int row = 0; row < count * kHc; ++row)
          copy_row(stage + row / kHc * kTokenBytes + row % kHc * kRowBytes, from.row(first + row / kHc, row % kHc));
        if constexpr (kPost) {
          for (int row = 0; row < count; ++row)
            copy_row(stage + kTileTokens * kTokenBytes + row * kPostBytes, post + 2 * ((first + row) * a.x_tokens));
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
      }
      if constexpr (kPost) {
#pragma unroll
        for (int n = 0; n < kTileRows; n += 32) {
          const int token = (n + lane) / kHc, channel = (n + lane) % kHc;
          if (token < count)
            async_copy<4>(h_in + (turn.index * kTileTokens + token) * kHc + channel,
                          a.h_post + (first + token) * a.h_post_tokens + channel);
        }
        async_copies_arrive(barrier);
      }
    }
    if (tiles <= kInFlight) cluster_wait();
  }

  __device__ __forceinline__ void store_posts(const IhcArguments& a) const {
    char* to = a.y + 2LL * rank * kColumns;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      char* stage = stages + turn.index * kStageBytes;
      barrier_wait(&y_full[turn.index], turn.parity);
      const long long first = places[turn.index].x;
      const int count = side == 0 ? places[turn.index].y : 0;
      if constexpr (kVec == 8) {
        each_row(0, 1, count, [&](int token, int channel) {
          bulk_store(to + 2 * ((first + token) * a.y_tokens + channel * a.y_hc),
                     stage + token * kTokenBytes + channel * kRowBytes, kRowBytes);
        });
        bulk_commit();
        bulk_wait_read();
      } else {
        for (int row = 0; row < count * kHc; ++row) {
          const int token = row / kHc, channel = row % kHc;
          copy_row(to + 2 * ((first + token) * a.y_tokens + channel * a.y_hc),
                   stage + token * kTokenBytes + channel * kRowBytes);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[turn.index]);
    }
  }
};

}  // namespace hccupy
