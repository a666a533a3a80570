// The streaming iHC kernel's copies: x into the ring of stages, post_pre's y out of it.
#pragma once

#include "common/sm90_stream.cuh"

namespace hccupy {

struct StreamCopy : StreamLayout {
  static constexpr int kTileRows = kTileTokens * kHc;
  static_assert(kTileRows <= 32 || kShortRows, "longer rows are copied a lane each");

  // One row of kRowBytes by the whole warp.
  __device__ __forceinline__ void copy_row(char* to, const char* from) const {
    using Word = typename WordOf<2 * kVec>::Type;
    constexpr int kWords = kRowBytes / (2 * kVec);
    constexpr bool kEven = kRanks == 8 && kColumns < 896 && kWords % 32 == 0;
    constexpr int kAtOnce = kHc > 4 ? (kPost ? 2 : 4) : kEven ? 8 : kVec == 4 ? 2 : 4;  // more spill
#pragma unroll kAtOnce
    for (int k = lane; k < kWords; k += 32) reinterpret_cast<Word*>(to)[k] = reinterpret_cast<const Word*>(from)[k];
  }

  // Addresses that step from token to token: 29 instructions instead of 55 at hc 4. 16384 tokens, us: hc 3, hidden 4096
  // 162 -> 136, hc 8, 4096 541 -> 478, hc 6, 6144 616 -> 573. With 4 channels, copies that come slower suit the memory
  // better: 4096 at 1024 tokens 13.4 -> 14.5, 1024 at 16384 42.2 -> 44.3.
  static constexpr bool kStepping = kHc == 3 || kHc > 4;

  // Rows of one block's columns in memory.
  template <class Byte>
  struct Rows {
    Byte* first;
    long long token_stride, hc_stride;
    __device__ __forceinline__ Byte* row(long long token, int channel) const {
      return first + token * token_stride + channel * hc_stride;
    }
  };
  static __device__ __forceinline__ Rows<const char> source(const IhcArguments& a, int rank) {
    return {(kPost ? a.residual : a.x) + 2LL * rank * kColumns, 2 * (kPost ? a.residual_tokens : a.x_tokens),
            2 * (kPost ? a.residual_hc : a.x_hc)};
  }

  // copy(in the stage, in memory) for the rows of a tile, whose first token is `base`: a row a lane, or all (of every
  // step-th token from `first` on) by one lane. The compiler puts a loop over the lanes around a bulk copy, 70 cycles a
  // copy and 1.1 us a tile, unless one lane asks for it that elect.sync has named. Short rows wait for that (hidden
  // 4096, 16384 tokens: 208 -> 176 us); at 6144 the bytes take longer, and copies that come slower are even better (512
  // tokens 12.6, by one lane 14.5).
  template <class Byte, class Copy>
  __device__ __forceinline__ void each_row(char* stage, const Rows<Byte>& rows, long long base, int first, int step,
                                           int count, Copy copy) const {
    if constexpr (kShortRows) {
      if (elect_lane()) {
        char* to = stage + first * kTokenBytes;
        Byte* row = rows.row(base + first, 0);
#pragma unroll 1
        for (int token = first; token < count; token += step) {
          if constexpr (!kStepping) to = stage + token * kTokenBytes, row = rows.row(base + token, 0);
#pragma unroll
          for (int channel = 0; channel < kHc; ++channel)
            copy(to + channel * kRowBytes, row + channel * rows.hc_stride);
          if constexpr (kStepping) to += step * kTokenBytes, row += step * rows.token_stride;
        }
      }
    } else if (lane / kHc < count) {
      const int token = lane / kHc, channel = lane % kHc;
      copy(stage + token * kTokenBytes + channel * kRowBytes, rows.row(base + token, channel));
    }
  }

  // A row of x that bulk copies cannot reach. By cp.async, which takes 4 bytes or more, all rows of a tile are on their
  // way at once; the others come a few words at a time.
  __device__ __forceinline__ void fetch_row(char* to, const char* from) const {
    if constexpr (kAsyncRows) {
#pragma unroll 1
      for (int byte = lane * 2 * kVec; byte < kRowBytes; byte += 64 * kVec)
        async_copy<2 * kVec>(to + byte, from + byte);
    } else {
      copy_row(to, from);
    }
  }

