// The inline PTX instructions of the library (those of the sm_90a kernels alone: sm90_ptx.cuh), each with a portable
// C++ twin that gives the same bits.
//
// Under NVRTC (__CUDA_ARCH__ is defined) the instruction is used where the architecture has it; the twin serves
// older architectures and the CPU simulator, which compiles the kernels with g++ and supplies the CUDA words.
// Nothing here flushes subnormals to zero.
#pragma once

namespace hccupy {

// ---- bits -------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned int float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  unsigned int bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

__device__ __forceinline__ float float_from_bits(unsigned int bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Works the value out here: the compiler neither repeats that in a loop behind nor puts it off. ptxas may still: then
// settle_early (sm90_ptx.cuh).
__device__ __forceinline__ void settle(float& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(value));
#else
  (void)value;
#endif
}

template <typename T>
__device__ __forceinline__ void settle(const T*& address) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(address));
#else
  (void)address;
#endif
}

// ---- 1 / x, to an ulp; x and the result are normal numbers ---------------------------------------------------

__device__ __forceinline__ float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// ---- float32 <-> 16-bit floats, round to nearest even ------------------------------------------------------

__device__ __forceinline__ float bf16_to_float(unsigned short bits) {
  return float_from_bits(static_cast<unsigned int>(bits) << 16);
}

__device__ __forceinline__ unsigned short float_to_bf16(float value) {
#ifdef __CUDA_ARCH__
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned int bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the one NaN that cvt gives
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Two at once: `low` in bits 0-15. One instruction where two single conversions need three.
__device__ __forceinline__ unsigned int floats_to_bf16x2(float low, float high) {
#ifdef __CUDA_ARCH__
  unsigned int bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return float_to_bf16(low) | static_cast<unsigned int>(float_to_bf16(high)) << 16;
#endif
}

__device__ __forceinline__ float f16_to_float(unsigned short bits) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
#endif
}

__device__ __forceinline__ unsigned short float_to_f16(float value) {
#ifdef __CUDA_ARCH__
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  if (value != value) return 0x7fff;
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
#endif
}

__device__ __forceinline__ unsigned int floats_to_f16x2(float low, float high) {
#ifdef __CUDA_ARCH__
  unsigned int bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return float_to_f16(low) | static_cast<unsigned int>(float_to_f16(high)) << 16;
#endif
}

// ---- float32 <-> e4m3 --------------------------------------------------------------------------------------

// Saturating (+-Inf too) to +-448, round to nearest even; NaN gives 0x7f. The integer form of cvt.
__device__ __forceinline__ unsigned char float_to_e4m3_portable(float value) {
  const unsigned int bits = float_bits(value);
  const unsigned int sign = bits >> 24 & 0x80u;
  const unsigned int magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e80000u) return static_cast<unsigned char>(sign | 0x7e);  // 464, the midpoint above 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: a multiple of 2^-9, rounded by the addition of 2^14 (its ulp is 2^-9)
    return static_cast<unsigned char>(sign | (float_bits(float_from_bits(magnitude) + 16384.0f) & 0xffu));
  }
  // Keep 3 of 23 mantissa bits; a carry runs into the exponent. Bias 127 becomes 7.
  const unsigned int rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<unsigned char>(sign | ((rounded >> 20) - (120u << 3)));
}

// Two at once: `low` in bits 0-7.
__device__ __forceinline__ unsigned short floats_to_e4m3x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return static_cast<unsigned short>(float_to_e4m3_portable(low) | float_to_e4m3_portable(high) << 8);
#endif
}

__device__ __forceinline__ unsigned char float_to_e4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return static_cast<unsigned char>(floats_to_e4m3x2(value, 0.0f));
#else
  return float_to_e4m3_portable(value);
#endif
}

__device__ __forceinline__ float e4m3_to_float(unsigned char code) {
  const unsigned int sign = static_cast<unsigned int>(code & 0x80) << 24;
  const unsigned int magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return float_from_bits(sign | 0x7fc00000u);
  if (magnitude < 8) return float_from_bits(sign | float_bits(static_cast<float>(magnitude) * 0.001953125f));
  return float_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

// ---- global memory: one access of 4, 8 or 16 bytes, aligned to its size -------------------------------------
//
// load_once    read by this thread only: does not displace others' lines in L1. Coherent, so memory that the
//              same thread writes later (an update in place) is allowed.
// load_shared  weights that other threads and blocks read too: read-only for the whole kernel.
// store_once   data that will not be read again soon: first to leave L2.
// store_whole  without a hint. Written as *to = word, 16 bytes came out as four stores of 4 bytes in some instances.
//
// The loads are volatile so that none is hoisted above wait_for_previous_grid. Ordinary memory accesses may still
// be moved across them: put a barrier between a store and the load_once that must see it.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ unsigned int load_once(const unsigned int* from) {
  unsigned int word;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
  uint2 word;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(from));
  return word;
}
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}
__device__ __forceinline__ unsigned int load_shared(const unsigned int* from) {
  unsigned int word;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}
