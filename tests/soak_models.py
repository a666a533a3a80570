"""What the soak calls: sets of baked sizes, drawn once, and the kernels that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hccupy import arch, build, plan
from hccupy.dtypes import BY_NAME
from hccupy.ops import REGISTRY
from hccupy.ops.rope_inputs import LAYOUTS, make_caches
from hccupy.spec import Case

from . import rope_cases
from .test_plan import bound_of

IHC = ("ihc_pre", "ihc_head", "ihc_post", "ihc_post_pre")
TOKENS = (1, 5, 9, 33, 70, 300, 1000, 3000)  # that kernels are compiled ahead for


@dataclass
class Model:
    """What is baked, drawn once."""

    kind: str  # ihc, rope, store
    words: dict[str, Any]
    device: str

    def ops(self) -> tuple[str, ...]:
        return {"ihc": IHC, "rope": ("rope_norm_store_kv_fp8" if self.words.get("fp8") else "rope_norm_store_kv",), "store": ("store_kv", "zero_kv_tail")}[
            self.kind
        ]


def models(rng: np.random.Generator, count: int, device: str) -> list[Model]:
    """A third each of iHC, RoPE and, half as many, the small ops."""
    pick = lambda *values: values[int(rng.integers(len(values)))]
    cpu = device == "cpu"
    found = []
    for i in range(count):
        kind = ("ihc", "rope", "ihc", "rope", "store")[i % 5]
        if kind == "ihc":
            hidden = pick(72, 100, 257, 576) if cpu else pick(6144, 4096, 5120, 7168, 4100, 2560, 1024, 2048, 8192, 576, 100, 257)
            dtype = pick("bfloat16", "float16") if cpu else pick("bfloat16", "bfloat16", "bfloat16", "float16", "float32")
            words = {"hc": pick(4, 4, 4, 2, 8, 1, 3, 5), "hidden": hidden, "dtype": dtype, "norm": pick(True, False), "rms_dtype": pick(dtype, "float32")}
        elif kind == "rope":
            kv_heads, group, dim = pick(1, 2, 4, 8), pick(1, 3, 4, 6, 8), pick(64, 72, 80, 96, 128, 128, 128, 192, 256)
            words = {
                "fp8": pick(True, False), "q_heads": kv_heads * group, "kv_heads": kv_heads, "dim": dim, "v_dim": pick(dim, dim, 64, 128),
                "rotary": pick(dim, dim, dim // 2, 0), "dtype": pick("bfloat16", "bfloat16", "float16"), "weights": pick("float32", "same"),
                "outs": pick((), (), (), ("out_k", "out_v"), ("out_k",)), "layout": pick(*LAYOUTS), "block_size": pick(1, 8, 16, 64),
                "scalars": {
                    "qk_norm_policy": pick("none", "rope_then_norm", "norm_then_rope"), "norm_eps": pick(1e-6, 1e-5), "norm_weight_offset": pick(0.0, 1.0),
                    "rope_style": pick("neox", "interleaved"), "tail": pick("zero", "zero", "keep"), "null_block": pick(None, None, 0, -1),
                },
            }  # fmt: skip
            if words["fp8"]:
                mode = {"q_quant": pick("dynamic", "dynamic", "static"), "is_prefill": pick(True, False), "upper_max": pick(None, None, 240.0)}
                words["scalars"] |= mode
        else:
            words = {
                "dtype": pick("bfloat16", "float16", "float32", "uint8"),
                "kv_heads": pick(1, 2, 8),
                "dim": pick(64, 72, 128, 576),
                "block_size": pick(8, 16, 64),
                "layout": pick(*LAYOUTS),
            }
        found.append(Model(kind, words, device))
    return found


def numpy_sample(model: Model, op: str, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, outputs by spec name) of a small call, for planning only."""
    w = model.words
    if model.kind == "ihc":
        case = Case(
            "soak", {"tokens": 2, "hc": w["hc"], "hidden": w["hidden"]}, {}, w["dtype"], {"norm": w["norm"] and op != "ihc_post", "rms_dtype": w["rms_dtype"]}
        )
        return REGISTRY[op].make_inputs(case, rng), {}
    if model.kind == "store":
        axes = {"tokens": 2, "requests": 2, "kv_heads": w["kv_heads"], "head_dim": w["dim"], "v_head_dim": w["dim"], "block_size": w["block_size"]}
        return REGISTRY[op].make_inputs(Case("soak", axes, {}, w["dtype"], {"layout": w["layout"]}), rng), {}
    kind = BY_NAME[w["dtype"]].np
    given = rope_cases.build(
        rng, w["q_heads"], w["kv_heads"], w["dim"], w["v_dim"], w["rotary"], w["block_size"], dtype=w["dtype"],
        policy=w["scalars"]["qk_norm_policy"], weight_dtype=np.float32 if w["weights"] == "float32" else kind,
    )  # fmt: skip
    if w["fp8"]:
        given = rope_cases.fp8(given, **{k: w["scalars"][k] for k in ("q_quant", "is_prefill")})
        given |= {"q_scale_inv": np.ones(1, np.float32)} if w["scalars"]["q_quant"] == "static" else {}
    store = given["key_cache"].dtype
    given |= w["scalars"]
    given["key_cache"], given["value_cache"] = make_caches(w["layout"], lambda s: np.zeros(s, store), 4, w["block_size"], w["kv_heads"], w["dim"], w["v_dim"])
    return given, {n: np.zeros((len(given["qkv"]), w["kv_heads"], w["dim" if n == "out_k" else "v_dim"]), store) for n in w["outs"]}


def plans_of(found: list[Model], target: arch.Arch) -> list[plan.Plan]:
    """What calls of these models need: rows without gaps, and with gaps that leave accesses of an element, or of four."""
    made: dict[str, plan.Plan] = {}
    for model in found:
        for op in model.ops():
            spec = REGISTRY[op]
            plain, outs = numpy_sample(model, op, np.random.default_rng(0))
            for more in (0, 3, 12) if model.kind != "store" else (0,):
                given = {
                    k: np.zeros((*v.shape[:-1], v.shape[-1] + more), v.dtype)[..., : v.shape[-1]] if k in ("x", "residual", "qkv") else v
                    for k, v in plain.items()
                }
                for tokens in TOKENS if any(a.name == "tokens" for a in spec.axes) else (None,):
                    longer = {n: np.lib.stride_tricks.as_strided(o, (tokens, *o.shape[1:]), o.strides) for n, o in outs.items()} if tokens else outs
                    each = plan.make(spec, bound_of(spec, given, tokens, outs=longer), target)
                    made[build.identity(each)] = each
    return list(made.values())


def compile_one(made: plan.Plan) -> None:
    """Into the cache; run in many processes."""
    build.binary(made)
