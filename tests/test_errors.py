"""Bad input: the right class, a message that names op, argument, expected and got, and nothing written.

Every call passes poisoned caller-supplied outputs; `refused` compares every byte of every array afterwards.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import re

import numpy as np
import pytest

import hccupy
from hccupy import check, errors
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY
from hccupy.spec import Arg

from .test_plan import OPS, bound_of, small_cases

PAIRS = [(op, p.name) for op in OPS for p in REGISTRY[op].args]
OUTS = [(op, o.keyword) for op in OPS for o in REGISTRY[op].outputs if o.keyword and o.when is None]
CASE = {"rope_norm_store_kv_fp8": 2}  # static q; of the other ops the second case has every optional array and several tokens
HOST_SCALARS = [(op, s.name) for op in OPS for s in REGISTRY[op].scalars]


def sample(op, rng):
    """Keyword arguments of a good call with every optional array, and poisoned outputs."""
    spec = REGISTRY[op]
    given = dict(spec.make_inputs(small_cases(spec)[CASE.get(op, 1)], rng))
    assert all(p.name in given for p in spec.args)
    bound = bound_of(spec, given)
    for o in spec.outputs:
        if o.keyword and (o.when is None or o.when(bound)):
            given[o.keyword] = poisoned(check.out_shape(spec, o, bound, (bound.axes["tokens"],)), BY_NAME[check.out_dtype(o, bound)].np)
    return given


def arg(op, name):
    return next(p for p in REGISTRY[op].args if p.name == name)


def poisoned(shape, dtype):
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xA5)
    return array


def arrays_of(given):
    """Every array, as the whole memory it is cut out of."""
    return {n: v.base if isinstance(v.base, np.ndarray) else v for n, v in given.items() if isinstance(v, np.ndarray)}


def refused(op, given, kind, *words):
    """The message of the error that this call must raise; nothing may have been written."""
    before = {n: a.tobytes() for n, a in arrays_of(given).items()}
    with pytest.raises(errors.HccupyError) as caught:
        getattr(hccupy, op)(**given)
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    assert text.startswith(f"{op}: ") and text.endswith(".") and "\n" not in text, text
    for word in ("expected ", "got ", *words):
        assert word in text, f"{word!r} is not in: {text}"
    assert {n: a.tobytes() for n, a in arrays_of(given).items()} == before, f"written: {text}"
    return text


@pytest.mark.parametrize("op", OPS)
def test_the_sample_itself_is_good(op, rng):
    """Or the tests below would prove nothing: the call runs, and writes where it was told to."""
    spec = REGISTRY[op]
    given = sample(op, rng)
    result = getattr(hccupy, op)(**given)
    values = result if isinstance(result, tuple) else (result,)
    for o, value in zip([o for o in spec.outputs if o.allocate], values, strict=False):
        assert o.keyword is None or value is given.get(o.keyword)
    for o in spec.outputs:
        if o.keyword in given:
            assert not (given[o.keyword].view(np.uint8) == 0xA5).all()


# ---- the tree ---------------------------------------------------------------------------------------------------

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.HccupyError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_exported_and_a_builtin(kind):
    assert getattr(hccupy, kind.__name__) is kind and kind.__name__ in hccupy.__all__ and kind.__doc__
    if kind is not errors.HccupyError:
        assert any(getattr(builtins, b.__name__, None) is b and b not in (Exception, BaseException, object) for b in kind.__mro__)


def test_builtin_bases():
    bases = {
        "ArgumentError": ValueError, "ShapeError": ValueError, "DtypeError": TypeError, "LayoutError": ValueError, "DeviceError": ValueError,
        "FrameworkError": TypeError, "MetadataError": IndexError, "CompileError": RuntimeError, "CaptureError": RuntimeError, "LaunchError": RuntimeError,
        "NoGpuError": RuntimeError, "OutOfMemoryError": MemoryError, "UnknownOpError": KeyError,
    }  # fmt: skip
    assert set(bases) == {c.__name__ for c in CLASSES} - {"HccupyError"}
    assert all(issubclass(getattr(hccupy, name), base) for name, base in bases.items())


def test_unknown_op_reads_as_a_sentence():
    with pytest.raises(hccupy.UnknownOpError) as caught:
        hccupy.supports("ihc_prepost")
    assert str(caught.value).startswith("op: expected one of ihc_pre, ") and str(caught.value).endswith("got 'ihc_prepost'.")


# ---- arrays: framework, dtype, shape, layout --------------------------------------------------------------------


@pytest.mark.parametrize("op, name", [pair for pair in PAIRS if not arg(*pair).optional])
def test_missing(op, name, rng):
    refused(op, {**sample(op, rng), name: None}, hccupy.FrameworkError, name, "None")


@pytest.mark.parametrize("op, name", PAIRS)
@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, "x"], ids=["list", "number", "word"])
def test_not_an_array(op, name, value, rng):
    refused(op, {**sample(op, rng), name: value}, hccupy.FrameworkError, name, type(value).__name__)


@pytest.mark.parametrize("op, name", PAIRS)
@pytest.mark.parametrize("dtype", ["float64", "int16", "complex64", "bool"])
def test_wrong_dtype(op, name, dtype, rng):
    given = sample(op, rng)
    given[name] = np.zeros(given[name].shape, dtype)
    text = refused(op, given, hccupy.DtypeError, name, f"got {dtype}")
    for word in arg(op, name).dtypes:
        assert word.startswith("=") or word in text


@pytest.mark.parametrize("op, name", PAIRS)
def test_wrong_rank(op, name, rng):
    """One axis too many; where any leading shape is taken, two too few."""
    given = sample(op, rng)
    array = given[name]
    given[name] = np.zeros((), array.dtype) if arg(op, name).lead else array[None]
    refused(op, given, hccupy.ShapeError, name, str(list(given[name].shape)))


def shared_axes(op, name):
    """Positions of the axes of an argument whose length another argument states too, or the op limits to one."""
    spec = REGISTRY[op]
    words = lambda text: set(re.findall(r"[a-z_]+", text))
    others = [e for p in spec.args if p.name != name and not p.optional for e in p.axes]
    for i, expression in enumerate(arg(op, name).axes):
        if expression.isdigit() or words(expression) & set().union(*map(words, others)):
            yield i


@pytest.mark.parametrize("op, name", PAIRS)
def test_axis_mismatch(op, name, rng):
    """Each axis that is tied to another argument, one element longer."""
    given = sample(op, rng)
    array = given[name]
    for axis in shared_axes(op, name):
        longer = np.concatenate([array, array.take([0], axis)], axis)
        text = refused(op, {**given, name: longer}, hccupy.ShapeError)
        assert re.search(r"\d", text) and "got " in text


@pytest.mark.parametrize("op, name", [pair for pair in PAIRS if pair[1] == "w"])
def test_G11_transposed_w(op, name, rng):
    given = sample(op, rng)
    given["w"] = np.ascontiguousarray(given["w"].T)
    refused(op, given, hccupy.ShapeError, "w", "It looks transposed")


@pytest.mark.parametrize("op, name", [pair for pair in PAIRS if arg(*pair).axes[-1] != "1"])  # a single element has no stride
def test_inner_stride(op, name, rng):
    given = sample(op, rng)
    given[name] = np.repeat(given[name], 2, -1)[..., ::2]
    refused(op, given, hccupy.LayoutError, name, "stride 1", "got 2")


@pytest.mark.parametrize("op, name", [pair for pair in PAIRS if arg(*pair).mutated])
def test_read_only_cache(op, name, rng):
    given = sample(op, rng)
    view = given[name].view()
    view.flags.writeable = False
    refused(op, {**given, name: view}, hccupy.LayoutError, name, "read-only")


@pytest.mark.parametrize("op, name", [pair for pair in PAIRS if arg(*pair).mutated])
def test_cache_that_overlaps_itself(op, name, rng):
    """All pages one page: no order of writes means anything."""
    given = sample(op, rng)
    array = given[name]
    given[name] = np.lib.stride_tricks.as_strided(array, array.shape, (0, *array.strides[1:]), writeable=True)
    refused(op, given, hccupy.LayoutError, name, "do not overlap")


@pytest.mark.parametrize("op, name", [(op, name) for op, name in PAIRS if REGISTRY[op].args[0].mutated and name != REGISTRY[op].args[0].name])
def test_cache_that_overlaps_an_argument(op, name, rng):
    """The first bytes of a cache seen as another argument."""
    given = sample(op, rng)
    cache, array = REGISTRY[op].args[0].name, given[name]
    memory = np.zeros(max(given[cache].nbytes, array.nbytes), np.uint8)
    given[cache] = memory[: given[cache].nbytes].view(given[cache].dtype).reshape(given[cache].shape)
    given[name] = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    refused(op, given, hccupy.LayoutError, f"{cache} and {name}", "share no element")


# ---- outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_of_the_wrong_shape(op, keyword, rng):
    given = sample(op, rng)
    shape = given[keyword].shape
    for wrong in ((*shape[:-1], shape[-1] + 1), (shape[0] + 1, *shape[1:]), shape[1:], (1, *shape)):
        text = refused(op, {**given, keyword: poisoned(wrong, given[keyword].dtype)}, hccupy.ShapeError, keyword)
        assert str(list(wrong)) in text and str(list(shape)) in text


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_of_the_wrong_dtype(op, keyword, rng):
    given = sample(op, rng)
    given[keyword] = np.zeros(given[keyword].shape, np.float64)
    refused(op, given, hccupy.DtypeError, keyword, "got float64")


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_that_cannot_be_written(op, keyword, rng):
    given = sample(op, rng)
    given[keyword].flags.writeable = False
    refused(op, given, hccupy.LayoutError, keyword, "read-only")


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_that_overlaps_itself(op, keyword, rng):
    given = sample(op, rng)
    array = given[keyword]
    given[keyword] = np.lib.stride_tricks.as_strided(array, array.shape, (0, *array.strides[1:]), writeable=True)
    refused(op, given, hccupy.LayoutError, keyword, "do not overlap")


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_with_inner_stride(op, keyword, rng):
    given = sample(op, rng)
    given[keyword] = np.repeat(given[keyword], 2, -1)[..., ::2]
    refused(op, given, hccupy.LayoutError, keyword, "stride 1", "got 2")


@pytest.mark.parametrize("op, keyword", OUTS)
def test_out_that_overlaps_each_argument(op, keyword, rng):
    """The same memory under every argument in turn (shifted by a row, so that it is no update in place)."""
    spec = REGISTRY[op]
    given = sample(op, rng)
    target = given[keyword]
    for p in spec.args:
        array = given[p.name]
        row = target[0].nbytes
        memory = poisoned((target.nbytes + array.nbytes + row,), np.uint8)
        moved = {
            keyword: memory[: target.nbytes].view(target.dtype).reshape(target.shape),
            p.name: memory[row : row + array.nbytes].view(array.dtype).reshape(array.shape),
        }
        text = refused(op, {**given, **moved}, hccupy.LayoutError, "share no element")
        assert keyword in text and p.name in text


@pytest.mark.parametrize("op", [op for op in OPS if len([k for o, k in OUTS if o == op]) > 1])
def test_outs_that_overlap_each_other(op, rng):
    given = sample(op, rng)
    keywords = [k for o, k in OUTS if o == op]
    for first, second in itertools.pairwise(keywords):
        size = max(given[first].nbytes, given[second].nbytes)
        memory = poisoned((size,), np.uint8)
        views = {k: memory[: given[k].nbytes].view(given[k].dtype).reshape(given[k].shape) for k in (first, second)}
        text = refused(op, {**given, **views}, hccupy.LayoutError, "share no element")
        assert first in text and second in text


# ---- scalars ----------------------------------------------------------------------------------------------------


def wrong_values(s):
    """Values that a scalar's kind does not take."""
    if s.kind == "float":
        yield from (float("nan"), float("inf"), -float("inf"), "1e-5", [1e-5], np.array(1e-5), True, 1j, 10**400, 1e39)
        if s.low is not None:
            yield s.low - 1e-3
        if not s.optional:
            yield None
    elif s.kind == "int":
        yield from (1.5, "1", True, 2**31, -(2**31) - 1, 10**30, [1])
        if s.low is not None:
            yield int(s.low) - 1
    elif s.kind == "bool":
        yield from (1, 0, "True", None, 1.0)
    else:
        yield from ("", "nonsense", 0, None, True, s.choices[0].upper(), [s.choices[0]])


