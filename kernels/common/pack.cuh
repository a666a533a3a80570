// Pack: kSize neighbouring elements, moved between memory and registers in accesses of up to 16 bytes.
//
// A pack of kBytes needs an address aligned to min(kBytes, 16): the host picks the size so that this holds.
// (Headers in common/ use no name that is a define of the command line, such as kVec.)
#pragma once

#include "common/convert.cuh"

namespace hccupy {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = unsigned char;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

template <int kDtype, int kSize>
struct Pack {
  static_assert(kSize == 1 || kSize == 2 || kSize == 4 || kSize == 8 || kSize == 16,
                "kSize must be a power of two up to 16");
  using Type = typename Element<kDtype>::Type;
  static constexpr int kBytes = kSize * static_cast<int>(sizeof(Type));
  static constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWordBytes;
  using Word = typename WordOf<kWordBytes>::Type;

  Word words[kWords];

  __device__ __forceinline__ float at(int index) const {
    Type value;
    memcpy(&value, reinterpret_cast<const char*>(words) + index * sizeof(Type), sizeof value);
    return Element<kDtype>::to_float(value);
  }

  __device__ __forceinline__ void to_floats(float (&values)[kSize]) const {
    if constexpr (kDtype == kBfloat16 && kSize % 2 == 0) {  // one instruction each; by at() the upper half takes two
#pragma unroll
      for (int k = 0; k < kSize; k += 2) {
        unsigned int pair;
        memcpy(&pair, reinterpret_cast<const char*>(words) + k * sizeof(Type), sizeof pair);
        values[k] = float_from_bits(pair << 16);
        values[k + 1] = float_from_bits(pair & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = at(k);
    }
  }

  static __device__ __forceinline__ Pack zeros() {
    Pack pack;
    memset(pack.words, 0, sizeof pack.words);
    return pack;
  }

  // Rounds each value once.
  static __device__ __forceinline__ Pack from_floats(const float (&values)[kSize]) {
    Pack pack;
    char* bytes = reinterpret_cast<char*>(pack.words);
    if constexpr (Element<kDtype>::kPairs && kSize % 2 == 0) {
#pragma unroll
      for (int k = 0; k < kSize; k += 2) {
        const auto pair = Element<kDtype>::from_floats(values[k], values[k + 1]);
        memcpy(bytes + k * sizeof(Type), &pair, sizeof pair);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const Type value = Element<kDtype>::from_float(values[k]);
        memcpy(bytes + k * sizeof(Type), &value, sizeof value);
      }
    }
    return pack;
  }

  // Plain accesses, for shared memory and for global memory that will be read again soon.
  static __device__ __forceinline__ Pack load(const void* from) {
    Pack pack;
#pragma unroll
    for (int k = 0; k < kWords; ++k) pack.words[k] = static_cast<const Word*>(from)[k];
    return pack;
  }
  __device__ __forceinline__ void store(void* to) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) static_cast<Word*>(to)[k] = words[k];
  }

  // Hinted global accesses: see ptx.cuh.
  static __device__ __forceinline__ Pack load_once(const void* from) {
    Pack pack;
#pragma unroll
    for (int k = 0; k < kWords; ++k) pack.words[k] = hccupy::load_once(static_cast<const Word*>(from) + k);
    return pack;
  }
  static __device__ __forceinline__ Pack load_shared(const void* from) {
    Pack pack;
#pragma unroll
    for (int k = 0; k < kWords; ++k) pack.words[k] = hccupy::load_shared(static_cast<const Word*>(from) + k);
    return pack;
  }
  __device__ __forceinline__ void store_whole(void* to) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) hccupy::store_whole(static_cast<Word*>(to) + k, words[k]);
  }
  __device__ __forceinline__ void store_once(void* to) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) hccupy::store_once(static_cast<Word*>(to) + k, words[k]);
  }
};

}  // namespace hccupy
