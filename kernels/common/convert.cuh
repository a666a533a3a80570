// Dtype codes of the host (defines such as kXDtype) and, for each, its storage type and its way to float32 and back.
#pragma once

#include "common/ptx.cuh"

namespace hccupy {

enum Dtype : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBfloat16 = 2,
  kFloat8E4m3 = 3,
  kUint8 = 4,
  kInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
};

// Storage of the floats that C++ has no word for. Distinct types, so that they cannot be mixed up.
struct Float16 {
  unsigned short bits;
};
struct Bfloat16 {
  unsigned short bits;
};
struct Float8E4m3 {
  unsigned char bits;
};

// Element<kDtype>::Type is what lies in memory; to_float is exact, from_float rounds once to nearest even
// (e4m3: saturating). from_floats, where there is one, converts two neighbours in one instruction.
template <int kDtype>
struct Element;

template <>
struct Element<kFloat32> {
  using Type = float;
  static constexpr bool kPairs = false;
  static __device__ __forceinline__ float to_float(Type value) { return value; }
  static __device__ __forceinline__ Type from_float(float value) { return value; }
};

template <>
struct Element<kFloat16> {
  using Type = Float16;
  using Pair = unsigned int;
  static constexpr bool kPairs = true;
  static __device__ __forceinline__ float to_float(Type value) { return f16_to_float(value.bits); }
  static __device__ __forceinline__ Type from_float(float value) { return Type{float_to_f16(value)}; }
  static __device__ __forceinline__ Pair from_floats(float low, float high) { return floats_to_f16x2(low, high); }
};

template <>
struct Element<kBfloat16> {
  using Type = Bfloat16;
  using Pair = unsigned int;
  static constexpr bool kPairs = true;
  static __device__ __forceinline__ float to_float(Type value) { return bf16_to_float(value.bits); }
  static __device__ __forceinline__ Type from_float(float value) { return Type{float_to_bf16(value)}; }
  static __device__ __forceinline__ Pair from_floats(float low, float high) { return floats_to_bf16x2(low, high); }
};

template <>
struct Element<kFloat8E4m3> {
  using Type = Float8E4m3;
  using Pair = unsigned short;
  static constexpr bool kPairs = true;
  static __device__ __forceinline__ float to_float(Type value) { return e4m3_to_float(value.bits); }
  static __device__ __forceinline__ Type from_float(float value) { return Type{float_to_e4m3(value)}; }
  static __device__ __forceinline__ Pair from_floats(float low, float high) { return floats_to_e4m3x2(low, high); }
};

// Integers are only copied or used as they are.
template <>
struct Element<kUint8> {
  using Type = unsigned char;
};
template <>
struct Element<kInt8> {
  using Type = signed char;
};
template <>
struct Element<kInt32> {
  using Type = int;
};
template <>
struct Element<kInt64> {
  using Type = long long;
};

}  // namespace hccupy