@pytest.mark.parametrize("op, name", HOST_SCALARS)
def test_wrong_scalar(op, name, rng):
    """Also after the same call with an equal good value has been remembered: True == 1 == 1.0."""
    given = sample(op, rng)
    s = next(s for s in REGISTRY[op].scalars if s.name == name)
    getattr(hccupy, op)(**given)
    given = sample(op, rng)
    for value in wrong_values(s):
        refused(op, {**given, name: value}, hccupy.ArgumentError, name)


def test_remembered_calls_do_not_hide_a_wrong_scalar(rng):
    """1.0 == True and hash alike: the memory of good calls must tell them apart."""
    given = sample("ihc_pre", rng)
    hccupy.ihc_pre(**{**given, "norm_eps": 1.0, "round_before_norm": True})
    given = sample("ihc_pre", rng)
    refused("ihc_pre", {**given, "norm_eps": True, "round_before_norm": True}, hccupy.ArgumentError, "norm_eps")
    refused("ihc_pre", {**given, "norm_eps": 1.0, "round_before_norm": 1}, hccupy.ArgumentError, "round_before_norm")


@pytest.mark.parametrize("eps", [0.0, 0, np.float32(1e-5), np.float64(1e-5), 1])
def test_numbers_that_are_numbers(eps, rng):
    hccupy.ihc_pre(**{**sample("ihc_pre", rng), "norm_eps": eps, "round_before_norm": np.bool_(True)})


