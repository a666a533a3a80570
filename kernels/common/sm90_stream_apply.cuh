// The streaming iHC kernel's outputs: z of a tile from its gates, and the folded RMS norm.
//
// With a norm, a tile goes in two halves of 4 tokens: mix a half, keep it (rounded, in registers), tell its squares; store it
// when the cluster's sum is back, after the other half was mixed. Where registers do not suffice it is mixed again instead.
#pragma once

#include "common/sm90_stream.cuh"

namespace hccupy {

template <class Layout>
struct StreamApply : Layout {
  using Shape = typename Layout::Shape;
  using Layout::kHc, Layout::kXDtype, Layout::kVec, Layout::kPost, Layout::kHasNorm, Layout::kRanks, Layout::kApplyWarps, Layout::kColumns, Layout::kGroups,
      Layout::kRowBytes, Layout::kTokenBytes, Layout::kStages, Layout::kStageBytes, Layout::kSlots, Layout::kHalfTokens, Layout::kNormBytes;
  using Layout::stages, Layout::gates, Layout::norm_slots, Layout::norm_weight, Layout::norm_groups, Layout::inverse, Layout::rank, Layout::lane,
      Layout::tiles;
  using Layout::full, Layout::empty, Layout::y_full, Layout::gates_full, Layout::norm_full, Layout::sums_full, Layout::inverse_full;

  // The octets of 4 tokens in one line, 128 lanes side by side: no bank conflict, 512-byte stores.
  static constexpr int kOctets = kColumns / 8, kItems = kHalfTokens * kOctets, kLanes = kApplyWarps * 32;
  static constexpr int kSteps = (kItems + kLanes - 1) / kLanes;
  static constexpr bool kKeeps = kHasNorm && Shape::kRoundBeforeNorm && !Layout::kWide;
  static constexpr int kHeld = kKeeps ? kSteps : 1;
  static constexpr int kStepsAtOnce = Layout::kWide ? 2 : kSteps, kHalvesAtOnce = Layout::kWide ? 1 : 2;

  struct Item {
    int token, octet;  // of the tile
    bool real;
  };
  static __device__ __forceinline__ Item item(int thread, int half, int step, int count) {
    const int index = min(step * kLanes + thread, kItems - 1);
    const int token = index / kOctets;
    return Item{half * kHalfTokens + token, index - token * kOctets, half * kHalfTokens + token < count && (kItems % kLanes == 0 || step * kLanes + thread < kItems)};
  }

  __device__ __forceinline__ void mix(Item at, int turn, float (&z)[8]) const {
    const char* from = stages + turn * Layout::kStageBytes + at.token * kTokenBytes + at.octet * 16;
    uint4 x[kHc];
#pragma unroll
    for (int i = 0; i < kHc; ++i) x[i] = *reinterpret_cast<const uint4*>(from + i * kRowBytes);
    float h[kHc];
    const float* gate = gates + (turn * kTileTokens + at.token) * kHc;
    if constexpr (kHc == 4) {
      const float4 all = *reinterpret_cast<const float4*>(gate);
      h[0] = all.x, h[1] = all.y, h[2] = all.z, h[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kHc; ++i) h[i] = gate[i];
    }
    reduce_channels<kXDtype, kHc>(x, h, z);
  }

  // This block's columns of z of the tile's first token.
  __device__ __forceinline__ char* rows_of(const IhcArguments& a, int tile) const {
    return a.z + 2 * (static_cast<long long>(this->tile_first(tile)) * a.z_tokens + rank * kColumns);
  }
  static __device__ __forceinline__ void store(const IhcArguments& a, Item at, char* rows, uint4 z) {
    if (at.real) Octet<kVec>::store(rows + at.token * (2 * a.z_tokens) + at.octet * 16, z);
  }

  // Mixes a half and leaves its squares, by groups of 32 columns, for the norm warp.
  __device__ __forceinline__ void mix_half(int thread, int half, int turn, int count, uint4 (&held)[kHeld]) const {
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kSteps; ++step) {
      const Item at = item(thread, half, step, count);
      float z[8];
      mix(at, turn, z);
      if constexpr (Shape::kRoundBeforeNorm) {
        const uint4 rounded = pack<kXDtype>(z);
        if constexpr (kKeeps) held[step] = rounded;
        unpack<kXDtype>(rounded, z);
      }
      float sum = octet_squares(z);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (at.real && (lane & 3) == 0) norm_groups[at.token * kGroups + (at.octet >> 2)] = sum;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sums_full[half]);
  }

