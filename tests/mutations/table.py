"""The faults: what is replaced by what, and by which tests it must be caught."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """`before`, which is in the file exactly once, becomes `after`."""

    id: str
    kind: str
    fault: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def replaced(text: str, before: str, after: str, place: str) -> str:
    """The text with `before`, which must be in it exactly once, as `after`.

    Raises ValueError, with `place` in its words, where it is not.
    """
    count = text.count(before)
    if count != 1 or before == after:
        raise ValueError(f"{before!r} is {count} times in {place}")
    return text.replace(before, after)


def apply(mutation: Mutation, text: str) -> str:
    """The text with the fault.

    Raises ValueError where the text to replace is not there exactly once.
    """
    return replaced(text, mutation.before, mutation.after, f"{mutation.file}; change the entry {mutation.id} in tests/mutations/table.py")


IHC = ("tests/test_kernels_drawn.py::test_ihc", "tests/test_kernels_simulated.py::test_ihc_kernels_against_fp64")
POINT = ("tests/test_ihc_rounding.py",)
ROPE = ("tests/test_kernels_drawn.py::test_rope", "tests/test_kernels_simulated.py::test_rope_and_store_kernels_against_the_reference")
BLOCK = ("tests/test_kernels_simulated.py::test_rope_kernels_of_sm90_give_the_same_bits",)
PREVIOUS = ("tests/test_kernels_simulated.py::test_rope_kernels_and_what_the_previous_grid_writes",)
STORE = ("tests/test_kernels_drawn.py::test_store_kv",)
TAIL = ("tests/test_kernels_drawn.py::test_zero_kv_tail",)
FAR = ("tests/test_kernels_overflow.py",)
TWINS = ("tests/test_ptx_twins.py",)
CACHE = ("tests/test_cache.py",)
BUNDLE = ("tests/test_bundle.py",)
BUILD = ("tests/test_build.py::test_options_keep_ieee_arithmetic", "tests/test_build.py::test_key_changes_with_everything_that_changes_the_binary")
REPEAT = ("tests/test_repeat.py",)
LAUNCH = ("tests/test_launch.py",)
ERRORS = ("tests/test_errors.py",)
OVERLAP = ("tests/test_overlap.py",)
FRAMEWORKS = ("tests/test_frameworks.py",)
RUNTIME = ("tests/test_runtime_guards.py",)
REFERENCE = ("tests/test_rope_reference.py",)


def field(*names: str) -> tuple[str, ...]:
    """Field cases on the kernels, in the simulator."""
    return tuple(f"tests/test_field_cases_simulated.py::test_field_case[{name}]" for name in names)


def plan(*names: str) -> tuple[str, ...]:
    """Tests of test_plan.py."""
    return tuple(f"tests/test_plan.py::{name}" for name in names)


TILE, IHC_H, REDUCE = "kernels/common/ihc_tile.cuh", "kernels/common/ihc.cuh", "kernels/common/reduce.cuh"
PLACE, ROW, VALUES, ROPE_H, SLOTS = (f"kernels/common/rope{n}.cuh" for n in ("_place", "_row", "_values", "", "_tail"))

# One line a fault.
# fmt: off
MUTATIONS = (
    # ---- iHC kernels
    Mutation("eps-lost", "wrong eps", "the RMS of the projection input forgets norm_eps", IHC_H, "sum_of_squares / count + eps", "sum_of_squares / count", IHC),
    Mutation("eps-twice", "wrong eps", "the folded norm takes norm_eps for rms_eps", TILE, "inverse_rms(squares, kLength, args.rms_eps)", "inverse_rms(squares, kLength, args.norm_eps)", IHC),
    Mutation("hc-eps-lost", "wrong eps", "gates without hc_eps", IHC_H, "sigmoid(fmaf(dot * inverse, scale, base)), hc_eps)", "sigmoid(fmaf(dot * inverse, scale, base)), 0.0f)", IHC),
    Mutation("mean-over-hidden", "wrong mean", "the mean of squares is taken over hidden, not hc * hidden", TILE, "static_cast<float>(Config::hc) * Config::hidden, args.norm_eps", "static_cast<float>(Config::hidden), args.norm_eps", IHC),
    Mutation("norm-mean", "wrong mean", "the folded norm's mean is taken over hc * hidden", TILE, "inverse_rms(squares, kLength, args.rms_eps)", "inverse_rms(squares, kLength * kChannels, args.rms_eps)", IHC),
    Mutation("magnitude-lost", "wrong formula", "h_post without its magnitude", TILE, "is_pre ? 1.0f : args.magnitude", "1.0f", IHC),
    Mutation("one-scale", "wrong formula", "post gates take the scale of the pre gates", TILE, "args.hc_scale[is_pre ? 0 : 1]", "args.hc_scale[0]", IHC),
    Mutation("one-base", "wrong formula", "post gates take the bases of the pre gates", TILE, "args.hc_base[gate],", "args.hc_base[gate % Config::hc],", IHC),
    Mutation("channels-swapped", "swapped channels", "the mix pairs gates with the channels in reverse", IHC_H, "fmaf(h_pre[channel], channels[channel], sum)", "fmaf(h_pre[kChannels - channel], channels[channel], sum)", IHC),
    Mutation("channel-missing", "swapped channels", "the last channel is left out of the mix", IHC_H, "for (int channel = 1; channel < kChannels; ++channel) sum", "for (int channel = 1; channel < kChannels - 1; ++channel) sum", IHC),
    Mutation("post-swapped", "wrong formula", "post multiplies the residual, not x", IHC_H, "fmaf(h_post, x, residual)", "fmaf(h_post, residual, x)", IHC),
    Mutation("w-row", "swapped channels", "a gate reads another channel's weights", TILE, "w + (gate * kChannels + channel) * kLength", "w + (gate * kChannels + kChannels - 1 - channel) * kLength", IHC),
    Mutation("round-lost", "rounding point", "y is not rounded before the folded norm", TILE, "Config::has_rms_weight && Config::round_before_norm", "false", POINT),
    Mutation("lost-bits", "precision", "Kahan's step forgets what was lost", REDUCE, "lost = added - (total - sum);", "lost = 0.0f;", POINT),
    Mutation("two-sum", "precision", "the sum over lanes and warps forgets what was lost", REDUCE, "return {sum, lost + (a.lost + b.lost)};", "return {sum, 0.0f};", POINT),
    Mutation("overflow-nan", "special values", "a sum of squares that overflowed is NaN", REDUCE, "return total == total ? total : sum;", "return total;", ("tests/test_kernels_simulated.py::test_ihc_kernels_where_squares_overflow",)),
    Mutation("warp-sum", "missing part", "a sum over the warp leaves out the last step", REDUCE, "offset > 0; offset /= 2) value += __shfl_xor_sync", "offset > 1; offset /= 2) value += __shfl_xor_sync", IHC),
    Mutation("warps-missing", "missing part", "the first warp's sums are left out", TILE, "for (int from = 0; from < Tile::kWarps; ++from) {\n      dot", "for (int from = 1; from < Tile::kWarps; ++from) {\n      dot", IHC),
    Mutation("chunks-floored", "missing tail", "the last chunk of a row that is not full is left out", TILE, "kChunks = (kLength + kChunk - 1) / kChunk", "kChunks = kLength / kChunk", IHC),
    Mutation("chunk-past-row", "bounds guard", "the last chunk is stored whole, past the end of the row", TILE, "if (kLength % kChunk == 0 || element < kLength) part.store_whole(row + element);", "part.store_whole(row + element);", IHC),
    Mutation("gate-past-tokens", "bounds guard", "gates of tokens that do not exist are stored", TILE, "} else if (tile.exists(token)) {", "} else {", IHC),
    Mutation("row-past-tokens", "bounds guard", "rows of tokens that do not exist are stored", TILE, "if (!tile.exists(token)) break;", "", IHC),
    Mutation("read-past-tokens", "bounds guard", "rows behind the last token are read", TILE, "return exists(token) ? first_token + token : tokens - 1LL;", "return first_token + token;", IHC),
    Mutation("barrier-sums", "barrier", "no barrier between the warps' sums and the gates", TILE, "warp_sums(sums, warp_totals[warp]);\n  __syncthreads();", "warp_sums(sums, warp_totals[warp]);", IHC),
    Mutation("barrier-gates", "barrier", "no barrier between the gates and the mix", TILE, "__syncthreads();\n\n  // Sum of squares of the mix.", "// Sum of squares of the mix.", IHC),
    Mutation("barrier-norm", "barrier", "no barrier in the folded norm", TILE, "warp_squares[token][warp] = squares;\n    }\n    __syncthreads();", "warp_squares[token][warp] = squares;\n    }", IHC),
    Mutation("tile-32-bit", "64-bit offset", "token times stride in 32 bits", TILE, "rows + clamped(token) * stride_tokens +", "rows + static_cast<int>(clamped(token)) * static_cast<int>(stride_tokens) +", FAR),
    Mutation("h-post-32-bit", "64-bit offset", "h_post's offset in 32 bits", TILE, "args.h_post[(tile.first_token + token) * args.h_post_stride_tokens", "args.h_post[static_cast<int>(tile.first_token + token) * static_cast<int>(args.h_post_stride_tokens)", FAR),
    Mutation("post-32-bit", "64-bit offset", "post's residual offset in 32 bits", "kernels/ihc_post.cu", "residual + token * residual_stride_tokens", "residual + static_cast<int>(token) * static_cast<int>(residual_stride_tokens)", FAR),
    Mutation("post-guard", "bounds guard", "threads past the last token store", "kernels/ihc_post.cu", "if (!exists) return;", "", IHC),
    Mutation("post-stride", "wrong stride", "y is stored with the residual's channel stride", "kernels/ihc_post.cu", "result.store_whole(to + channel * y_stride_hc);", "result.store_whole(to + channel * residual_stride_hc);", IHC),
    Mutation("fused-unrounded", "rounding point", "post_pre stages the residual instead of y", "kernels/ihc_post_pre.cu", "if constexpr (Config::staged) result.store(Tile::slot(first + k, channel, pass));", "if constexpr (Config::staged) state[k][channel].store(Tile::slot(first + k, channel, pass));", IHC),
    # ---- RoPE kernels
    Mutation("turn-back", "wrong pair", "pairs are rotated the other way", ROPE_H, "fmaf(first, a, -(second * b))", "fmaf(first, a, second * b)", ROPE),
    Mutation("interleaved-angle", "wrong pair", "interleaved chunks take the angles of NeoX", ROPE_H, "kInterleaved ? element(slot, which) / 2 : slot * chunk", "slot * chunk", ROPE),
    Mutation("rotate-all", "wrong pair", "dims behind rotary_dim are rotated too", ROPE_H, "element(slot, which) < kRotary : slot < rotary_slots", "true : slot < rotary_slots", ROPE),
    Mutation("head-mean", "wrong mean", "the head's mean of squares is off by one element", ROPE_H, "fmaf(sum_of_squares, 1.0f / kDim, eps)", "fmaf(sum_of_squares, 1.0f / (kDim - 1), eps)", ROPE),
    Mutation("head-eps", "wrong eps", "the head's norm forgets norm_eps", ROPE_H, "fmaf(sum_of_squares, 1.0f / kDim, eps)", "fmaf(sum_of_squares, 1.0f / kDim, 1e-30f)", field("E1_E2_eps_is_an_argument")),
    Mutation("weight-offset", "wrong formula", "norm_weight_offset is not added", ROW, "args.norm_weight_offset * kDown", "0.0f", ROPE),
    Mutation("k-weight", "wrong formula", "k is weighted with q's weights", ROW, "(is_q ? of_q : of_k) + element", "of_q + element", ROPE),
    Mutation("zero-sign", "special values", "an all-zero head has negative zeros", "kernels/common/rope_args.cuh", "const float scaled = fmaf(value, inverse, zero);", "const float scaled = fmaf(value, inverse, -0.0f);", field("F1_all_zero_head")),
    Mutation("absmax-floor", "special values", "an all-zero head has scale 0", ROW, "fmaxf(absmax, kSmallestAbsmax)", "absmax", field("F1_all_zero_head")),
    Mutation("scale-width", "bounds guard", "q_scale is written past its padded width", ROW, "row.request >= 0 && row.place < a.padded_q_len", "row.request >= 0", field("H1_max_q_len_too_small")),
    Mutation("position", "off by one", "positions are one too many", PLACE, "static_cast<unsigned int>(h.end - token);", "static_cast<unsigned int>(h.end - token) + 1u;", ROPE),
    Mutation("position-table", "bounds guard", "positions past the table are looked up", PLACE, "h.seq_len < 0 || position >= static_cast<unsigned int>(m.positions)", "static_cast<int>(position) < 0", field("D8_positions_outside_the_table")),
    Mutation("position-negative", "bounds guard", "negative positions are looked up", PLACE, "h.seq_len < 0 || position >= static_cast<unsigned int>(m.positions)", "static_cast<int>(position) >= m.positions", field("D8_positions_outside_the_table")),
    Mutation("page-one-more", "off by one page", "page num_blocks is taken for a page", PLACE, "page < m.num_blocks;", "page <= m.num_blocks;", field("B16_pages_out_of_range_are_skipped")),
    Mutation("page-negative", "bounds guard", "negative pages are written", PLACE, "!null && page >= 0 && page", "!null && page", field("B16_pages_out_of_range_are_skipped")),
    Mutation("null-block", "wrong page", "the null block is written", PLACE, "kHasNull && page == m.null_block", "false", field("A1_A2_reserved_block_stays_zero")),
    Mutation("column", "off by one page", "the column behind the block table is read", PLACE, "if (column < m.max_blocks) row.column = column;", "row.column = column;", field("B16_columns_past_the_table_are_skipped")),
    Mutation("padding-rows", "bounds guard", "rows past the last request are taken for its rows", PLACE, " | (u(end) - 1u - u(row))", "", field("A8_padding_rows_and_empty_requests")),
    Mutation("prefix-past-end", "bad metadata", "a prefix sum past the rows is believed", PLACE, " | u(first) | (u(tokens) - u(end))", " | u(first)", field("A9_bad_prefix_sums_skip_their_rows")),
    Mutation("prefix-start", "bad metadata", "a prefix sum that does not start at 0 is believed", PLACE, "&& (request > 0 || first == 0)", "", field("A9_bad_prefix_sums_skip_their_rows")),
    Mutation("bisection", "wrong request", "empty requests take the rows of the next", PLACE, "right = q_index[node_low + (node_high - node_low) / 2] <= row;", "right = q_index[node_low + (node_high - node_low) / 2] < row;", ROPE),
    Mutation("last-row", "missing tail", "no row is its request's last, so no tail is cleared", PLACE, "row.last = token == h.end - 1;", "row.last = token == h.end;", field("A12_rolled_back_drafts_are_cleared") + ROPE),
    Mutation("tail-slot", "missing tail", "the last slot of the page is not cleared", SLOTS, "a.metadata.block_size - 1 - row.slot", "a.metadata.block_size - 2 - row.slot", field("A12_rolled_back_drafts_are_cleared") + ROPE),
    Mutation("tail-never-looked", "missing tail", "a stale tail is never looked for", SLOTS, "(part == parts - 1 && __any_sync(kFullMask, tail.look() != 0))", "false", BLOCK + ROPE),
    Mutation("tail-share", "missing tail", "the last warp's share of a tail stays", "kernels/common/vectors.cuh", "slot += parts * kBeside, to += step_bytes", "slot += (parts + 1) * kBeside, to += step_bytes", BLOCK + ROPE),
    Mutation("dead-row", "undefined output", "q of a bad row stays undefined where rows lie together", "kernels/common/rope_narrow.cuh", "if (mine && !row.live) clear_row(a, row, token, first, end);", "", ROPE),
    Mutation("tail-of-null", "wrong page", "tails of pages that are not written are cleared", SLOTS, "exists && row.stored && row.last", "exists && row.last", field("A1_A2_reserved_block_stays_zero", "B16_pages_out_of_range_are_skipped")),
    Mutation("v-scale", "wrong scale", "V is quantised with K's scale", VALUES, "stored(a, InPack{{raw[k]}}, scales.v)", "stored(a, InPack{{raw[k]}}, scales.k)", ROPE),
    Mutation("scales-not-inverted", "wrong scale", "K is multiplied by its scale", VALUES, "scales.k = 1.0f / scales.k;", "scales.k = scales.k;", ROPE),
    Mutation("v-of-padding", "undefined output", "out_v of padding rows is not zero", VALUES, "row.live ? stored(a, InPack{{raw[k]}}, scales.v) : StorePack::zeros()", "stored(a, InPack{{raw[k]}}, scales.v)", field("A10_outputs_are_defined_everywhere")),
    Mutation("v-heads", "wrong stride", "V's heads are stored with K's stride", VALUES, "C::has_out_v ? a.out_v_strides.head : a.value.head", "C::has_out_v ? a.out_v_strides.head : a.key.head", ROPE),
    Mutation("upper-max", "special values", "values are held to the upper bound only", "kernels/common/rope_args.cuh", "scaled < -bound ? -bound : scaled", "scaled", field("F3_saturation")),
    Mutation("flags", "undefined output", "split_k_flag's last entries stay undefined", "kernels/common/rope_fp8.cuh", "if (at < flags) a.split_k_flag[at] = 0;", "if (at < flags - 1) a.split_k_flag[at] = 0;", ROPE),
    Mutation("narrow-guess", "previous grid", "where rows are narrow, metadata that the previous grid changed are not noticed", "kernels/common/rope_narrow.cuh", "!(now == requests)", "false", PREVIOUS),
    Mutation("many-guess", "previous grid", "where rows are many, metadata that the previous grid changed are not noticed", "kernels/common/rope_many.cuh", "!(now == requests)", "false", PREVIOUS),
    Mutation("page-32-bit", "64-bit offset", "page times stride in 32 bits", "kernels/common/rope_args.cuh", "base + block * s.block +", "base + static_cast<int>(block) * static_cast<int>(s.block) +", FAR),
    Mutation("table-32-bit", "64-bit offset", "the block table's row offset in 32 bits", PLACE, "m.block_table + row.request * m.block_table_stride", "m.block_table + row.request * static_cast<int>(m.block_table_stride)", FAR),
    # ---- store_kv, zero_kv_tail, conversions
    Mutation("slot-range", "bounds guard", "slots out of range are written", "kernels/store_kv.cu", "if (page >= static_cast<unsigned int>(num_blocks) ||\n      (kHasNullBlock", "if ((kHasNullBlock", STORE),
    Mutation("slot-page", "off by one page", "the slot behind the last page is written", "kernels/store_kv.cu", "if (page >= static_cast<unsigned int>(num_blocks) ||", "if (page > static_cast<unsigned int>(num_blocks) ||", STORE),
    Mutation("slot-cut", "64-bit offset", "slots are cut to 32 bits", "kernels/store_kv.cu", "if (static_cast<unsigned long long>(slot) >> 32 == 0) {", "if (true) {", FAR),
    Mutation("duplicates", "wrong row", "of two rows for one slot the first may win", "kernels/store_kv.cu", "(kFewRows && superseded(slot_mapping, slot, row, tokens))", "false", STORE),
    Mutation("store-null", "wrong page", "store_kv writes the null block", "kernels/store_kv.cu", "static_cast<long long>(page) == static_cast<long long>(null_block)))", "false))", STORE),
    Mutation("store-32-bit", "64-bit offset", "store_kv's page offset in 32 bits", "kernels/store_kv.cu", "static_cast<long long>(page) * cache_stride_num_blocks", "static_cast<int>(page) * static_cast<int>(cache_stride_num_blocks)", FAR),
    Mutation("tail-first", "off by one", "the first slot behind the last token stays", "kernels/store_kv.cu", "const int first = seq_len - column * block_size;", "const int first = seq_len - column * block_size + 1;", TAIL),
    Mutation("tail-column", "bounds guard", "lengths past the block table are believed", "kernels/store_kv.cu", "if (column >= max_blocks) return;", "", TAIL),
    Mutation("tail-value-page", "wrong page", "V's tail is cleared with K's page stride", "kernels/store_kv.cu", "value_cache, value_cache_stride_num_blocks", "value_cache, key_cache_stride_num_blocks", TAIL),
    Mutation("bf16-ties", "rounding", "the bf16 twin rounds ties away from zero", "kernels/common/ptx.cuh", "bits + 0x7fffu + ((bits >> 16) & 1u)", "bits + 0x8000u", TWINS),
    Mutation("e4m3-saturation", "special values", "e4m3 saturates from 480 on, not from 464", "kernels/common/ptx.cuh", "magnitude >= 0x43e80000u", "magnitude >= 0x43f00000u", TWINS),
    Mutation("e4m3-subnormal", "rounding", "subnormal e4m3 codes are cut off", "kernels/common/ptx.cuh", "float_bits(float_from_bits(magnitude) + 16384.0f) & 0xffu", "static_cast<unsigned int>(float_from_bits(magnitude) * 512.0f)", TWINS),
    Mutation("mma-fragment", "wrong pair", "the mma twin reads b's columns in another order", "kernels/common/ptx.cuh", "__shfl_sync(0xffffffffu, b[k / 4], 4 * (2 * t + j % 2) + k % 4)", "__shfl_sync(0xffffffffu, b[k / 4], 4 * (t + 4 * (j % 2)) + k % 4)", TWINS),
    # ---- host: checks
    Mutation("nan-scalar", "argument check", "NaN passes for a finite number", "hccupy/check.py", "if not abs(number) <= FP32_MAX:", "if abs(number) > FP32_MAX:", ERRORS),
    Mutation("bool-scalar", "argument check", "True passes for an integer", "hccupy/check.py", "if isinstance(value, bool) or not isinstance(value, numbers.Integral)", "if not isinstance(value, numbers.Integral)", ERRORS),
    Mutation("devices", "argument check", "arrays of two devices pass", "hccupy/check.py", "if meta.device != device:", "if False:", RUNTIME),
    Mutation("dtypes", "argument check", "any dtype passes", "hccupy/check.py", "if got not in allowed:", "if False:", ERRORS),
    Mutation("transposed", "argument check", "a mismatch of axis expressions passes", "hccupy/check.py", "if sizes != expected_sizes:", "if False:", ERRORS),
    Mutation("inner-stride", "argument check", "an inner stride passes", "hccupy/check.py", "if axis not in p.strides and stride != packed and 0 not in shape:", "if False:", ERRORS),
    Mutation("pitch", "alignment", "row pitch is left out of the alignment", "hccupy/check.py", "bits |= abs(s)", "bits |= 0", plan("test_alignment_counts_pointer_and_pitch")),
    Mutation("folded-axes", "argument check", "leading axes with gaps fold", "hccupy/check.py", "if outer != n * inner:", "if outer < n * inner:", RUNTIME),
    Mutation("read-only", "argument check", "read-only arrays are written", "hccupy/check.py", "if meta.readonly:", "if False:", ERRORS),
    Mutation("self-overlap", "aliasing", "an output that overlaps itself passes", "hccupy/check.py", "if overlap.covers_itself(meta.shape, meta.strides):", "if False:", ERRORS),
    Mutation("alias-strides", "aliasing", "an output at the residual's address passes whatever its strides", "hccupy/check.py", "(pa, ma.shape, ma.strides) == (pb, mb.shape, mb.strides)", "pa == pb", RUNTIME),
    Mutation("extent", "aliasing", "the last element is left out of an array's extent", "hccupy/overlap.py", "return low * itemsize, (high + 1) * itemsize", "return low * itemsize, high * itemsize", OVERLAP),
    Mutation("overlap-once", "stale plan", "overlap is judged at the first call only", "hccupy/binding.py", "(i, j, a - b) not in self.separate:", "not self.separate:", OVERLAP),
    # ---- host: plans and launches
    Mutation("grid-limit", "grid limit", "a grid past CUDA's limit is planned", "hccupy/plan.py", "if launch.grid[0] > MOST_BLOCKS:", "if False:", plan("test_C11_the_largest_token_count_is_legal_or_refused")),
    Mutation("lanes-tiles", "launch rule", "lanes ask where a cluster has more than two tiles", "hccupy/ops/ihc_sm90.py", "tiles <= 2 * clusters and", "tiles <= 3 * clusters and", ("tests/test_build.py::test_sm90_lanes_ask_only_where_the_kernel_allows_it",)),
    Mutation("no-clusters", "wrong variant", "kernels with clusters are planned where there are none", "hccupy/plan.py", "if launch.cluster > 1 and not arch.clusters:", "if False:", LAUNCH),
    Mutation("presence", "wrong variant", "an optional number is baked as absent", "hccupy/plan.py", "int(value is not None)", "0", ROPE),
    Mutation("strides-order", "wrong stride", "every stride is that of the first axis", "hccupy/launch.py", "names.index(axis)", "0", IHC),
    Mutation("stream-lost", "dropped stream", "kernels start on the default stream", "hccupy/launch.py", "self.patch(buffer, STREAM, stream, *self.attributes, *pointers)", "self.patch(buffer, STREAM, 0, *self.attributes, *pointers)", LAUNCH),
    Mutation("refusal-lost", "launch check", "a refused launch is not raised", "hccupy/launch.py", "        if code:\n            self.refused(code)", "        if False:\n            self.refused(code)", plan("test_C10_refused_launch_is_an_error_with_the_drivers_words")),
    Mutation("one-block", "threads", "threads share an argument block", "hccupy/launch.py", "self.local = threading.local()\n        self.call", "self.local = type('Shared', (), {})()\n        self.call", plan("test_each_thread_has_its_own_argument_block")),
    Mutation("stream-override", "dropped stream", "stream= is ignored", "hccupy/binding.py", "handle = framework.stream(index) if stream is None else stream_handle(stream)", "handle = framework.stream(index)", LAUNCH),
    Mutation("device-guard", "wrong device", "kernels start on the current device, not the arrays'", "hccupy/binding.py", "if cuda.current_device() != index:", "if False:", RUNTIME),
    Mutation("debug-ignored", "debug", "HCCUPY_DEBUG is not read", "hccupy/binding.py", "            if self.spec.debug is not None and switches.debug():\n                self.spec.debug(b)\n            self.spec.reference(b)", "            self.spec.reference(b)", ("tests/test_errors.py::test_metadata_errors_only_in_debug_mode",)),
    Mutation("empty-launch", "empty call", "a call of no tokens compiles and loads a kernel", "hccupy/run.py", 'if bound.device[0] == "cuda" and all(bound.axes[a] for a in spec.empty):', 'if bound.device[0] == "cuda":', RUNTIME),
    Mutation("alignment-key", "stale plan", "a plan is kept for another alignment", "hccupy/run.py", "key += framework.key(value), address & 15", "key += framework.key(value), 0", RUNTIME),
    Mutation("scalar-key", "stale plan", "a plan is kept for other scalars", "hccupy/run.py", "key += value, type(value)", "key += type(value), type(value)", ERRORS + FRAMEWORKS),
    Mutation("scalar-type", "stale plan", "1 is taken for a remembered True", "hccupy/run.py", "key += value, type(value)", "key += value, 0", ("tests/test_errors.py::test_remembered_calls_do_not_hide_a_wrong_scalar",)),
    Mutation("capture", "graph capture", "a kernel is loaded while a graph is captured", "hccupy/run.py", "if made is None or (capturing and not build.is_loaded(made, index)):", "if made is None:", LAUNCH),
    Mutation("memo-grows", "memory", "remembered calls grow for ever", "hccupy/run.py", "            _memo.clear()\n        _memo[known]", "            pass\n        _memo[known]", FRAMEWORKS),
    Mutation("repeat-alignment", "stale plan", "the short way takes any alignment", "hccupy/repeat.py", "if [p & 15 for p in pointers] != align:", "if False:", RUNTIME),
    Mutation("repeat-overlap", "aliasing", "the short way does not look for overlap", "hccupy/repeat.py", "        binding.check_overlap(full)\n", "", REPEAT),
    Mutation("repeat-type", "stale plan", "the short way takes True for 1", "hccupy/repeat.py", " and type({n}) is type_{n}", "", REPEAT),
    Mutation("repeat-debug", "debug", "the short way does not read HCCUPY_DEBUG", "hccupy/repeat.py", "{' or debug()' if spec.debug else ''}", "", REPEAT),
    Mutation("repeat-stream", "dropped stream", "the short way ignores stream=", "hccupy/repeat.py", " if stream is None else stream_handle(stream)\",", "\",", REPEAT),
    Mutation("repeat-absent", "stale plan", "the short way ignores an array that was absent", "hccupy/repeat.py", "        elif v is None:\n            tests.append(f\"{n} is None\")\n", "", REPEAT),
    Mutation("repeat-device", "wrong device", "the short way does not look at the current device", "hccupy/repeat.py", "if current_device() != {binding.bound.device[1]}", "if current_device() < 0", RUNTIME),
    # ---- host: compiling, cache, bundle, fork
    Mutation("flush", "compiler options", "subnormals are flushed to zero", "hccupy/build.py", '"-ftz=false"', '"-ftz=true"', BUILD),
    Mutation("key-sources", "stale binary", "the cache key leaves out the headers", "hccupy/build.py", "return _key(sources_digest(), plan.source.encode()", "return _key(plan.source.encode()", BUILD),
    Mutation("key-compiler", "stale binary", "the cache key leaves out the compiler", "hccupy/build.py", "repr(cuda.nvrtc_version()).encode())", 'b"")', BUILD),
    Mutation("slot-device", "wrong device", "a kernel loaded on one device is used on another", "hccupy/build.py", "return device, identity(plan) + plan.entry", "return 0, identity(plan) + plan.entry", RUNTIME),
    Mutation("fork", "fork", "CUDA is used in a forked child", "hccupy/cuda.py", "elif _owner != os.getpid():", "elif False:", LAUNCH),
    Mutation("cache-owner", "cache security", "another user's cache is trusted", "hccupy/cache.py", "info.st_uid == os.geteuid() and ", "", CACHE),
    Mutation("cache-mode", "cache security", "a cache that others may write is trusted", "hccupy/cache.py", "not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)", "True", CACHE),
    Mutation("cache-created", "cache security", "the cache is created for everybody", "hccupy/cache.py", "path.mkdir(mode=0o700,", "path.mkdir(mode=0o777,", CACHE),
    Mutation("cache-link", "cache security", "links to entries are followed", "hccupy/cache.py", " | os.O_NOFOLLOW", "", CACHE),
    Mutation("cache-directory-link", "cache security", "a link to a directory is followed", "hccupy/cache.py", "info = os.lstat(path)", "info = os.stat(path)", CACHE),
    Mutation("cache-name", "cache security", "an entry's digest does not hold its name", "hccupy/cache.py", 'hashlib.sha256(path.name.encode() + b"\\0" + cubin)', "hashlib.sha256(cubin)", CACHE),
    Mutation("cache-digest", "cache security", "the digest is not compared", "hccupy/cache.py", "if len(data) <= 32 or _digest(path, data[32:]) != data[:32]:", "if len(data) <= 32:", CACHE),
    Mutation("cache-sync", "cache", "an entry is published before it is on disk", "hccupy/cache.py", "            os.fsync(handle)\n", "", CACHE),
    Mutation("cache-lock", "cache", "every process compiles for itself", "hccupy/cache.py", "            found = read(path)  # another process", "            found = None  # another process", CACHE),
    Mutation("bundle-digest", "cache security", "a bundle's kernel is not compared with its digest", "hccupy/bundle.py", "if hashlib.sha256(cubin).hexdigest() != expected:", "if False:", BUNDLE),
    Mutation("bundle-mode", "cache security", "a bundle that anybody may write is used", "hccupy/bundle.py", "if os.stat(folder).st_mode & stat.S_IWOTH:", "if False:", BUNDLE),
    Mutation("bundle-sources", "stale binary", "a bundle of other kernel sources is used", "hccupy/bundle.py", 'if found.get("kernels") != kernels:', "if False:", BUNDLE),
    # ---- references, which are the CPU path
    Mutation("reference-null", "wrong page", "the reference tests the range before the null block", "hccupy/ops/store_kv.py", "(page < b.axes[\"num_blocks\"]) & (page != b.null_block)\n    bits", "(page < b.axes[\"num_blocks\"])\n    bits", ("tests/test_rope_reference.py", *STORE)),
    Mutation("reference-norm", "rounding point", "the CPU path does not round y before the folded norm", "hccupy/ops/ihc.py", "        if b.round_before_norm:\n            y = to_f32(from_f32(y, out.dtype))\n", "", POINT),
)
# fmt: on
