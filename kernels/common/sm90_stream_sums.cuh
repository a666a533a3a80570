// The streaming iHC kernel's sums: dots and squares of a tile by tensor cores, their exchange in the cluster, the
// gates.
#pragma once

#include "common/sm90_stream.cuh"

namespace hccupy {

struct StreamSums : StreamLayout {
  static constexpr int kUnitsAtOnce = kWeightRegisters <= 96 ? 3 : 1;

  __device__ __forceinline__ void multiply_tiles(const IhcArguments& a, int warp) const {
    const int first_unit = (rank * kMmaWarps + warp) * kUnits;
    // The grid has one row, but the compiler does not know, so that a test of it ends a basic block: without that,
    // ptxas interleaves the units until weights spill (64 bytes at every register count tried, 200 to 240).
    unsigned int rows;
    asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(rows));
    Shape::Weights weights[kUnits];
    {
      float values[kUnits][Shape::kHalf][8];
      // Unit by unit: all asked for at once, they come 0.3 us later (256 tokens).
      Shape::load_unit(a.w, first_unit, lane, values[0]);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        weights[u].split(values[u]);
        if (rows == 100 + u) return;
        if (u + 1 < kUnits) Shape::load_unit(a.w, first_unit + u + 1, lane, values[u + 1]);
      }
    }
    cluster_wait();
    // Everything but the tile's number is worked out anew in each tile: the weights leave no registers.
    for (int tile = 0; tile < tiles; ++tile) {
      const int index = static_cast<unsigned int>(tile) % kStages;
      const int thread = fresh_thread(), warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
      barrier_wait(&full[index], static_cast<unsigned int>(tile) / kStages & 1);
      char* stage = stages + index * kStageBytes;
      // A chunk's first unit is odd where kUnits is: its group and half are known at run time only.
      const auto place = [&](int u, int b) {
        const int unit = warp * kUnits + u;
        return reinterpret_cast<uint4*>(stage + g * kTokenBytes + ((unit & 1) * Shape::kHalf + b) * kRowBytes +
                                        (unit >> 1) * 64 + t * 16);
      };
      float4 total;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        Shape::Sums sums;
        uint4 v[Shape::kHalf];
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) v[b] = *place(u, b);
        if constexpr (kPost) {
          const int unit = warp * kUnits + u;
          const float* h = h_in + (index * kTileTokens + g) * kHc + (unit & 1) * Shape::kHalf;
          float post[8];
          unpack<kXDtype>(
              *reinterpret_cast<uint4*>(stage + kTileTokens * kTokenBytes + g * kPostBytes + (unit >> 1) * 64 + t * 16),
              post);
#pragma unroll
          for (int b = 0; b < Shape::kHalf; ++b) {
            v[b] = post_octet<kXDtype>(post, v[b], h[b]);
            *place(u, b) = v[b];
          }
        }
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) {
          sums.add(weights[u], b, v[b]);
          if (kWide && b + 1 < Shape::kHalf) {
            if (rows == 300 + u) return;
            v[b + 1] = *place(u, b + 1);
          }
        }
        total = u == 0 ? sums.result(weights[u]) : total + sums.result(weights[u]);
        if (u % kUnitsAtOnce == kUnitsAtOnce - 1 && rows == 200 + u) return;
      }
      if constexpr (kPost) {
        fence_bulk();
        __syncwarp();
        if ((fresh_thread() & 31) == 0) barrier_arrive(&y_full[index]);
      }
      const int pair = tile & 1;
      barrier_wait(&partials_empty[pair], (tile >> 1 & 1) ^ 1);
      const int again = fresh_thread(), lane = again & 31;
      store_partials(partials + (pair * kMmaWarps + (again >> 5)) * kPartials, total, lane);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&partials_full[pair]);
        barrier_arrive(&empty[index]);
      }
    }
  }

  // The block's 8 chunks as a tree, told to all blocks of the cluster.
  __device__ __forceinline__ void push_sums(int pair) const {
    constexpr int kQuads = kPartials / 4;
    if (lane < kQuads) {
      const float* from = partials + pair * kMmaWarps * kPartials + 4 * lane;
      const auto chunk = [&](int k) { return *reinterpret_cast<const float4*>(from + k * kPartials); };
      const float4 low = (chunk(0) + chunk(1)) + (chunk(2) + chunk(3));
      const float4 sum = low + ((chunk(4) + chunk(5)) + (chunk(6) + chunk(7)));
      const unsigned int to = shared_address(slots + (pair * kRanks + rank) * kPartials + 4 * lane),
                         barrier = shared_address(&slot_full[pair]);
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) store_peer(peer_address(to, peer), sum, peer_address(barrier, peer));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&partials_empty[pair]);
  }

  // Lane (g, t) has outputs 2t and 2t + 1 of token g.
  __device__ __forceinline__ void make_gates(const IhcArguments& a) const {
    const int g = lane >> 2, out = 2 * (lane & 3);
    const bool used = out < Shape::kUsedOutputs;
    const GateScales low = GateScales::of<kHc>(out, used, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
    const GateScales high = GateScales::of<kHc>(out + 1, used, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Turn<kStages> turn(tile);
      const Turn<kSlots> pair(tile);
      barrier_wait(&partials_full[pair.index], pair.parity);
      push_sums(pair.index);
      barrier_wait_cluster(&slot_full[pair.index], pair.parity);
      if (lane == 0) barrier_expect(&slot_full[pair.index], kSlotBytes);
      const float* from = slots + pair.index * kRanks * kPartials;
      const auto dots = [&](int r) {
        return *reinterpret_cast<const float2*>(from + r * kPartials + g * kOutputs + out);
      };
      const auto square = [&](int r) { return from[r * kPartials + kTileTokens * kOutputs + g]; };
      const auto add = [](float2 x, float2 y) { return float2{x.x + y.x, x.y + y.y}; };
      float2 dot = add(add(dots(0), dots(1)), add(dots(2), dots(3)));
      dot = add(dot, add(add(dots(4), dots(5)), add(dots(6), dots(7))));
      float squares = (square(0) + square(1)) + (square(2) + square(3));
      squares += (square(4) + square(5)) + (square(6) + square(7));
      const float first = low.gate<static_cast<int>(Shape::kDepth)>(dot.x, squares, a.norm_eps);
      const int2 place = places[turn.index];  // before the gates are told: then the stage may be loaded anew
      const float second = high.gate<static_cast<int>(Shape::kDepth)>(dot.y, squares, a.norm_eps);
      if (out < kHc)
        *reinterpret_cast<float2*>(gates + (turn.index * kTileTokens + g) * kHc + out) = float2{first, second};
      __syncwarp();
      if (lane == 0) barrier_arrive(&gates_full[turn.index]);
      if (Shape::kOp != kHead && rank == g && g < place.y && out >= kHc && out < 2 * kHc) {
        float* to = a.h_next + (place.x + g) * a.h_next_tokens + out - kHc;
        to[0] = first, to[1] = second;
      }
    }
  }
};

}  // namespace hccupy