  __device__ __forceinline__ void store_half(const IhcArguments& a, int thread, int half, int turn, char* rows, int count, const uint4 (&held)[kHeld]) const {
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kSteps; ++step) {
      const Item at = item(thread, half, step, count);
      float z[8];
      if constexpr (kKeeps) {
        unpack<kXDtype>(held[step], z);
      } else {
        mix(at, turn, z);
        if constexpr (Shape::kRoundBeforeNorm) unpack<kXDtype>(pack<kXDtype>(z), z);
      }
      const float factor = inverse[at.token];
      const float4* scale = reinterpret_cast<const float4*>(norm_weight) + at.octet;
      const float4 low = scale[0], high = scale[kOctets];
      const float scales[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) z[k] = z[k] * factor * scales[k];
      store(a, at, rows, pack<kXDtype>(z));
    }
  }

  __device__ __forceinline__ void wait_for_tile(Turn turn) const {
    // The gates of a tile come after all its x; x itself must still be waited for by whoever reads it.
    barrier_wait(kPost ? &y_full[turn.index] : &full[turn.index], turn.parity);
    barrier_wait(&gates_full[turn.index], turn.parity);
  }
  __device__ __forceinline__ void release(Turn turn) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[turn.index]);
  }

  __device__ __forceinline__ void apply_tiles(const IhcArguments& a, int thread) const {
    Turn turn;
    for (int tile = 0; tile < tiles; ++tile) {
      wait_for_tile(turn);
      const int count = this->tile_count(tile);
      char* const rows = rows_of(a, tile);
#pragma unroll kHalvesAtOnce
      for (int half = 0; half < 2; ++half) {
        if (half * kHalfTokens < count) {
#pragma unroll kStepsAtOnce
          for (int step = 0; step < kSteps; ++step) {
            const Item at = item(thread, half, step, count);
            float z[8];
            mix(at, turn.index, z);
            store(a, at, rows, pack<kXDtype>(z));
          }
        }
      }
      release(turn);
      turn.next(kStages);
    }
  }

  __device__ __forceinline__ void load_norm_weight(const IhcArguments& a, int thread) const {
    using N = Element<Shape::kNormDtype>;
    const typename N::Type* from = static_cast<const typename N::Type*>(a.rms_weight) + rank * kColumns;
    // The first halves of the octets, then the second halves: lanes side by side read from different banks.
    for (int k = thread; k < kColumns; k += kLanes) norm_weight[(k & 4) * kOctets + (k >> 3) * 4 + (k & 3)] = N::to_float(from[k]);
    asm volatile("bar.sync 1, %0;" ::"n"(kLanes) : "memory");
  }

  __device__ __forceinline__ void apply_tiles_norm(const IhcArguments& a, int thread) const {
    Turn turn, last;
    uint4 held[kKeeps ? 2 : 1][kHeld];
    for (int tile = 0; tile <= tiles; ++tile) {
#pragma unroll kHalvesAtOnce
      for (int half = 0; half < 2; ++half) {
        if (tile > 0) {
          barrier_wait(&inverse_full[half], (tile - 1) & 1);
          const int count = this->tile_count(tile - 1);
          if (half * kHalfTokens < count) store_half(a, thread, half, last.index, rows_of(a, tile - 1), count, held[kKeeps ? half : 0]);
        }
        if (tile == tiles) continue;
        if (half == 0) wait_for_tile(turn);
        mix_half(thread, half, turn.index, this->tile_count(tile), held[kKeeps ? half : 0]);
      }
      if (kKeeps ? tile < tiles : tile > 0) release(kKeeps ? turn : last);
      last = turn;
      turn.next(kStages);
    }
  }

  // Half tile by half tile: sums the groups, tells the blocks (send), and turns what they told into 1 / RMS (receive). Two warps
  // where two are free: one exchange takes longer than half a tile of pre, so the next must start before it ends.
  // Lane = (token of the half, block).
  template <bool kSend, bool kReceive>
  __device__ __forceinline__ void norm_tiles(const IhcArguments& a) const {
    const int token = lane >> 3, peer = lane & 7;
    constexpr int kRun = kGroups / 2;
    Turn slot;
    for (int tile = 0; tile < tiles; ++tile) {
      for (int half = 0; half < 2; ++half) {
        const int at = half * kHalfTokens + token, index = 2 * slot.index + half;
        if constexpr (kSend) {
          barrier_wait(&sums_full[half], tile & 1);
          const float* from = norm_groups + at * kGroups + (peer & 1) * kRun;
          float sum = from[0];
#pragma unroll
          for (int k = 1; k < kRun; ++k) sum += from[k];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          const unsigned int to = shared_address(norm_slots + (index * kRanks + rank) * kHalfTokens + token);
          store_peer(peer_address(to, peer), sum, peer_address(shared_address(&norm_full[index]), peer));
        }
        if constexpr (kReceive) {
          barrier_wait_cluster(&norm_full[index], slot.parity);
          if (lane == 0) barrier_expect(&norm_full[index], kNormBytes);
          float total = norm_slots[(index * kRanks + peer) * kHalfTokens + token];
#pragma unroll
          for (int mask = 1; mask < kRanks; mask *= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
          if (peer == 0) inverse[at] = norm_inverse<Shape::kHidden>(total, a.rms_eps);
          __syncwarp();
          if (lane == 0) barrier_arrive(&inverse_full[half]);
        }
      }
      slot.next(kSlots);
    }
  }
};

}  // namespace hccupy
