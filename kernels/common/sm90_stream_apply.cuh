// The streaming iHC kernel's outputs: z of a tile from its gates, and the folded RMS norm.
//
// A warp takes a token, then another; all offsets inside a token are constants. With a norm it mixes both, tells the
// cluster the sum of squares of each in one store, and keeps z, rounded. With the sums back, both are normalised and
// stored.
#pragma once

#include "common/sm90_stream.cuh"

namespace hccupy {

struct StreamApply : StreamLayout {
  // kPartLanes lanes take a part of the block's columns (a 16th of the row), as many octets at a time.
  static constexpr int kPartLanes = 2 * kRanks, kPartOctets = 4 * Shape::kPartGroups;
  static constexpr int kSteps = (kPartOctets + kPartLanes - 1) / kPartLanes;
  static constexpr int kLastOctets = kColumns / 8 - (32 / kPartLanes - 1) * kPartOctets;  // of the part with fewest
  static constexpr bool kKeeps = kHasNorm && Shape::kRoundBeforeNorm;  // unrounded, z has no room: it is mixed twice
  // Both tokens written out, so that the compiler works at both, and z kept in registers: where the apply warps are the
  // bottleneck. One after the other a tile took them 1.8 us: 1024 tokens 22.6 -> 21.9, 4096 70.8 -> 69.2.
  static constexpr int kTokensAtOnce = kApplyBound ? 2 : 1;
  static constexpr bool kHeld = kKeeps && kApplyBound;
  static constexpr int kStepsAtOnce = kWide && kHasNorm && !kPost ? 2 : kSteps;
  static_assert(kApplyWarps == kHalfTokens, "a warp has one token of each half tile");

  // Has this lane an octet in that step? All but the last steps are full; idle lanes take another's and store nothing.
  __device__ __forceinline__ bool has(int step) const {
    const int at = kPartLanes * step + (lane & (kPartLanes - 1));
    if (kPartLanes * step + kPartLanes <= kLastOctets) return true;
    return at < kPartOctets && (!Shape::kPadded || part_start() + at < kColumns / 8);
  }
  __device__ __forceinline__ int part_start() const { return kPartLanes == 32 ? 0 : lane / kPartLanes * kPartOctets; }
  __device__ __forceinline__ int octet(int step) const {
    const int first = part_start() + (lane & (kPartLanes - 1));
    if (Shape::kPadded && kPartLanes * step + kPartLanes > kLastOctets)
      return min(first + kPartLanes * step, kColumns / 8 - 1);
    return first + (has(step) ? kPartLanes * step : 0);
  }

  struct Token {
    const char* x;
    float h[kHc];
  };
  __device__ __forceinline__ const char* x_of(int turn, int token) const {
    return stages + turn * kStageBytes + token * kTokenBytes;
  }
  __device__ __forceinline__ Token token_of(int turn, int token) const {
    Token at;
    at.x = x_of(turn, token);
    const float* gate = gates + (turn * kTileTokens + token) * kHc;
    if constexpr (kHc == 4) {
      const float4 all = *reinterpret_cast<const float4*>(gate);
      at.h[0] = all.x, at.h[1] = all.y, at.h[2] = all.z, at.h[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kHc; ++i) at.h[i] = gate[i];
    }
    return at;
  }
  __device__ __forceinline__ void load(const char* x, int step, uint4 (&octets)[kHc]) const {
#pragma unroll
    for (int i = 0; i < kHc; ++i) octets[i] = *reinterpret_cast<const uint4*>(x + i * kRowBytes + octet(step) * 16);
  }
  __device__ __forceinline__ void mix(const Token& at, int step, float (&z)[8]) const {
    uint4 x[kHc];
    load(at.x, step, x);
    reduce_channels<kXDtype, kHc>(x, at.h, z);
  }
  // This block's columns of z of a token.
  __device__ __forceinline__ char* row_of(const IhcArguments& a, int turn, int token) const {
    return a.z + 2 * ((static_cast<long long>(places[turn].x) + token) * a.z_tokens + rank * kColumns);
  }
  __device__ __forceinline__ void store(char* row, int step, const float (&z)[8]) const {
    if (has(step)) Octet<kVec>::store(row + octet(step) * 16, pack<kXDtype>(z));
  }
  // The gates of a tile come after all its x; x itself must still be waited for by whoever reads it.
  __device__ __forceinline__ void wait_for_x(Turn<kStages> turn) const {
    barrier_wait(kPost ? &y_full[turn.index] : &full[turn.index], turn.parity);
  }
  __device__ __forceinline__ void wait_for_gates(Turn<kStages> turn) const {
    barrier_wait_cluster(&gates_full[turn.index], turn.parity);
  }
  __device__ __forceinline__ void release(int turn) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(&empty[turn]);
  }

