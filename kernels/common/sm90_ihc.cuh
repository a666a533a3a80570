// The arithmetic of the sm_90a iHC kernels. Both kernels (cluster and stream) call these pieces in the same order on
// the same slices, so that a token's bits depend neither on the batch nor on the kernel that ran.
//
// Slices. A row is cut into kRanks shares of neighbouring columns, one for each block of the streaming kernel's
// cluster. A share is cut into groups of 32 columns; a unit is (group, half of the channels). One warp runs a unit as
// one chain of mma.m16n8k16 from a zero sum, for 8 tokens. Units are added in sequence in chunks, 8 in a share, and the
// chunks of a token in a balanced binary tree:
//   dot = tree over 8 kRanks chunks ( ((unit 0 + unit 1) + unit 2) + ... ).
// Where the columns do not fill their groups, or the units their chunks, the last ones are short or empty: zeros there.
// A part is a 16th of the chunks, what a block of the kernel for few tokens works on.
//
// Operands. A = weight rows (8 outputs; rows that an op lacks are zero), B = 8 tokens of x, exact in their own dtype.
// The order of k inside a block of 32 is free, so lane (g, t) = (lane / 4, lane % 4) takes 8 neighbouring columns at
// 8t: one 16-byte load of token g gives the B operand of two k-steps, and the weights of output g need no packing.
//   bfloat16: w = hi + mid + lo, cut by truncation, which is exact for all 24 bits of w. Rows 0-7 hold hi, rows 8-15
//             mid; lo is half a tile, so the two k-steps share one A operand and each uses its half of the sums.
//   float16:  w * 2^e = hi + mid, rounded, off by at most 2^-24 of w; e puts the unit's largest |w| of that output
//             at 2^14, which keeps mid away from float16's subnormals. The sum is scaled back, exactly.
// Sums of squares ride along: A = x of the same registers, and the diagonal is the answer.
#pragma once

#include "common/convert.cuh"
#include "common/ihc.cuh"
#include "common/pack.cuh"
#include "common/sm90_ptx.cuh"

namespace hccupy {

constexpr int kTileTokens = 8;
constexpr int kOutputs = 8;
// What a slice says about a tile: dots [8 tokens][8 outputs], then the sums of squares [8 tokens].
constexpr int kPartials = kTileTokens * kOutputs + kTileTokens;

enum IhcOp : int { kPre = 0, kHead = 1, kPostPre = 2 };

// ---- x of 16 bits ---------------------------------------------------------------------------------------------

template <int kXDtype>
__device__ __forceinline__ void unpack(unsigned int pair, float& low, float& high) {
  if constexpr (kXDtype == kBfloat16) {
    low = float_from_bits(pair << 16);
    high = float_from_bits(pair & 0xffff0000u);
  } else {
    low = f16_to_float(static_cast<unsigned short>(pair));
    high = f16_to_float(static_cast<unsigned short>(pair >> 16));
  }
}
template <int kXDtype>
__device__ __forceinline__ void unpack(uint4 v, float (&values)[8]) {
  unpack<kXDtype>(v.x, values[0], values[1]);
  unpack<kXDtype>(v.y, values[2], values[3]);
  unpack<kXDtype>(v.z, values[4], values[5]);
  unpack<kXDtype>(v.w, values[6], values[7]);
}
template <int kXDtype>
__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
  using E = Element<kXDtype>;
  return uint4{E::from_floats(values[0], values[1]), E::from_floats(values[2], values[3]),
               E::from_floats(values[4], values[5]), E::from_floats(values[6], values[7])};
}

