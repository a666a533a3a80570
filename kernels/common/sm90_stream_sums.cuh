// The streaming iHC kernel's sums: dots and squares of a tile by tensor cores, their exchange in the cluster, the
// gates.
#pragma once

#include "common/sm90_stream_copy.cuh"

namespace hccupy {

struct StreamSums : StreamLayout {
  static constexpr bool kMasked = Shape::kPadded || 2 * Shape::kHalf != kHc;  // not all octets are there
  // No register for what can be read anew: 16 bytes spilled.
  static constexpr bool kAnew = (kMasked && kWide) || (kHc > 4 && kWeightRegisters > 120);
  static constexpr int kUnitsAtOnce = kWeightRegisters <= 96 && !kPost && kHc <= 4 ? 2 : 1;
  static constexpr bool kApart = kPost && kHc > 4 && !kLean;  // a block of 32 columns after the other
  static constexpr int kBlocksAtOnce = kApart                        ? 1
                                       : Shape::kHalf == 4           ? 2
                                       : Shape::kHalf == 3 && !kPost ? 1
                                                                     : Shape::kHalf;

  static __device__ __forceinline__ unsigned int grid_rows() {
    unsigned int rows;
    asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(rows));
    return rows;
  }

  // Each lane asks for the octets of the first tile that it will multiply itself, a group a unit, so that it needs no
  // barrier for them, and multiplies the first while the last are on their way. (post_pre: h_post, too.) All addresses
  // before the wait: worked out behind it, the copies took 900 cycles.
  template <class Never>
  __device__ __forceinline__ void ask_for_first_tile(const IhcArguments& a, Never never) {
    deal_shares(a.tokens);
    const auto from = StreamCopy::source(a, rank);
    const int thread = fresh_thread(), first_unit = (thread >> 5) * kUnits, g = (thread & 31) >> 2, t = thread & 3;
    const bool there = g < tile_count(0);
    const long long token = tile_first(0) + (there ? g : 0);
    const char* rows[2][Shape::kHalf];  // of even and odd units, counted from the warp's first
    unsigned int to[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int unit = first_unit + odd, channel = (unit & 1) * Shape::kHalf, column = (unit >> 1) * 64 + t * 16;
      to[odd] = shared_address(stages + g * kTokenBytes + channel * kRowBytes + column);
      settle_early(to[odd]);
#pragma unroll
      for (int b = 0; b < Shape::kHalf; ++b) {
        rows[odd][b] = from.row(token, channel + b) + column;
        settle_early(rows[odd][b]);
      }
    }
    const int column = (first_unit >> 1) * 64 + t * 16;
    const char* post = a.x + 2 * (token * a.x_tokens + rank * kColumns) + column;
    unsigned int post_to = shared_address(stages + kTileTokens * kTokenBytes + g * kPostBytes + column);
    const float* h = a.h_post + token * a.h_post_tokens;
    unsigned int h_to = shared_address(h_in + g * kHc);
    if constexpr (kPost) settle_early(post), settle_early(post_to), settle_early(h), settle_early(h_to);
    if (never(501)) return;
    wait_for_previous_grid();
    if (kPost && there) {
#pragma unroll
      for (int i = 0; i < kHc; ++i) async_copy_to<4>(h_to + 4 * i, h + i);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first_unit + u;
      if (there && (!kMasked || (unit >> 1) * 64 + t * 16 < kRowBytes)) {
        if constexpr (kPost) {  // once for both units of a group
          const int group = kUnits % 2 == 0 ? u / 2 : (unit >> 1) - (first_unit >> 1);
          if (kUnits % 2 == 1 || u % 2 == 0) async_copy_to<16>(post_to + group * 64, post + group * 64);
        }
#pragma unroll
        for (int b = 0; b < Shape::kHalf; ++b) {
          if (!kMasked || (unit & 1) * Shape::kHalf + b < kHc)
            async_copy_to<16>(to[u % 2] + b * kRowBytes + u / 2 * 64, rows[u % 2][b] + u / 2 * 64);
        }
      }
      async_commit();
    }
    async_copies_arrive(&full[0]);  // for everybody else
  }

