// The defines of the sm_90a iHC kernels, read once, taken away so that templates may use the names, and made a type.
// Include first.
#pragma once

namespace hccupy {
namespace baked {
constexpr int op = kOp;  // 0 ihc_pre, 1 ihc_head, 2 ihc_post_pre
constexpr int hc = kHc, hidden = kHidden, x_dtype = kXDtype, vec = kVec, ranks = kRanks;
constexpr bool has_rms_weight = kHasRmsWeight, round_before_norm = kRoundBeforeNorm;
constexpr bool lanes_ask = kLanesAsk;  // of the streaming kernel alone
constexpr int rms_weight_dtype = kRmsWeightDtype;
}  // namespace baked
}  // namespace hccupy

#if kOp == 0
#define HCCUPY_ENTRY_PRE
#elif kOp == 1
#define HCCUPY_ENTRY_HEAD
#else
#define HCCUPY_ENTRY_POST_PRE
#endif
#undef kOp
#undef kHc
#undef kHidden
#undef kXDtype
#undef kVec
#undef kRanks
#undef kHasRmsWeight
#undef kRmsWeightDtype
#undef kRoundBeforeNorm
#undef kLanesAsk

#include "common/sm90_ihc.cuh"

namespace hccupy {
using BakedShape = IhcShape<baked::op, baked::hc, baked::hidden, baked::x_dtype, baked::rms_weight_dtype,
                            baked::has_rms_weight, baked::round_before_norm, baked::vec, baked::ranks>;
}  // namespace hccupy