// 8 elements of global memory at any alignment that holds kVec of them (8: one 16-byte access). The bits do not depend
// on kVec.
template <int kVec>
struct Octet {
  static_assert(kVec == 1 || kVec == 2 || kVec == 4 || kVec == 8,
                "kVec is the number of 2-byte elements an access may hold");
  static __device__ __forceinline__ uint4 load(const void* from) {
    if constexpr (kVec == 8) {
      return *static_cast<const uint4*>(from);
    } else if constexpr (kVec == 4) {
      const uint2 a = static_cast<const uint2*>(from)[0], b = static_cast<const uint2*>(from)[1];
      return uint4{a.x, a.y, b.x, b.y};
    } else if constexpr (kVec == 2) {
      const unsigned int* p = static_cast<const unsigned int*>(from);
      return uint4{p[0], p[1], p[2], p[3]};
    } else {
      const unsigned short* p = static_cast<const unsigned short*>(from);
      return uint4{p[0] | unsigned(p[1]) << 16, p[2] | unsigned(p[3]) << 16, p[4] | unsigned(p[5]) << 16,
                   p[6] | unsigned(p[7]) << 16};
    }
  }
  // Without a branch, into which the compiler would move whatever makes v.
  static __device__ __forceinline__ void store_if(bool wanted, void* to, uint4 v) {
    if constexpr (kVec == 8) {
      store_whole_if(wanted, static_cast<uint4*>(to), v);
    } else {
      if (wanted) store(to, v);
    }
  }
  static __device__ __forceinline__ void store(void* to, uint4 v) {
    if constexpr (kVec == 8) {
      store_whole(static_cast<uint4*>(to), v);
    } else if constexpr (kVec == 4) {
      static_cast<uint2*>(to)[0] = uint2{v.x, v.y};
      static_cast<uint2*>(to)[1] = uint2{v.z, v.w};
    } else {
      const unsigned int words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kVec == 2) {
          static_cast<unsigned int*>(to)[k] = words[k];
        } else {
          static_cast<unsigned short*>(to)[2 * k] = static_cast<unsigned short>(words[k]);
          static_cast<unsigned short*>(to)[2 * k + 1] = static_cast<unsigned short>(words[k] >> 16);
        }
      }
    }
  }
};

// ---- weights --------------------------------------------------------------------------------------------------

// 8 neighbouring float32. Two plain 16-byte loads: no_allocate made each fetch its sector twice (4.7 against 4.3 us at
// one token).
template <bool kAligned>
__device__ __forceinline__ void load_weights(const float* from, float (&w)[8]) {
  if constexpr (kAligned) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] = __ldg(from + k);
  }
}

template <int kXDtype, int kBlocks>  // blocks of 32 columns in a unit
struct UnitWeights {
  static constexpr bool kBf16 = kXDtype == kBfloat16;
  static constexpr int kRegisters = kBf16 ? 12 : 8;
  unsigned int pieces[kBlocks][kRegisters];
  float scale;  // float16 only: what the sums are multiplied with

  // Operand order: k-step 0 {hi, mid, hi, mid}, k-step 1 the same, then lo of k-step 0 in rows 0-7, of k-step 1 in rows
  // 8-15.
  __device__ __forceinline__ void split(const float (&w)[kBlocks][8]) {
    if constexpr (kBf16) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          unsigned int hi[2], mid[2], lo[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float value = w[b][2 * p + k];
            hi[k] = float_bits(value);
            const float rest = value - float_from_bits(hi[k] & 0xffff0000u);
            mid[k] = float_bits(rest);
            lo[k] = float_bits(rest - float_from_bits(mid[k] & 0xffff0000u));
          }
          pieces[b][2 * p] = __byte_perm(hi[0], hi[1], 0x7632);
          pieces[b][2 * p + 1] = __byte_perm(mid[0], mid[1], 0x7632);
          pieces[b][8 + (p >> 1) + 2 * (p & 1)] = __byte_perm(lo[0], lo[1], 0x7632);
        }
      }
    } else {
      float largest = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(w[b][k]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const int exponent = min(max(static_cast<int>(float_bits(largest) >> 23), 15), 254);
      const float up = float_from_bits(static_cast<unsigned int>(268 - exponent) << 23);
      scale = float_from_bits(static_cast<unsigned int>(exponent - 14) << 23);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const float low = w[b][2 * p] * up, high = w[b][2 * p + 1] * up;
          const unsigned int hi = floats_to_f16x2(low, high);
          float low_hi, high_hi;
          unpack<kFloat16>(hi, low_hi, high_hi);
          pieces[b][2 * p] = hi;
          pieces[b][2 * p + 1] = floats_to_f16x2(low - low_hi, high - high_hi);
        }
      }
    }
  }
};