# ---- rules of the ops -------------------------------------------------------------------------------------------

ROPE = ("rope_norm_store_kv", "rope_norm_store_kv_fp8")


@pytest.mark.parametrize("op", ["ihc_pre", "ihc_head", "ihc_post_pre"])
@pytest.mark.parametrize("hc", [0, 9, 16])
def test_hc_out_of_range(op, hc):
    rows = hc if op == "ihc_head" else 2 * hc
    given = {"w": np.zeros((rows, hc * 8), np.float32), "hc_scale": np.zeros(1 if op == "ihc_head" else 2, np.float32), "hc_base": np.zeros(rows, np.float32)}
    channels = np.zeros((3, hc, 8), np.float32)
    if op == "ihc_post_pre":
        given |= {"x": np.zeros((3, 8), np.float32), "residual": channels, "h_post": np.zeros((3, hc), np.float32)}
    else:
        given["x"] = channels
    refused(op, given, hccupy.ShapeError, "hc: expected 1 to 8", f"got {hc}")


def test_leading_shapes_must_agree(rng):
    """Same number of tokens, arranged differently."""
    x, residual, h_post = np.zeros((2, 6, 8), np.float32), np.zeros((3, 4, 2, 8), np.float32), np.zeros((2, 6, 2), np.float32)
    refused("ihc_post", {"x": x, "residual": residual, "h_post": h_post}, hccupy.ShapeError, "residual", "[2, 6]", "[3, 4]")


