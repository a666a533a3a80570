// Instructions that only the sm_90a kernels use: cluster barriers, bulk copies, transaction barriers, and their mma
// forms.
//
// One function an instruction; a comment where the ordering rule is not plain from the name. Portable twins, for the
// simulator, of what the rope kernels need: barriers and bulk loads.
#pragma once

#include "common/ptx.cuh"

namespace hccupy {

using Barrier = unsigned long long;

#ifdef __CUDA_ARCH__

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// ---- clusters -------------------------------------------------------------------------------------------------

// Relaxed: orders nothing but the barriers made visible by fence_barrier_init (.release would cost a MEMBAR.GPU).
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same shared variable in the block `rank` of this cluster.
__device__ __forceinline__ unsigned int peer_address(unsigned int address, unsigned int rank) {
  unsigned int peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// ---- transaction barriers -------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(Barrier* barrier, unsigned int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Returns once the phase of that parity has ended. A fresh barrier passes parity 1.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned int parity) {
  unsigned int done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}
// The same for bytes that peers of the cluster stored.
__device__ __forceinline__ void barrier_wait_cluster(Barrier* barrier, unsigned int parity) {
  unsigned int done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// ---- stores into a peer's shared memory that count on the peer's barrier --------------------------------------

__device__ __forceinline__ void store_peer(unsigned int address, float4 value, unsigned int barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_peer(unsigned int address, float value, unsigned int barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value),
               "r"(barrier)
               : "memory");
}

// One lane of the warp, by name: the compiler then knows that a bulk copy is asked for once, and leaves out its loop
// over the lanes.
__device__ __forceinline__ bool elect_lane() {
  unsigned int elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// ---- bulk copies: 16-byte aligned on both sides, a multiple of 16 bytes ---------------------------------------

__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// L2 fetches the bytes; nothing is read or written.
__device__ __forceinline__ void bulk_prefetch(const void* from, unsigned int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The shared memory of this thread's stores may be written again.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Makes this thread's ordinary shared stores visible to bulk copies that are ordered after it.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// As one predicated instruction.
__device__ __forceinline__ void store_whole_if(bool wanted, uint4* to, uint4 word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<unsigned int>(wanted)),
               "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// async_copy to a place that is a shared address already.
template <int kBytes>
__device__ __forceinline__ void async_copy_to(unsigned int to, const void* from) {
  async_copy<kBytes>(__cvta_shared_to_generic(to), from);
}

// Arrives on the barrier once this thread's async_copy are there.
__device__ __forceinline__ void async_copies_arrive(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- a barrier of some warps of the block -----------------------------------------------------------------------

// All kCount threads of them come here. (With __syncthreads from two places, as all threads of the block, synccheck
// sees a divergent barrier.)
template <int kCount>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kCount) : "memory");
}

// The value is worked out by here, more strictly than by settle (ptx.cuh): ptxas moves arithmetic to where it is used,
// but no shuffle. All lanes.
__device__ __forceinline__ void settle_early(unsigned int& value) {
  asm volatile("{\n.reg .u32 lane;\nmov.u32 lane, %%laneid;\nshfl.sync.idx.b32 %0, %0, lane, 31, 0xffffffff;\n}"
               : "+r"(value));
}
__device__ __forceinline__ void settle_early(int& value) {
  unsigned int bits = value;
  settle_early(bits);
  value = bits;
}
__device__ __forceinline__ void settle_early(float& value) {
  unsigned int bits = float_bits(value);
  settle_early(bits);
  value = float_from_bits(bits);
}
template <class Byte>
__device__ __forceinline__ void settle_early(Byte*& pointer) {
  const size_t at = __cvta_generic_to_global(pointer);
  unsigned int low = static_cast<unsigned int>(at), high = static_cast<unsigned int>(at >> 32);
  settle_early(low), settle_early(high);
  pointer = static_cast<Byte*>(__cvta_global_to_generic(static_cast<size_t>(high) << 32 | low));
}

// ---- registers per thread, by warpgroup ------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mma, float32 sums -----------------------------------------------------------------------------------------

template <bool kBf16>
__device__ __forceinline__ void mma_16x8x16(float (&sum)[4], unsigned int a0, unsigned int a1, unsigned int a2,
                                            unsigned int a3, unsigned int b0, unsigned int b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

template <bool kBf16>
__device__ __forceinline__ void mma_16x8x8(float (&sum)[4], unsigned int a0, unsigned int a1, unsigned int b0) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b0));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b0));
  }
}

#else

// A barrier in 64 bits. Copies are done at once, so their bytes may be counted before they are expected.
struct BarrierState {
  int bytes;
  short pending;
  unsigned char arrivals, phase;
};
inline BarrierState barrier_state(const Barrier* barrier) {
  BarrierState state;
  memcpy(&state, barrier, sizeof state);
  return state;
}
inline void barrier_change(Barrier* barrier, int arrived, int bytes) {
  BarrierState state = barrier_state(barrier);
  state.pending -= arrived;
  state.bytes += bytes;
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.arrivals;
  }
  memcpy(barrier, &state, sizeof state);
}
inline void barrier_init(Barrier* barrier, unsigned int arrivals) {
  const BarrierState state{0, static_cast<short>(arrivals), static_cast<unsigned char>(arrivals), 0};
  memcpy(barrier, &state, sizeof state);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(Barrier* barrier) { barrier_change(barrier, 1, 0); }
inline void barrier_expect(Barrier* barrier, unsigned int bytes) {
  barrier_change(barrier, 1, static_cast<int>(bytes));
}
inline void barrier_wait(Barrier* barrier, unsigned int parity) {
  while (barrier_state(barrier).phase == parity) __nanosleep(1);  // lets other threads run
}
inline void bulk_load(void* to, const void* from, unsigned int bytes, Barrier* barrier) {
  memcpy(to, from, bytes);
  barrier_change(barrier, 0, -static_cast<int>(bytes));
}

#endif

}  // namespace hccupy