// One unit's sums for a tile. Lane (g, t) ends with output g of tokens 2t and 2t + 1, and entries (g, 2t), (g, 2t + 1)
// of x x^T. kMains: chains of the large pieces, a block each where registers suffice, which halves a unit's latency.
template <int kMains>
struct UnitSums {
  float main[kMains][4] = {}, low_a[4] = {}, low_b[4] = {}, square_a[4] = {}, square_b[4] = {};

  template <int kXDtype, int kBlocks>
  __device__ __forceinline__ void add(const UnitWeights<kXDtype, kBlocks>& weights, int block, uint4 v) {
    constexpr bool kBf16 = kXDtype == kBfloat16;
    const auto& p = weights.pieces[block];
    mma_16x8x16<kBf16>(main[block % kMains], p[0], p[1], p[2], p[3], v.x, v.y);
    if constexpr (kBf16) mma_16x8x16<kBf16>(low_a, p[8], p[9], p[10], p[11], v.x, v.y);
    mma_16x8x16<kBf16>(main[block % kMains], p[4], p[5], p[6], p[7], v.z, v.w);
    if constexpr (kBf16) mma_16x8x16<kBf16>(low_b, p[8], p[9], p[10], p[11], v.z, v.w);
    // Words of x in rows 0-7 and 8-15: each product fills one half of its diagonal. In k-steps of 8 the registers lie
    // as loaded; m16n8k16 would need {x, z, y, w}, four moves and four registers.
    mma_16x8x8<kBf16>(square_a, v.x, v.y, v.x);
    mma_16x8x8<kBf16>(square_b, v.x, v.y, v.y);
    mma_16x8x8<kBf16>(square_a, v.z, v.w, v.z);
    mma_16x8x8<kBf16>(square_b, v.z, v.w, v.w);
  }
  // {dot of token 2t, dot of 2t + 1, square (g, 2t), square (g, 2t + 1)}, small pieces first.
  template <int kXDtype, int kBlocks>
  __device__ __forceinline__ float4 result(const UnitWeights<kXDtype, kBlocks>& weights) const {
    float4 sums;
    const auto sum = [&](int k) {
      if constexpr (kMains == 1)
        return main[0][k];
      else
        return main[0][k] + main[1][k];
    };
    if constexpr (kXDtype == kBfloat16) {
      sums.x = ((low_a[0] + low_b[2]) + sum(2)) + sum(0);
      sums.y = ((low_a[1] + low_b[3]) + sum(3)) + sum(1);
    } else {
      sums.x = (sum(2) + sum(0)) * weights.scale;
      sums.y = (sum(3) + sum(1)) * weights.scale;
    }
    sums.z = square_a[0] + square_b[2];
    sums.w = square_a[1] + square_b[3];
    return sums;
  }
};

// Writes a lane's sums in the order of kPartials; squares kStride apart.
template <int kStride>
__device__ __forceinline__ void store_partials(float* to, float4 sums, int lane) {
  const int g = lane >> 2, t = lane & 3;
  to[(2 * t) * kOutputs + g] = sums.x;
  to[(2 * t + 1) * kOutputs + g] = sums.y;
  if ((g >> 1) == t) to[kTileTokens * kOutputs + kStride * g] = (g & 1) ? sums.w : sums.z;
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
// The tree of four neighbours, in a lane.
__device__ __forceinline__ float across(float4 v) { return (v.x + v.y) + (v.z + v.w); }
// The balanced tree of of(0), of(1), ...: kCount of them, a power of two.
template <int kCount, class Of>
__device__ __forceinline__ float tree_of(Of of, int first = 0) {
  if constexpr (kCount == 1)
    return of(first);
  else
    return tree_of<kCount / 2>(of, first) + tree_of<kCount / 2>(of, first + kCount / 2);
}
__device__ __forceinline__ float4 shuffle_xor(float4 a, int mask) {
  return float4{__shfl_xor_sync(0xffffffffu, a.x, mask), __shfl_xor_sync(0xffffffffu, a.y, mask),
                __shfl_xor_sync(0xffffffffu, a.z, mask), __shfl_xor_sync(0xffffffffu, a.w, mask)};
}

// ---- after the sums -------------------------------------------------------------------------------------------

// post: y = h_post x + residual of 8 columns, rounded to the dtype of x.
template <int kXDtype>
__device__ __forceinline__ uint4 post_octet(const float (&x)[8], uint4 residual, float h_post) {
  float values[8];
  unpack<kXDtype>(residual, values);
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = ihc_post_element(h_post, x[k], values[k]);
  return pack<kXDtype>(values);
}

// pre: z = sum over channels of h_pre x, of 8 columns, before its rounding.
__device__ __forceinline__ void add_channel(int channel, const float (&x)[8], float h, float (&z)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) z[k] = channel == 0 ? __fmul_rn(h, x[k]) : fmaf(h, x[k], z[k]);
}
template <int kXDtype, int kHc>
__device__ __forceinline__ void reduce_channels(const uint4 (&x)[kHc], const float (&h)[kHc], float (&z)[8]) {
#pragma unroll
  for (int i = 0; i < kHc; ++i) {
    float values[8];
    unpack<kXDtype>(x[i], values);
    add_channel(i, values, h[i], z);
  }
}