  // The tiles of the post gates, which have no z; how many they are.
  __device__ __forceinline__ int pass_tiles() const {
    if constexpr (Shape::kSides == 1) return 0;
    const int count = Shape::kPasses == 2 ? tiles / 2 : side == 1 ? tiles : 0;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
      const Turn<kStages> turn(tile);
      wait_for_x(turn);
      wait_for_gates(turn);
      release(turn.index);
    }
    return count;
  }

  __device__ __forceinline__ void apply_tiles(const IhcArguments& a, int warp) const {
#pragma unroll 1
    for (int tile = pass_tiles(); tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      wait_for_x(turn);
      const int count = places[turn.index].y;
      uint4 x[kHc];  // the next octets; the first before the gates come: 64 tokens 4.38 -> 4.30 us
      if constexpr (!kWide && !kLean) load(x_of(turn.index, warp), 0, x);  // wide: no registers for it
      wait_for_gates(turn);
#pragma unroll 1
      for (int token = warp; token < count; token += kHalfTokens) {
        const Token at = token_of(turn.index, token);
        char* const row = row_of(a, turn.index, token);
#pragma unroll kStepsAtOnce
        for (int step = 0; step < kSteps; ++step) {
          float z[8];
          if constexpr (kWide || kLean) {
            mix(at, step, z);
          } else {
            reduce_channels<kXDtype, kHc>(x, at.h, z);
            if (step + 1 < kSteps)
              load(at.x, step + 1, x);
            else
              load(x_of(turn.index, (token + kHalfTokens) % kTileTokens), 0, x);
          }
          store(row, step, z);
        }
      }
      release(turn.index);
    }
  }

  // ---- with a norm --------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_norm_weight(const IhcArguments& a, int thread) const {
    using N = Element<Shape::kNormDtype>;
    const N::Type* from = static_cast<const N::Type*>(a.rms_weight) + rank * kColumns;
    // The first halves of the octets, then the second halves: lanes side by side read from different banks.
    constexpr int kApplyThreads = kApplyWarps * 32, kLoads = (kColumns + kApplyThreads - 1) / kApplyThreads;
    const auto has = [&](int n) {
      return (n + 1) * kApplyThreads <= kColumns || n * kApplyThreads + thread < kColumns;
    };
    float weights[kLoads];  // all asked for at once: one after the other they came 3 us later
