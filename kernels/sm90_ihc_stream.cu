// iHC pre, head and post_pre for many tokens on sm_90a: persistent clusters of 2 to 16 blocks, weights in registers, x
// read once.
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
// Baked: hc (2 to 8), hidden (a multiple of 8 kRanks), kRanks (2, 4, 8 or 16, blocks of a cluster: so many that the
// weights take up to 168 registers of a thread), the dtypes, kVec (8: x, y, z, w 16-byte aligned in address and
// strides; 4, 2, 1: elements an access of x and y may hold; the bits are the same), kLanesAsk (the mma lanes ask for
// the first tile; only with at most two tiles a cluster, kVec 8 and one side). Launch: grid = kRanks * clusters (any
// number: tokens are dealt out evenly), block = 512, cluster kRanks, shared bytes 232448 (what a block may have).
// With the programmatic attribute, weights are fetched, and L2 is asked for x, before the previous kernel ends.
// Over 4 channels, pre and post_pre have more outputs than a cluster has registers for the weights of. pre: the first
// half of the clusters (of at least 2) works on the pre gates and z, the others read x again, for the post gates.
// post_pre, which may update the residual in place: each cluster does both for its own tokens, the post gates first.
// common/sm90_stream.cuh has the roles of the warps and how they are linked.
#include "common/sm90_stream_apply.cuh"
#include "common/sm90_stream_copy.cuh"
#include "common/sm90_stream_sums.cuh"

namespace hccupy {

struct IhcKernel {
  using Layout = StreamLayout;
  using Shape = Layout::Shape;
  static constexpr int kRanks = Layout::kRanks, kThreads = Layout::kThreads, kBlocks = Layout::kBlocks;
  static constexpr int kMmaWarps = Layout::kMmaWarps, kApplyWarps = Layout::kApplyWarps;

  // No block barrier: the loader makes its barriers and asks for its first tiles at once, the mma warps ask for their
  // weights at once, and the cluster barrier tells everyone else that the barriers are there. A block may end once its
  // own tiles are done: every byte that peers send it has arrived by then.
  static __device__ __forceinline__ void run(const IhcArguments& a) {
    const int warp = threadIdx.x >> 5;
    // Half a tile a cluster at most: nothing of it is in the next grid's way. Else the loader says so. hc 4, hidden
    // 2560, 40 tokens in 15 clusters 2.93 -> 2.76 us.
    if (a.tokens <= Layout::kHalfTokens * (gridDim.x / kRanks)) let_next_grid_start();
    // The compiler sets the last branch first: the loader, so that its instructions, which a launch waits for, stand in
    // one line and are fetched soonest.
    if (warp < kMmaWarps) {
      StreamSums{}.multiply_tiles(a);
    } else if (warp < kMmaWarps + kApplyWarps) {
      give_registers<Layout::kApplyRegisters>();
      cluster_arrive();
      StreamApply r;
      r.place();
      r.lane = Layout::fresh_thread() & 31;
      r.deal(a.tokens);
      const int thread = Layout::fresh_thread() - kMmaWarps * 32;
      if constexpr (Shape::kHasNorm) r.load_norm_weight(a, thread);
      cluster_wait();
      wait_for_previous_grid();
      if constexpr (Shape::kHasNorm) {
        r.apply_tiles_norm(a, thread >> 5);
      } else {
        r.apply_tiles(a, thread >> 5);
      }
    } else {
      give_registers<Layout::kHelperRegisters>();
      const int helper = (Layout::fresh_thread() >> 5) - kMmaWarps - kApplyWarps;
      if (helper > 0) {
        if (helper == 3) StreamCopy::prefetch_token(a);
        Layout at;
        at.place();
        at.lane = Layout::fresh_thread() & 31;
        if (helper == 1) at.make_other_barriers();
        cluster_arrive();
        at.deal(a.tokens);
        if (Shape::kPost && helper == 3) StreamCopy{at}.prefetch_tiles(a);
        cluster_wait();
        wait_for_previous_grid();
        if (helper == 1) StreamSums{at}.make_gates(a);
        if (Shape::kPost && helper == 2) StreamCopy{at}.store_posts(a);
        if (Layout::kTwoLoaders && helper == 2) StreamCopy{at}.load_odd_tokens(a);
        if (helper == 3) StreamSums{at}.tell_sums();
      } else {
        StreamCopy r;
        r.place();
        r.lane = Layout::fresh_thread() & 31;
        r.make_ring_barriers();
        cluster_arrive();
        r.deal(a.tokens);
        r.load_tiles(a);
      }
    }
  }
};

}  // namespace hccupy

#include "common/sm90_ihc_entry.cuh"