// Folded norm: squares of 8 columns as two runs of 4; every 16th octet of a 16th of the row as a run; those 16 runs,
// then the 16ths, as a tree.
__device__ __forceinline__ float octet_squares(const float (&z)[8]) {
  float low = __fmul_rn(z[0], z[0]), high = __fmul_rn(z[4], z[4]);
#pragma unroll
  for (int k = 1; k < 4; ++k) low = fmaf(z[k], z[k], low), high = fmaf(z[4 + k], z[4 + k], high);
  return low + high;
}
// Sum over groups of kLanes neighbouring lanes, from neighbours on.
template <int kLanes>
__device__ __forceinline__ float warp_tree(float value) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// Approximate root: 2^-22 off, where the result is rounded to 16 bits; the precise one and its division cost 0.1 us at
// one token.
template <int kHidden>
__device__ __forceinline__ float norm_inverse(float sum, float eps) {
  return rsqrtf(fmaf(sum, 1.0f / static_cast<float>(kHidden), eps));
}

// The gate of output `out` (a pre gate below kHc, else a post gate).
struct GateScales {
  float scale, base, magnitude, eps;
  template <int kHc>
  static __device__ __forceinline__ GateScales of(int out, bool has, const float* hc_scale, const float* hc_base,
                                                  float magnitude, float hc_eps) {
    return GateScales{has ? __ldg(hc_scale + (out < kHc ? 0 : 1)) : 0.0f, has ? __ldg(hc_base + out) : 0.0f,
                      out < kHc ? 1.0f : magnitude, hc_eps};
  }
  template <int kCount>
  __device__ __forceinline__ float gate(float dot, float squares, float norm_eps) const {
    // Approximate root, exponential and quotient: the precise ones cost 0.3 us at one token and are no nearer to fp64
    // in the end.
    const float inverse = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(kCount), norm_eps));
    return fmaf(magnitude, __fdividef(1.0f, 1.0f + __expf(-fmaf(dot * inverse, scale, base))), eps);
  }
};

struct IhcArguments {
  const char* x;         // pre, head: [tokens, hc, hidden]; post_pre: [tokens, hidden]
  const char* residual;  // post_pre: [tokens, hc, hidden]
  const float* h_post;   // post_pre: [tokens, hc]
  const float* w;        // [outputs, hc * hidden]
  const float* hc_scale;
  const float* hc_base;
  const void* rms_weight;
  char* y;        // post_pre: [tokens, hc, hidden]
  char* z;        // [tokens, hidden]
  float* h_next;  // [tokens, hc], not for head
  // Strides in elements.
  long long x_tokens, x_hc, residual_tokens, residual_hc, h_post_tokens, y_tokens, y_hc, z_tokens, h_next_tokens;
  float norm_eps, hc_eps, magnitude, rms_eps;
  int tokens;
};

// Baked values of one kernel.
template <int kOp_, int kHc_, int kHidden_, int kXDtype_, int kNormDtype_, bool kHasNorm_, bool kRoundBeforeNorm_,
          int kVec_, int kRanks_>