__device__ __forceinline__ uint2 load_shared(const uint2* from) {
  uint2 word;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(from));
  return word;
}
__device__ __forceinline__ uint4 load_shared(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}
__device__ __forceinline__ void store_once(unsigned int* to, unsigned int word) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_once(uint2* to, uint2 word) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
}
__device__ __forceinline__ void store_once(uint4* to, uint4 word) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_whole(unsigned int* to, unsigned int word) { *to = word; }
__device__ __forceinline__ void store_whole(uint2* to, uint2 word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");
}
__device__ __forceinline__ void store_whole(uint4* to, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
#else
template <typename Word>
inline Word load_once(const Word* from) {
  return *from;
}
template <typename Word>
inline Word load_shared(const Word* from) {
  return *from;
}
template <typename Word>
inline void store_once(Word* to, Word word) {
  *to = word;
}
template <typename Word>
inline void store_whole(Word* to, Word word) {
  *to = word;
}
#endif

// One or two bytes have no hinted form worth having.
__device__ __forceinline__ unsigned short load_once(const unsigned short* from) { return *from; }
__device__ __forceinline__ unsigned char load_once(const unsigned char* from) { return *from; }
__device__ __forceinline__ unsigned short load_shared(const unsigned short* from) { return *from; }
__device__ __forceinline__ unsigned char load_shared(const unsigned char* from) { return *from; }
__device__ __forceinline__ void store_once(unsigned short* to, unsigned short word) { *to = word; }
__device__ __forceinline__ void store_once(unsigned char* to, unsigned char word) { *to = word; }
__device__ __forceinline__ void store_whole(unsigned short* to, unsigned short word) { *to = word; }
__device__ __forceinline__ void store_whole(unsigned char* to, unsigned char word) { *to = word; }

// Ask for the 128-byte line in L2. No value is consumed, so it is harmless before wait_for_previous_grid.
__device__ __forceinline__ void prefetch_line(const void* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#else
  (void)address;
#endif
}

// ---- copies from global to shared memory behind the program's back: 4, 8 or 16 bytes, aligned to their size --------
//
// The thread that asked sees the bytes after async_wait; others need a barrier as well. async_commit closes a group,
// async_wait<n> returns when all but the last n groups have come.

// kNear: by way of L1, for what other warps of the multiprocessor ask for as well.
template <int kBytes, bool kNear = false>
__device__ __forceinline__ void async_copy(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async can copy");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned int at = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16 && !kNear) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(kBytes) : "memory");
  }
#else
  memcpy(to, from, kBytes);
#endif
}

__device__ __forceinline__ void async_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kLast>
__device__ __forceinline__ void async_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
#endif
}

// ---- programmatic dependent launch --------------------------------------------------------------------------

// Returns when the grid before this one in the stream is complete and its writes are visible. Nothing that it
// may have written is relied on, and nothing at all is written, above this line. No-op unless launched with the
// programmatic attribute on sm_90 or newer.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDA_ARCH__)
  previous_grid_ends();
#endif
}

// Once every block has said so (or ended), the next grid may start its own prologue.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- thread-block clusters, sm_90 and newer; elsewhere a cluster is one block ---------------------------------

__device__ __forceinline__ int block_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// A barrier of all threads of the cluster. A block must not end while others read its shared memory.
__device__ __forceinline__ void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// 8 bytes at the place of `local` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float2 load_of_block(const float2* local, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  float2 value;
  asm volatile(
      "{\n.reg .u32 peer;\nmapa.shared::cluster.u32 peer, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [peer];\n}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(local))), "r"(rank)
      : "memory");
  return value;
#else
  (void)rank;
  return *local;
#endif
}

// ---- tensor cores: sum += a b, a 16 x 8, b 8 x 8, operands of 11 significant bits (tf32) -----------------------
//
// Lane 4 g + t holds a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4], then b[t][g], b[t + 4][g], and of sum
// [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1].
__device__ __forceinline__ void mma_tf32(float (&sum)[4], const float (&a)[4], const float (&b)[2]) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(a[2])), "r"(float_bits(a[3])),
        "r"(float_bits(b[0])), "r"(float_bits(b[1])));
#else
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  double exact[4] = {sum[0], sum[1], sum[2], sum[3]};
  for (int k = 0; k < 8; ++k) {
    for (int j = 0; j < 4; ++j) {
      const float left = __shfl_sync(0xffffffffu, a[j / 2 + k / 4 * 2], 4 * g + k % 4);
      const float right = __shfl_sync(0xffffffffu, b[k / 4], 4 * (2 * t + j % 2) + k % 4);
      exact[j] += static_cast<double>(float_from_bits(float_bits(left) & 0xffffe000u)) *
                  static_cast<double>(float_from_bits(float_bits(right) & 0xffffe000u));
    }
  }
  for (int j = 0; j < 4; ++j) sum[j] = static_cast<float>(exact[j]);
#endif
}

}  // namespace hccupy

// The block's dynamic shared memory, aligned to 16 bytes. One declaration for every kernel.
extern __shared__ uint4 shared_bytes[];
