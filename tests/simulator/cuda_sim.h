// The part of CUDA C++ that the kernels use, for g++: a kernel compiled with this header runs on the CPU,
// one fiber per CUDA thread (cuda_sim.cpp holds the scheduler).
//
// No system header is included on purpose: NVRTC compiles the kernels without any, so a kernel that needs one
// must fail here too.
//
// __shared__ is thread_local: the word is legal both for a static array in a function and after `extern` (dynamic
// shared memory), and it gathers every shared variable of a kernel in one segment that each block poisons.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition) ((condition) ? void() : __builtin_unreachable())
#define CUDA_SIM 1
// nvcc takes `__shared__ alignas(16) float x[4]`; g++ wants the standard word in front, but its own anywhere.
#define alignas(bytes) __attribute__((aligned(bytes)))

#define CUDA_SIM_UNWATCHED __attribute__((no_sanitize("thread")))  // no part of the kernel: watch.cpp is not told

using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));

// ---- vector types -------------------------------------------------------------------------------------------------

#define CUDA_SIM_VECTORS(name, type)                                                          \
  struct name##1 { type x; };                                                                 \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                    \
  struct name##3 { type x, y, z; };                                                           \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  inline constexpr name##1 make_##name##1(type x) { return {x}; }                             \
  inline constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }                  \
  inline constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }       \
  inline constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

CUDA_SIM_VECTORS(char, signed char)
CUDA_SIM_VECTORS(uchar, unsigned char)
CUDA_SIM_VECTORS(short, short)
CUDA_SIM_VECTORS(ushort, unsigned short)
CUDA_SIM_VECTORS(int, int)
CUDA_SIM_VECTORS(uint, unsigned)
CUDA_SIM_VECTORS(longlong, long long)
CUDA_SIM_VECTORS(ulonglong, unsigned long long)
CUDA_SIM_VECTORS(float, float)
CUDA_SIM_VECTORS(double, double)
#undef CUDA_SIM_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Written by the scheduler before it resumes a fiber.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// ---- the scheduler's side -----------------------------------------------------------------------------------------

namespace cuda_sim {

enum class WarpOp : int { kSync, kShuffle, kBallot };

// The place of a call, taken where the call is written.
struct Place {
  const char* file;
  int line;
};

// Gives `value` to the warp and waits for every live lane of `mask`. Returns the value of lane `source` (kShuffle)
// or the bits of the lanes whose value is not 0 (kBallot).
unsigned long long warp_collective(WarpOp op, unsigned mask, unsigned long long value, int source, Place place);

// Waits for every live thread of the block. Returns how many of them gave a predicate that is not 0.
int block_barrier(int predicate, Place place);

// Returns when the grid before this one has ended: what it writes is there (Simulated.launch, `previous`).
void previous_grid_ends();

// Lets the other threads go on: for a loop that waits for a value in memory.
void yield();

// Ends the launch with an error that names the block and the thread.
[[noreturn]] void fail(const char* message);

int lane();
unsigned live_lanes();
void atomic_access(const void* p, size_t bytes);  // tells the watcher (watch.cpp)

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
inline T shuffle(unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 64 bits");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_collective(WarpOp::kShuffle, mask, bits, source, place);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

inline void check_width(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("the width of a shuffle is a power of two <= 32");
}

// ---- calling the entry: params[i] points at the value of parameter i, as for cuLaunchKernel -------------------------

template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};

template <int... kIndex>
struct indices {};
template <int kCount, int... kIndex>
struct make_indices : make_indices<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct make_indices<0, kIndex...> {
  using type = indices<kIndex...>;
};

template <class... Params, int... kIndex>
CUDA_SIM_UNWATCHED inline void invoke(void (*entry)(Params...), void** params, indices<kIndex...>) {
  (void)params;
  entry(*static_cast<typename remove_const<Params>::type*>(params[kIndex])...);
}

template <class... Params>
CUDA_SIM_UNWATCHED inline void invoke(void (*entry)(Params...), void** params) {
  invoke(entry, params, typename make_indices<sizeof...(Params)>::type{});
}

// One letter a parameter, and its size: p pointer, f floating, i signed, u unsigned, s anything else.
template <class T>
constexpr char letter_of() {
  if constexpr (__is_class(T))
    return 's';
  else
    return T(-1) < T(0) ? 'i' : 'u';
}
template <class T>
struct kind {
  static constexpr char letter = letter_of<T>();
};
template <class T>
struct kind<T*> {
  static constexpr char letter = 'p';
};
template <>
struct kind<float> {
  static constexpr char letter = 'f';
};
template <>
struct kind<double> {
  static constexpr char letter = 'f';
};

template <class... Params>
inline int describe(void (*)(Params...), char* letters, int* sizes) {
  const char letter[] = {kind<typename remove_const<Params>::type>::letter..., '\0'};
  const int size[] = {static_cast<int>(sizeof(Params))..., 0};
  for (int i = 0; i < static_cast<int>(sizeof...(Params)) && i < 256; ++i) letters[i] = letter[i], sizes[i] = size[i];
  return sizeof...(Params);
}

}  // namespace cuda_sim