  // This lane's octets of all but the last `later` units are there. (Unrolled, one branch is left; a loop's index is no
  // template argument.)
  template <int kLater = kUnits - 1>
  static __device__ __forceinline__ void wait_for_own(int later) {
    if (later == kLater)
      async_wait<kLater>();
    else if constexpr (kLater > 0)
      wait_for_own<kLater - 1>(later);
  }

  __device__ __forceinline__ void multiply_tiles(const IhcArguments& a) {
    // The grid has one row, but the compiler does not know, so that a test of it ends a basic block: without that,
    // ptxas interleaves the units until weights spill (64 bytes at every register count tried, 200 to 240).
    const unsigned int rows = grid_rows();
    const auto never = [&](unsigned int n) { return (kAnew ? grid_rows() : rows) == n; };
    const auto begin = [&] {
      take_registers<kMmaRegisters>();
      cluster_arrive();
      place();
      lane = fresh_thread() & 31;
      deal(a.tokens);
    };
    if constexpr (Shape::kPasses == 2)
      begin();  // in the loop it would be in the way of the registers
    else if constexpr (Shape::kSides == 2)
      deal(a.tokens);
    int tile = 0;
    do {  // a pass: the weights of a side, its tiles
      const int first_unit = (block_in_cluster() * kMmaWarps + (fresh_thread() >> 5)) * kUnits;
      const float* w = a.w;
      if constexpr (Shape::kSides == 2) w += side_of(tile) * kHc * Shape::kDepth;
      Shape::Weights weights[kUnits];
      float values[kUnits][Shape::kHalf][8];
      // Unit by unit: all asked for at once, they come 0.3 us later (256 tokens). The first before anything else.
      Shape::load_unit(w, first_unit, fresh_thread() & 31, values[0]);
      if constexpr (Shape::kPasses == 1) begin();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        weights[u].split(values[u]);
        if (never(100 + u)) return;
        if (u + 1 < kUnits) Shape::load_unit(w, first_unit + u + 1, lane, values[u + 1]);
      }
      if (Shape::kPasses == 1 || tile == 0) cluster_wait();
      if (kLanesAsk && !never(500)) ask_for_first_tile(a, never);
      // Everything but the tile's number is worked out anew in each tile: the weights leave no registers.
      for (bool more = tile < tiles; more; more = ++tile < tiles && (Shape::kPasses == 1 || tile != tiles / 2)) {
        const int index = static_cast<unsigned int>(tile) % kStages;
        const int thread = fresh_thread(), warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
        if (!kLanesAsk || tile > 0) barrier_wait(&full[index], static_cast<unsigned int>(tile) / kStages & 1);
        char* stage = stages + index * kStageBytes;
        // A chunk's first unit is odd where kUnits is: its group and half are known at run time only.
        const auto place = [&](int u, int b) {
          const int unit = warp * kUnits + u;
          return reinterpret_cast<uint4*>(stage + g * kTokenBytes + ((unit & 1) * Shape::kHalf + b) * kRowBytes +
                                          (unit >> 1) * 64 + t * 16);
        };
        const auto has = [&](int u, int b) {
          const int again = kAnew ? fresh_thread() : thread, unit = (again >> 5) * kUnits + u;
          return (unit >> 1) * 32 + (again & 3) * 8 < kColumns && (unit & 1) * Shape::kHalf + b < kHc;
        };
        const auto x_of = [&](int u, int b) { return !kMasked || has(u, b) ? *place(u, b) : uint4{}; };
        float4 total;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if constexpr (kLanesAsk) wait_for_own(kUnits - 1 - u);
          Shape::Sums sums;
#pragma unroll
          for (int from = 0; from < Shape::kHalf; from += kBlocksAtOnce) {
            uint4 v[kBlocksAtOnce];
#pragma unroll
            for (int b = 0; b < kBlocksAtOnce; ++b) v[b] = x_of(u, from + b);
            if constexpr (kPost) {
              const int unit = warp * kUnits + u;
              const float* h = h_in + (index * kTileTokens + g) * kHc + (unit & 1) * Shape::kHalf;
              float post[8];
              unpack<kXDtype>(*reinterpret_cast<uint4*>(stage + kTileTokens * kTokenBytes + g * kPostBytes +
                                                        (unit >> 1) * 64 + t * 16),
                              post);
#pragma unroll
              for (int b = 0; b < kBlocksAtOnce; ++b) {
                if (kMasked && !has(u, from + b)) continue;  // as it is: zero
                v[b] = post_octet<kXDtype>(post, v[b], h[from + b]);
                *place(u, from + b) = v[b];
              }
            }
#pragma unroll
            for (int b = 0; b < kBlocksAtOnce; ++b) {
              sums.add(weights[u], from + b, v[b]);
              if (kApart && never(400 + u)) return;
              if (kWide && b + 1 < kBlocksAtOnce) {
                if (never(300 + u)) return;
                v[b + 1] = x_of(u, from + b + 1);
              }
            }
            if (Shape::kPasses == 2 && !kApart && never(400 + u)) return;
          }
          total = u == 0 ? sums.result(weights[u]) : total + sums.result(weights[u]);
          if (u % kUnitsAtOnce == kUnitsAtOnce - 1 && never(200 + u)) return;
        }
        if constexpr (kPost) {
          fence_bulk();
          __syncwarp();
          if ((fresh_thread() & 31) == 0) barrier_arrive(&y_full[index]);
        }
        const int pair = tile & 1;
        barrier_wait(&partials_empty[pair], (tile >> 1 & 1) ^ 1);
        const int again = fresh_thread(), lane = again & 31;
        store_partials<4>(partials + (pair * kMmaWarps + (again >> 5)) * 4 * kQuads, total, lane);
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(&partials_full[pair]);
          barrier_arrive(&empty[index]);
        }
      }
    } while (Shape::kPasses == 2 && tile < tiles);
  }

  // What a lane tells of a tile, and where. Worked out while the sums are awaited.
  struct Message {
    int from;
    unsigned int to, barrier;
  };
  __device__ __forceinline__ Message message(int tile) const {
    const int pair = tile & 1, slot = Turn<kSlots>(tile).index;
    const int token = lane < kDotQuads ? lane >> 1 : (lane - kDotQuads) % kTileTokens;
    const int owner = kOwn > 1 ? token % kRanks : token + (kAlternate ? pair * kTileTokens : 0);
    const int place = kOwn > 1 ? slot * kOwn + token / kRanks : slot;
    const int quad = (place * kRanks + rank) * kTokenQuads + (lane < kDotQuads ? lane & 1 : 2);
    Message m{4 * (pair * kMmaWarps * kQuads + lane), peer_address(shared_address(slots + 4 * quad), owner),
              peer_address(shared_address(&slot_full[slot]), owner)};
    settle_early(m.from), settle_early(m.to), settle_early(m.barrier);
    return m;
  }

  // The block's 8 chunks as a tree, told to the blocks that work out gates, a token each. When all told all, 144 stores
  // of 16 bytes left and reached a block instead of 24 and the gates: post_pre at 256 tokens 11.38 us instead of 11.09.
  __device__ __forceinline__ void push_sums(int tile, const Message& m) const {
    if (lane < kQuads) {
      const float* from = partials + m.from;
      const auto chunk = [&](int k) { return *reinterpret_cast<const float4*>(from + 4 * k * kQuads); };
      const float4 low = (chunk(0) + chunk(1)) + (chunk(2) + chunk(3));
      const float4 sum = low + ((chunk(4) + chunk(5)) + (chunk(6) + chunk(7)));  // of squares, x alone counts
      store_peer(m.to, sum, m.barrier);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&partials_empty[tile & 1]);
  }

  // A warp of its own: when the gates warp did this too, a tile's sums were told only once the tile before had its
  // gates. hidden 8192, 16384 tokens 450 -> 361 us, with a norm 545 -> 380; 4096, 256 tokens 6.39 -> 6.09.
  __device__ __forceinline__ void tell_sums() const {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Turn<2> pair(tile);
      const Message m = message(tile);
      barrier_wait(&partials_full[pair.index], pair.parity);
      // The last gates there are read: x came anew.
      if (lane == 0) barrier_expect(&gates_full[Turn<kStages>(tile).index], kGateBytes);
      if (tile >= 2) {
        const Turn<kStages> last(tile - 2);
        barrier_wait_cluster(&gates_full[last.index], last.parity);
      }
      push_sums(tile, m);
    }
  }

  // This block has token `rank` of each tile (kOwn: and others; kAlternate: of every other tile). Lane kLanes n + i:
  // pre gate i for block n % kRanks (and further ones); the post gates of block 0's lanes are returned. With two sides:
  // gate i of the side. Nobody reads the post gates that are told; that keeps the blocks in step.
  __device__ __forceinline__ void make_gates(const IhcArguments& a) const {
    constexpr int kLanes = kHc > 4 ? 8 : 4, kPeersAtOnce = 32 / kLanes;
    constexpr bool kReturns = Shape::kOp != kHead && Shape::kSides == 1;
    const int i = lane % kLanes, peer = kOwn == 1 ? lane / kLanes : lane / kLanes % kRanks,
              own = kOwn == 1 ? 0 : lane / (kLanes * kRanks);
    const int token = kOwn == 1 ? rank % kTileTokens : rank + own * kRanks;
    const bool used = i < kHc;
    const GateScales pre = GateScales::of<kHc>(i, used, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
    const GateScales post =
        GateScales::of<kHc>(kHc + i, used && Shape::kOp != kHead, a.hc_scale, a.hc_base, a.magnitude, a.hc_eps);
#pragma unroll 1
    for (int tile = kAlternate ? rank / kTileTokens : 0; tile < tiles; tile += kAlternate ? 2 : 1) {
      const Turn<kStages> turn(tile);
      const Turn<kSlots> slot(tile);
      barrier_wait(&full[turn.index], turn.parity);  // for `places`
      barrier_wait_cluster(&slot_full[slot.index], slot.parity);
      if (lane == 0) barrier_expect(&slot_full[slot.index], kSlotBytes);
      const float* from = slots + 4 * (kOwn == 1 ? slot.index : slot.index * kOwn + own) * kRanks * kTokenQuads;
      const auto tree = [&](int place) {
        return tree_of<kRanks>([&](int r) { return from[4 * r * kTokenQuads + place]; });
      };
      const float squares = tree(kOutputs);
      const bool other = Shape::kSides == 2 && side_of(tile) == 1;
      const float gate = (other ? post : pre).gate<static_cast<int>(Shape::kDepth)>(tree(i), squares, a.norm_eps);
      const int2 place = places[turn.index];  // before the gates are told: then the stage may be loaded anew
      const int post_row = Shape::kPostRow + i;
      const float early = kReturns && kAlternate ? tree(post_row) : 0.0f;  // before, too: see kSlots
      __syncwarp();
      if (used) {
#pragma unroll
        for (int more = 0; more < kRanks; more += kPeersAtOnce)
          store_peer(peer_address(shared_address(gates + (turn.index * kTileTokens + token) * kHc + i), peer + more),
                     gate, peer_address(shared_address(&gates_full[turn.index]), peer + more));
      }
      if constexpr (Shape::kSides == 2) {
        if (other && lane < kHc && token < place.y) a.h_next[(place.x + token) * a.h_next_tokens + i] = gate;
      }
      if (kReturns && (kOwn == 1 ? lane < kHc : used && peer == 0) && token < place.y)
        a.h_next[(place.x + token) * a.h_next_tokens + i] =
            post.gate<static_cast<int>(Shape::kDepth)>(kAlternate ? early : tree(post_row), squares, a.norm_eps);
    }
  }
};

}  // namespace hccupy