struct IhcShape {
  static constexpr int kOp = kOp_, kHc = kHc_, kHidden = kHidden_, kXDtype = kXDtype_, kNormDtype = kNormDtype_,
                       kVec = kVec_, kRanks = kRanks_;
  static constexpr bool kHasNorm = kHasNorm_, kRoundBeforeNorm = kRoundBeforeNorm_;
  static constexpr bool kPost = kOp == kPostPre;
  // More than 8 outputs: a cluster works on one side of them, the pre gates (and all that follows from them) or the
  // post gates. post_pre may write y over the residual, so there every cluster does both, the post gates first, and
  // nobody else reads its rows.
  static constexpr int kSides = kHc > 4 && kOp != kHead ? 2 : 1;
  static constexpr int kPasses = kSides == 2 && kPost ? 2 : 1;
  static constexpr int kUsedOutputs = kOp == kHead || kSides == 2 ? kHc : 2 * kHc;
  static constexpr int kHalf = (kHc + 1) / 2;          // channels of a unit = its blocks
  static constexpr int kPostRow = kHc == 3 ? 4 : kHc;  // row of A with the weights of the first post gate
  static constexpr int kColumns = kHidden / kRanks;    // of a share
  static constexpr int kShareChunks = 8, kPartChunks = kRanks / 2;
  // Units of a chunk: as many as a share needs, and whole groups in a part.
  static constexpr int kLeastUnits = ((kColumns + 31) / 32 * 2 + kShareChunks - 1) / kShareChunks;
  static constexpr int kChunkUnits = kLeastUnits + kPartChunks * kLeastUnits % 2;
  static constexpr int kShareGroups = kShareChunks * kChunkUnits / 2, kPartGroups = kPartChunks * kChunkUnits / 2;
  static constexpr bool kPadded = kShareGroups * 32 != kColumns;  // the last groups of a share are short or empty
  static constexpr long long kDepth = static_cast<long long>(kHc) * kHidden;
  static_assert(2 <= kHc && kUsedOutputs <= kOutputs, "8 rows of A hold the outputs of a side");
  static_assert(kHc <= 4 || kRanks >= kTileTokens, "a block works out the gates of one token");
  static_assert(kRanks == 2 || kRanks == 4 || kRanks == 8 || kRanks == 16, "16 parts of a row, whole ones in a share");
  static_assert(kHidden % (8 * kRanks) == 0, "a share is a whole number of 16-byte pieces");
  static_assert(kXDtype == kBfloat16 || kXDtype == kFloat16, "x must be an operand of mma: bfloat16 or float16");

  using Weights = UnitWeights<kXDtype, kHalf>;
  using Sums = UnitSums<kHalf == 2 && kChunkUnits <= 6 ? 2 : 1>;  // of pre and post_pre alike

  // The first column of a group of the row (counted with the empty ones), and whether lane t has columns of it.
  static __device__ __forceinline__ int column_of(int group) {
    if constexpr (kPadded)
      return group / kShareGroups * kColumns + group % kShareGroups * 32;
    else
      return group * 32;
  }
  static __device__ __forceinline__ bool has(int group, int t) {
    return !kPadded || group % kShareGroups * 32 + t * 8 < kColumns;
  }

  // This lane's weights of unit `unit` of the row: group unit / 2, channels (unit % 2) * kHalf and up; w of its side.
  static __device__ __forceinline__ void load_unit(const float* w, int unit, int lane, float (&values)[kHalf][8]) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int b = 0; b < kHalf; ++b) {
#pragma unroll
      for (int k = 0; k < 8; ++k) values[b][k] = 0.0f;
      const int channel = (unit & 1) * kHalf + b, group = unit >> 1;
      const int output = kPostRow > kHc && g >= kPostRow ? g - kPostRow + kHc : g;
      if (output < kUsedOutputs && (kPostRow == kHc || g != kHc) && (2 * kHalf == kHc || channel < kHc) &&
          has(group, t))
        load_weights<kVec == 8>(w + output * kDepth + channel * kHidden + column_of(group) + t * 8, values[b]);
    }
  }
};

}  // namespace hccupy