  // Before the wait for the previous grid, which may still be making x: L2 fetches the first round of tiles, kOwn
  // tokens a block, and stays coherent. Small batches alone: memory would serve it before the weights, and the copy
  // engine takes 0.8 us for it (512 tokens: none 12.3, one round 12.8, four 15.7 us; 64 tokens 5.0 and 4.6).
  static __device__ __forceinline__ void prefetch_token(const IhcArguments& a) {
    if (kVec == 8 && elect_lane() && blockIdx.x < a.tokens && a.tokens <= 3 * kTileTokens * gridDim.x / kRanks) {
      const auto from = source(a, 0);
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
    const auto from = source(a, rank);
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
    const auto from = source(a, rank);
#pragma unroll 1
    for (int tile = kInFlight; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      const int first = tile_first(tile);
      wait_for_stage(tile, turn);
      each_row(stages + turn.index * kStageBytes, from, first, 1, 2, tile_count(tile),
               [&](char* to, const char* row) { bulk_load(to, row, kRowBytes, &full[turn.index]); });
      __syncwarp();
    }
  }

  // The next grid starts once the first tiles are asked for: its weights, 98 KB a multiprocessor, came at the same time
  // as x, and x later. 64 tokens with a norm 5.35 -> 5.15 us, 256 8.6 -> 8.45, post_pre 256 10.45 -> 10.2. Later still
  // (x is there), the next grid waits for its weights: pre 56 3.76 -> 4.1.
  __device__ __forceinline__ void load_tiles(const IhcArguments& a) {
    deal_shares(a.tokens);
    const auto from = source(a, rank);
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
      const bool by_lanes = kLanesAsk && tile == 0;
      if (kVec == 8 && lane == 0) barrier_expect(barrier, by_lanes ? 0 : count * (kHc + (kPost ? 1 : 0)) * kRowBytes);
      if (tile == 0) wait_for_previous_grid();  // as late as can be
      if constexpr (kVec == 8) {
        if (!by_lanes) {
          __syncwarp();
          each_row(stage, from, first, 0, kTwoLoaders && tile >= kInFlight ? 2 : 1, count,
                   [&](char* to, const char* row) { bulk_load(to, row, kRowBytes, barrier); });
          if constexpr (kPost) {
            if (lane < count)
              bulk_load(stage + kTileTokens * kTokenBytes + lane * kPostBytes, post + 2 * ((first + lane) * a.x_tokens),
                        kRowBytes, barrier);
          }
        }
      } else {
        for (int row = 0; row < count * kHc; ++row)
          fetch_row(stage + row / kHc * kTokenBytes + row % kHc * kRowBytes, from.row(first + row / kHc, row % kHc));
        if constexpr (kPost) {
          for (int row = 0; row < count; ++row)
            fetch_row(stage + kTileTokens * kTokenBytes + row * kPostBytes, post + 2 * ((first + row) * a.x_tokens));
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
      }
      if constexpr (kPost || kAsyncRows) async_copies_arrive(barrier);
      if (tile == min(tiles, 3) - 1) let_next_grid_start();
    }
    if (tiles <= kInFlight) cluster_wait();
  }

  __device__ __forceinline__ void store_posts(const IhcArguments& a) const {
    const Rows<char> to{a.y + 2LL * rank * kColumns, 2 * a.y_tokens, 2 * a.y_hc};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      char* stage = stages + turn.index * kStageBytes;
      barrier_wait(&y_full[turn.index], turn.parity);
      const long long first = places[turn.index].x;
      const int count = side_of(tile) == 0 ? places[turn.index].y : 0;
      if constexpr (kVec == 8) {
        each_row(stage, to, first, 0, 1, count, [&](char* y, char* row) { bulk_store(row, y, kRowBytes); });
        bulk_commit();
        bulk_wait_read();
      } else {
        for (int row = 0; row < count * kHc; ++row) {
          const int token = row / kHc, channel = row % kHc;
          copy_row(to.row(first + token, channel), stage + token * kTokenBytes + channel * kRowBytes);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[turn.index]);
    }
  }
};

}  // namespace hccupy