def test_leading_axes_that_do_not_fold(rng):
    """A transposed leading shape has no single token stride."""
    x = np.zeros((4, 3, 2, 8), np.float32).transpose(1, 0, 2, 3)
    given = {"x": x, "w": np.zeros((4, 16), np.float32), "hc_scale": np.zeros(2, np.float32), "hc_base": np.zeros(4, np.float32)}
    refused("ihc_pre", given, hccupy.LayoutError, "x", "fold into one stride")


@pytest.mark.parametrize("op", ROPE)
@pytest.mark.parametrize("name", ["q_norm_weight", "k_norm_weight"])
def test_norm_weights_go_with_a_policy(op, name, rng):
    given = sample(op, rng)
    assert given["qk_norm_policy"] != "none"
    refused(op, {**given, name: None}, hccupy.ArgumentError, name)
    other = {"q_norm_weight", "k_norm_weight"} - {name}
    refused(op, {**given, "qk_norm_policy": "none", other.pop(): None}, hccupy.ArgumentError, name, "ignored")


@pytest.mark.parametrize("op", ROPE)
@pytest.mark.parametrize("width", [1, 63, 130])
def test_rotary_width(op, width, rng):
    """Odd, or wider than a head."""
    given = sample(op, rng)
    refused(op, {**given, "cos_sin": np.zeros((len(given["cos_sin"]), width), np.float32)}, hccupy.ShapeError, "cos_sin", str(width))