#define CUDA_SIM_PLACE cuda_sim::Place place = {__builtin_FILE(), __builtin_LINE()}

// ---- barriers, votes, shuffles ------------------------------------------------------------------------------------

inline void __syncthreads(CUDA_SIM_PLACE) { cuda_sim::block_barrier(0, place); }
inline int __syncthreads_count(int predicate, CUDA_SIM_PLACE) { return cuda_sim::block_barrier(predicate, place); }
inline int __syncthreads_or(int predicate, CUDA_SIM_PLACE) { return cuda_sim::block_barrier(predicate, place) != 0; }
inline int __syncthreads_and(int predicate, CUDA_SIM_PLACE) { return cuda_sim::block_barrier(!predicate, place) == 0; }

inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_SIM_PLACE) {
  cuda_sim::warp_collective(cuda_sim::WarpOp::kSync, mask, 0, 0, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_SIM_PLACE) {
  return static_cast<unsigned>(cuda_sim::warp_collective(cuda_sim::WarpOp::kBallot, mask, predicate != 0, 0, place));
}
inline int __any_sync(unsigned mask, int predicate, CUDA_SIM_PLACE) {
  return __ballot_sync(mask, predicate, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_SIM_PLACE) {
  return __ballot_sync(mask, !predicate, place) == 0;
}
// Every lane that has not returned: the simulator knows no lockstep.
inline unsigned __activemask() { return cuda_sim::live_lanes(); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_SIM_PLACE) {
  cuda_sim::check_width(width);
  return cuda_sim::shuffle(mask, value, (cuda_sim::lane() & -width) | (source & (width - 1)), place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_SIM_PLACE) {
  cuda_sim::check_width(width);
  const int lane = cuda_sim::lane(), source = lane ^ lane_mask;
  return cuda_sim::shuffle(mask, value, source < (lane & -width) + width ? source : lane, place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_SIM_PLACE) {
  cuda_sim::check_width(width);
  const int lane = cuda_sim::lane(), source = lane + static_cast<int>(delta);
  return cuda_sim::shuffle(mask, value, source < (lane & -width) + width ? source : lane, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_SIM_PLACE) {
  cuda_sim::check_width(width);
  const int lane = cuda_sim::lane(), source = lane - static_cast<int>(delta);
  return cuda_sim::shuffle(mask, value, source >= (lane & -width) ? source : lane, place);
}

// No word of CUDA: the twin of griddepcontrol.wait.
inline void previous_grid_ends() { cuda_sim::previous_grid_ends(); }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { cuda_sim::yield(); }
[[noreturn]] inline void __trap() { cuda_sim::fail("__trap()"); }

// ---- memory -------------------------------------------------------------------------------------------------------

extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldca(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline T __ldlu(const T* p) {
  return *p;
}
template <class T>
inline T __ldcv(const T* p) {
  return *p;
}
template <class T>
inline void __stwb(T* p, T value) {
  *p = value;
}
template <class T>
inline void __stcg(T* p, T value) {
  *p = value;
}
template <class T>
inline void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
inline void __stwt(T* p, T value) {
  *p = value;
}

// Fibers are never interrupted between two scheduling points, so a plain read-modify-write is atomic.
namespace cuda_sim {
template <class T>
struct same {
  using type = T;
};
template <class T>
using given = typename same<T>::type;  // keeps the pointer alone in charge of T
}  // namespace cuda_sim
#define CUDA_SIM_ATOMIC(name, result)                                      \
  template <class T>                                                       \
  CUDA_SIM_UNWATCHED __noinline__ T name(T* p, cuda_sim::given<T> value) { \
    cuda_sim::atomic_access(p, sizeof(T));                                 \
    const T old = *p;                                                      \
    *p = (result);                                                         \
    return old;                                                            \
  }
CUDA_SIM_ATOMIC(atomicAdd, static_cast<T>(old + value))
CUDA_SIM_ATOMIC(atomicSub, static_cast<T>(old - value))
CUDA_SIM_ATOMIC(atomicMin, value < old ? value : old)
CUDA_SIM_ATOMIC(atomicMax, value > old ? value : old)
CUDA_SIM_ATOMIC(atomicAnd, static_cast<T>(old& value))
CUDA_SIM_ATOMIC(atomicOr, static_cast<T>(old | value))
CUDA_SIM_ATOMIC(atomicXor, static_cast<T>(old ^ value))
CUDA_SIM_ATOMIC(atomicExch, value)
CUDA_SIM_ATOMIC(atomicInc, old >= value ? T(0) : static_cast<T>(old + 1))
#undef CUDA_SIM_ATOMIC
template <class T>
CUDA_SIM_UNWATCHED __noinline__ T atomicCAS(T* p, cuda_sim::given<T> compare, cuda_sim::given<T> value) {
  cuda_sim::atomic_access(p, sizeof(T));
  const T old = *p;
  if (old == compare) *p = value;
  return old;
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------

extern "C" {
float fmaf(float, float, float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float rintf(float) noexcept;
float roundf(float) noexcept;
float nearbyintf(float) noexcept;
float fmodf(float, float) noexcept;
float copysignf(float, float) noexcept;
float ldexpf(float, int) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float expm1f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float powf(float, float) noexcept;
float tanhf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
void sincosf(float, float*, float*) noexcept;
double fma(double, double, double) noexcept;
double sqrt(double) noexcept;
double fabs(double) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double rint(double) noexcept;
double floor(double) noexcept;
}

// CUDA's own are within 2 ulp; this one is the exact value rounded once.
inline float rsqrtf(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }

inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
#define CUDA_SIM_MINMAX(type)                                         \
  inline constexpr type min(type a, type b) { return b < a ? b : a; } \
  inline constexpr type max(type a, type b) { return a < b ? b : a; }
CUDA_SIM_MINMAX(int)
CUDA_SIM_MINMAX(unsigned)
CUDA_SIM_MINMAX(long)
CUDA_SIM_MINMAX(unsigned long)
CUDA_SIM_MINMAX(long long)
CUDA_SIM_MINMAX(unsigned long long)
#undef CUDA_SIM_MINMAX
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline long long min(int a, long long b) { return min(static_cast<long long>(a), b); }
inline long long min(long long a, int b) { return min(a, static_cast<long long>(b)); }
inline long long max(int a, long long b) { return max(static_cast<long long>(a), b); }
inline long long max(long long a, int b) { return max(a, static_cast<long long>(b)); }

inline unsigned __float_as_uint(float x) { return cuda_sim::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_sim::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_sim::bit_cast<float>(x); }
inline float __int_as_float(int x) { return cuda_sim::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_sim::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_sim::bit_cast<double>(x); }

// CUDA's conversions saturate and turn NaN into 0.
namespace cuda_sim {
template <class Int>
inline Int saturate(double x, double low, double high) {
  return x != x ? Int(0) : x <= low ? static_cast<Int>(low) : x >= high ? static_cast<Int>(high) : static_cast<Int>(x);
}
inline int to_int(double x) { return saturate<int>(x, -2147483648.0, 2147483647.0); }
inline unsigned to_uint(double x) { return saturate<unsigned>(x, 0.0, 4294967295.0); }
}  // namespace cuda_sim
inline int __float2int_rn(float x) { return cuda_sim::to_int(__builtin_rintf(x)); }
inline int __float2int_rz(float x) { return cuda_sim::to_int(__builtin_truncf(x)); }
inline int __float2int_rd(float x) { return cuda_sim::to_int(__builtin_floorf(x)); }
inline int __float2int_ru(float x) { return cuda_sim::to_int(__builtin_ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return cuda_sim::to_uint(__builtin_rintf(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_sim::to_uint(__builtin_truncf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 0xfu;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7u)) & 0xffu;
    if (pick & 8u) byte = byte & 0x80u ? 0xffu : 0u;  // the top bit of the selector spreads the sign
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31u) >> 32);
}