#pragma unroll
    for (int n = 0; n < kLoads; ++n) weights[n] = has(n) ? N::to_float(from[n * kApplyThreads + thread]) : 0.0f;
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int k = n * kApplyThreads + thread;
      if (has(n)) norm_weight[(k & 4) * (kColumns / 8) + (k >> 3) * 4 + (k & 3)] = weights[n];
    }
    sync_threads<kApplyThreads>();
  }

  // Where z waits, unless in registers: in place of the first channel's x, or (post_pre, whose y may still be on its
  // way out) of the block's output.
  __device__ __forceinline__ uint4* kept(int turn, int token) const {
    char* stage = stages + turn * kStageBytes;
    return reinterpret_cast<uint4*>(kPost ? stage + kTileTokens * kTokenBytes + token * kPostBytes
                                          : stage + token * kTokenBytes);
  }

  // Keeps z of a token and returns this lane's sum of its squares.
  __device__ __forceinline__ float mix_token(int turn, int token, uint4 (&held)[kSteps]) const {
    const Token at = token_of(turn, token);
    float sum = 0.0f;
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kSteps; ++step) {
      float z[8];
      mix(at, step, z);
      if constexpr (kKeeps) {
        const uint4 rounded = pack<kXDtype>(z);
        unpack<kXDtype>(rounded, z);
        if constexpr (kWide) {  // no registers to hold it
          if (has(step)) kept(turn, token)[octet(step)] = rounded;
        } else {
          held[step] = rounded;
        }
      }
      const float squares = octet_squares(z);
      if (has(step)) sum += squares;
    }
    // At the end: the compiler moves no load of x over a store to the stage.
    if constexpr (kKeeps && !kWide && !kHeld) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (has(step)) kept(turn, token)[octet(step)] = held[step];
      }
    }
    return sum;
  }

  // The tree of what the blocks told of a token, by loads of 16 bytes.
  static __device__ __forceinline__ float sum_of(const float* from) {
    if constexpr (kRanks == 2)
      return from[0] + from[1];
    else
      return tree_of<kRanks / 4>([&](int k) { return across(reinterpret_cast<const float4*>(from)[k]); });
  }

  // Two slots and barriers suffice: a peer tells tile n + 2 only after it has had the sums of n + 1 from all warps of
  // this block, and each of them had waited for those of n before it told n + 1.
  __device__ __forceinline__ void apply_tiles_norm(const IhcArguments& a, int warp) const {
    const int first = pass_tiles();
#pragma unroll 1
    for (int tile = first; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      const Turn<2> pair(tile - first);
      wait_for_x(turn);
      wait_for_gates(turn);
      const int count = places[turn.index].y;
      char* const row = row_of(a, turn.index, warp);
      uint4 held[kHeld ? 2 : 1][kSteps];
      float low = 0.0f, high = 0.0f;  // of tokens `warp` and `warp + 4`, which may not exist: then they are not stored
#pragma unroll kTokensAtOnce
      for (int half = 0; half < 2; ++half) {
        const float sum = mix_token(turn.index, half * kHalfTokens + warp, held[kHeld ? half : 0]);
        if (half == 0)
          low = sum;
        else
          high = sum;
      }
      if constexpr (kHeld) release(turn.index);
      // Both trees from neighbours on in five shuffles: even lanes add up the first token, odd lanes the second.
      const bool odd = lane & 1;
      float sum = (odd ? high : low) + __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
#pragma unroll
      for (int mask = 2; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      // Lane 2 n + half, n < kRanks, tells block n.
      float* const slots = norm_slots + (pair.index * kTileTokens + (odd ? kHalfTokens : 0) + warp) * kRanks;
      Barrier* const told = norm_full + pair.index;
      if (lane < 2 * kRanks)
        store_peer(peer_address(shared_address(slots + rank), lane >> 1), sum,
                   peer_address(shared_address(told), lane >> 1));
      barrier_wait_cluster(told, pair.parity);
      if (warp == 0 && lane == 0) barrier_expect(told, kNormBytes);
      const auto inverse_of = [&](int half) {
        const float* const sums = norm_slots + (pair.index * kTileTokens + half * kHalfTokens + warp) * kRanks;
        return norm_inverse<Shape::kHidden>(sum_of(sums), a.rms_eps);
      };
      const float inverse_low = inverse_of(0), inverse_high = inverse_of(1);
#pragma unroll kStepsAtOnce
      for (int step = 0; step < kSteps; ++step) {
        const float4* scale = reinterpret_cast<const float4*>(norm_weight) + octet(step);
        const float4 first = scale[0], second = scale[kColumns / 8];
        const float scales[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll kTokensAtOnce
        for (int half = 0; half < 2; ++half) {
          const int token = half * kHalfTokens + warp;
          const float by = half == 0 ? inverse_low : inverse_high;
          float z[8];
          if constexpr (kHeld) {
            unpack<kXDtype>(held[half][step], z);
          } else if constexpr (kKeeps) {
            unpack<kXDtype>(kept(turn.index, token)[octet(step)], z);
          } else {
            mix(token_of(turn.index, token), step, z);
          }
#pragma unroll
          for (int k = 0; k < 8; ++k) z[k] = z[k] * by * scales[k];
          // A branch a store kept the octets apart: 64 tokens 5.50 -> 5.25 us, 512 14.4 -> 13.6.
          Octet<kVec>::store_if(token < count && has(step),
                                row + 2 * half * kHalfTokens * a.z_tokens + octet(step) * 16, pack<kXDtype>(z));
        }
      }
      if constexpr (!kHeld) {
        // Ordinary stores into the stage come before the bulk copies that refill it.
        if constexpr (kKeeps) fence_bulk();
        release(turn.index);
      }
    }
  }
};

}  // namespace hccupy