@pytest.mark.parametrize("op", ROPE)
def test_head_dims_without_a_kernel(op, rng):
    given = sample(op, rng)
    for name, axis in (("key_cache", "head_dim"), ("value_cache", "v_head_dim")):
        cache = np.zeros((*given[name].shape[:-1], 100), given[name].dtype)
        changed = {**given, name: cache}
        for k in ("out_q", "out_k", "out_v", "q_norm_weight", "k_norm_weight"):
            changed[k] = None
        changed["qk_norm_policy"] = "none"
        refused(op, changed, hccupy.ShapeError, axis, "100")


@pytest.mark.parametrize("op", ROPE)
@pytest.mark.parametrize("change", [-1, 1, 33])
def test_qkv_width_that_fits_no_head_count(op, change, rng):
    given = sample(op, rng)
    rows, width = given["qkv"].shape
    refused(op, {**given, "qkv": np.zeros((rows, width + change), given["qkv"].dtype), "out_q": None}, hccupy.ShapeError, "qkv", str(width + change))


@pytest.mark.parametrize("op", ROPE)
def test_block_table_without_columns(op, rng):
    given = sample(op, rng)
    given["block_table"] = np.zeros((len(given["seq_lens"]), 0), np.int32)
    refused(op, {**given, "out_k": None}, hccupy.ShapeError, "block_table")


@pytest.mark.parametrize(
    "changes, name, word",
    [
        ({"q_quant": "dynamic", "q_scale_inv": None, "is_prefill": True, "max_q_len": None}, "max_q_len", "None"),
        ({"q_quant": "dynamic", "q_scale_inv": None, "is_prefill": True, "max_q_len": 0}, "max_q_len", "0"),
        ({"q_scale_inv": None}, "q_scale_inv", "None"),
        ({"q_quant": "dynamic"}, "q_scale_inv", "ignored"),
        ({"upper_max": 0.0}, "upper_max", "0"),
        ({"upper_max": -1.0}, "upper_max", "-1"),
        ({"upper_max": 449.0}, "upper_max", "449"),
        ({"upper_max": 1e-300}, "upper_max", "1e-300"),
    ],
)
def test_fp8_modes(changes, name, word, rng):
    refused("rope_norm_store_kv_fp8", {**sample("rope_norm_store_kv_fp8", rng), **changes}, hccupy.ArgumentError, name, word)


@pytest.mark.parametrize("prefill", [False, True])
def test_q_scale_out(prefill, rng):
    """Written where q is scaled by row, refused where there is no such scale."""
    op = "rope_norm_store_kv_fp8"
    given = sample(op, rng)
    rows = max(np.diff(given["q_index"]))
    dynamic = given | {"q_quant": "dynamic", "q_scale_inv": None, "is_prefill": prefill, "max_q_len": int(rows) if prefill else None}
    expected = hccupy.rope_norm_store_kv_fp8(**dynamic)[1]
    buffer = poisoned(expected.shape, expected.dtype)
    assert hccupy.rope_norm_store_kv_fp8(**dynamic, q_scale_out=buffer)[1] is buffer
    np.testing.assert_array_equal(buffer, expected)
    refused(op, dynamic | {"q_scale_out": buffer[..., :-1]}, hccupy.ShapeError, "q_scale_out")
    refused(op, given | {"q_scale_out": buffer}, hccupy.ArgumentError, "q_scale_out", "None in this mode")


@pytest.mark.parametrize("op", ROPE)
@pytest.mark.parametrize("kind", ["page high", "page negative", "position", "q_index falls", "q_index long", "q_index start"])
def test_metadata_errors_only_in_debug_mode(op, kind, rng, monkeypatch):
    """HCCUPY_DEBUG=1, read at each call: the first offence, and nothing written. Without it the call goes through."""
    given = sample(op, rng)
    given["out_k"] = given["out_v"] = None
    b, pages = 4, len(given["key_cache"])  # the request with 17 new tokens of 33
    word = {"page high": f"page {pages}", "page negative": "page -3", "position": "request 4, position"}.get(kind, "q_index")
    if kind == "page high":
        given["block_table"][b, 1] = pages
    elif kind == "page negative":
        given["block_table"][b, 1] = -3
    elif kind == "position":
        given["seq_lens"][b] = 16
    elif kind == "q_index falls":
        given["q_index"][2] = 0
    elif kind == "q_index long":
        given["q_index"][-1] += 100
    else:
        given["q_index"][0] = 1
    monkeypatch.setenv("HCCUPY_DEBUG", "1")
    text = refused(op, given, hccupy.MetadataError, word)
    assert kind.startswith("q_index") or ("request 4" in text and "position" in text)
    monkeypatch.setenv("HCCUPY_DEBUG", "0")
    getattr(hccupy, op)(**given)


# ---- other frameworks -------------------------------------------------------------------------------------------


def as_torch(array):
    torch = pytest.importorskip("torch")
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        bits = np.ascontiguousarray(array).view(np.int16 if array.itemsize == 2 else np.uint8)
        return torch.from_numpy(bits.copy()).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(array).copy())


@pytest.mark.parametrize("op, name", PAIRS + OUTS)
def test_two_frameworks(op, name, rng):
    """One torch tensor among NumPy arrays, or the other way round for the first argument."""
    given = sample(op, rng)
    array = given[name]
    first = REGISTRY[op].args[0].name
    text = refused(op, {**given, name: as_torch(array)}, hccupy.FrameworkError, "numpy", "torch")
    assert name in text or name == first


@pytest.mark.parametrize("op, name", PAIRS + OUTS)
def test_tensor_without_memory(op, name, rng):
    """torch's meta device: in every place, the argument is named."""
    torch = pytest.importorskip("torch")
    given = {n: as_torch(v) if isinstance(v, np.ndarray) else v for n, v in sample(op, rng).items()}
    given[name] = torch.empty_like(given[name], device="meta")
    with pytest.raises(hccupy.DeviceError, match=f"^{op}: {name}: expected .* got .*meta"):
        getattr(hccupy, op)(**given)


@pytest.mark.parametrize("kind", ["sparse", "negative", "conjugate", "fake"])
def test_tensors_that_are_not_plain_memory(kind, rng):
    """Reading them by address would be wrong; a plain tensor of the same shape has been seen just before."""
    torch = pytest.importorskip("torch")
    given = {n: as_torch(v) if isinstance(v, np.ndarray) else v for n, v in sample("ihc_post", rng).items()}
    hccupy.ihc_post(**given)
    x = given["x"]
    if kind == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            given["x"] = torch.empty(x.shape, dtype=x.dtype)
    else:
        given["x"] = {"sparse": x.to_sparse, "negative": lambda: torch._neg_view(x), "conjugate": lambda: torch.complex(x.float(), x.float()).conj()}[kind]()
    with pytest.raises((hccupy.FrameworkError, hccupy.DtypeError), match=r"^ihc_post: x: expected .* got "):
        hccupy.ihc_post(**given)


def test_field_of_a_structured_array(rng):
    """Strides that are no whole number of elements."""
    given = sample("ihc_post", rng)
    x = given["x"]
    mixed = np.zeros(x.shape, [("a", x.dtype), ("b", np.int8)])
    refused("ihc_post", {**given, "x": mixed["a"]}, hccupy.LayoutError, "x", "whole elements")


def test_masked_array_is_not_taken_for_a_plain_one(rng):
    """Its mask would be dropped in silence."""
    given = sample("ihc_post", rng)
    refused("ihc_post", {**given, "x": np.ma.MaskedArray(given["x"], mask=True)}, hccupy.FrameworkError, "x")


def test_stream_that_is_none():
    for bad in ("0", 1.5, -1, True, object()):
        with pytest.raises(hccupy.ArgumentError, match="stream: expected a stream handle"):
            from hccupy.binding import stream_handle

            stream_handle(bad)


def test_every_argument_is_an_arg_or_scalar():
    """The lists above cover every parameter of every op."""
    for op in OPS:
        listed = {n for o, n in PAIRS if o == op} | {n for o, n in HOST_SCALARS if o == op}
        assert listed == {p.name for p in REGISTRY[op].params} and all(isinstance(p, Arg) or p.kind for p in REGISTRY[op].params)
