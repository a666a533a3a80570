"""hccupy.patch(model): run the hyper-connections of a HY V4 model tree on hccupy's ops, and hccupy.unpatch(model).

Modules are known by what they hold, not by their class: an iHC pre has hc_fn, hc_scale [2] and hc_base [2 * hc]; a head has hc_head_fn,
hc_head_scale [1] and hc_head_base [hc]; a post has no parameters and a forward(x, residual, post); a rope is vLLM's HpcRopeNorm
or one like it. Hyper-connections with a combination matrix (mHC) have other shapes and are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from . import api
from .errors import ArgumentError, DtypeError, explain
from .nn.common import eps_of, tensor_of
from .nn.rope import RopeNorm

MARK = "_hccupy"  # in a patched module's __dict__: what its new method reads, and what unpatch restores
CHILDREN = "_hccupy_children"
SCALARS = {
    "norm_eps": ("norm_eps", "layernorm_epsilon", "rms_norm_eps", "layernorm_eps"),
    "hc_eps": ("hc_eps",),
    "magnitude": ("magnitude", "hc_magnitude"),
}
ROPE_HOLDS = ("num_heads", "num_kv_heads", "head_dim", "cos_sin_cache", "fallback_qnorm", "fallback_knorm", "qk_norm_policy", "use_fp8", "layer_name")


def patch(model: Any, *, pre: bool = True, post: bool = True, head: bool = True, rope: bool = True) -> dict[str, int]:
    """Replace the parts that are switched on; how many of each were replaced, as {"pre": 78, "post": 78, "head": 1, "rope": 0}.

    Weights stay where they are and are read at every call: loading, refits and .to() need nothing more. Nothing is changed
    unless everything found can be. Inference only: no gradient flows through a patched part.

    Raises ArgumentError where nothing is found, a constant (eps, magnitude) is missing or the model is patched already;
    DtypeError where a gate's weights are not fp32.
    """
    if any(MARK in m.__dict__ or CHILDREN in m.__dict__ for m in model.modules()):
        raise ArgumentError(explain("patch", "model", "one that is not patched", "a patched one", "Call hccupy.unpatch(model) first."))
    found: list[tuple[str, Any, str, Callable[..., Any] | None, dict[str, Any]]] = []
    for name, module in model.named_modules():
        if pre and _is_gate(module, "hc_", 2):
            found.append(("pre", module, "forward", _pre, _scalars(name, module, ("norm_eps", "hc_eps", "magnitude"), "hc_")))
        if head and _is_gate(module, "hc_head_", 1):
            found.append(("head", module, "forward", _head, _scalars(name, module, ("norm_eps", "hc_eps"), "hc_head_")))
        if post:
            method = _post_method(module)
            if method:
                found.append(("post", module, method, _post, {"names": _names(getattr(module, method))}))
        if rope:
            found += [("rope", module, child, None, {}) for child, held in module.named_children() if _is_rope(held)]
    counts = dict.fromkeys(("pre", "post", "head", "rope"), 0)
    if not found:
        looked = ", ".join(k for k, on in zip(counts, (pre, post, head, rope), strict=True) if on) or "nothing: every switch is off"
        mend = "See help(hccupy.patching) for what is recognised; models of one's own use hccupy.nn."
        raise ArgumentError(explain("patch", "model", f"at least one module to replace (looked for {looked})", f"none in {type(model).__name__}", mend))
    ropes = {id(held): _rope(held) for kind, m, child, *_ in found if kind == "rope" for held in [getattr(m, child)]}
    for kind, module, attribute, method_of, facts in found:
        if method_of is None:
            old = getattr(module, attribute)
            module.__dict__.setdefault(CHILDREN, {})[attribute] = old
            setattr(module, attribute, ropes[id(old)])
        else:
            module.__dict__[MARK] = {**facts, "attribute": attribute, "before": module.__dict__.get(attribute)}
            module.__dict__[attribute] = MethodType(method_of, module)
        counts[kind] += 1
    return counts


def unpatch(model: Any) -> int:
    """Undo patch(model); how many parts were restored. Raises ArgumentError where none is patched."""
    restored = 0
    for module in list(model.modules()):
        facts = module.__dict__.pop(MARK, None)
        if facts is not None:
            del module.__dict__[facts["attribute"]]
            if facts["before"] is not None:
                module.__dict__[facts["attribute"]] = facts["before"]
            restored += 1
        for name, old in module.__dict__.pop(CHILDREN, {}).items():
            setattr(module, name, old)
            restored += 1
    if not restored:
        raise ArgumentError(explain("unpatch", "model", "a patched model", f"{type(model).__name__} without patched parts"))
    return restored


# ---- what is recognised ------------------------------------------------------------------------------------------------


def _is_gate(module: Any, prefix: str, rows: int) -> bool:
    """Does it hold the three weights of an independent hyper-connection, and nothing else?"""
    if any(not hasattr(module, prefix + part) for part in ("fn", "scale", "base")):
        return False
    if {name for name, _ in module.named_children()} - {f"{prefix}fn"} or isinstance(module, RopeNorm):
        return False  # a whole model that keeps its head's weights: its forward does more than that
    try:
        w, scale, base = (tensor_of(getattr(module, prefix + part)) for part in ("fn", "scale", "base"))
    except AttributeError:
        return False
    hc = w.shape[0] // rows if w.dim() == 2 else 0
    return hc > 0 and w.shape[0] == rows * hc == base.numel() and w.shape[1] % hc == 0 and scale.numel() == rows and "hccupy" not in type(module).__module__


def _post_method(module: Any) -> str | None:
    """The method that adds a block's output to the channels: a parameterless layer's forward, or post() beside an hc_pre."""
    children = {name for name, _ in module.named_children()}
    if "hccupy" in type(module).__module__:
        return None
    if not children and next(module.parameters(), None) is None and _is_post(module.forward):
        return "forward"
    if "hc_pre" in children and "hc_post" not in children and callable(getattr(module, "post", None)) and _is_post(module.post):
        return "post"
    return None


def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _is_post(function: Any) -> bool:
    names = _names(function)
    return len(names) == 3 and names[1] == "residual" and "post" in names[2].lower()


def _is_rope(module: Any) -> bool:
    return not isinstance(module, RopeNorm) and all(hasattr(module, name) for name in ROPE_HOLDS)


def _scalars(name: str, module: Any, wanted: tuple[str, ...], prefix: str) -> dict[str, Any]:
    """The constants of a gate, from the module or its config."""
    for part in ("fn", "scale", "base"):
        dtype = tensor_of(getattr(module, prefix + part)).dtype
        if dtype != torch.float32:
            mend = "Keep the hyper-connections' weights in fp32 when the model is loaded or cast."
            raise DtypeError(explain("patch", f"{name}.{prefix}{part}", "float32", str(dtype), mend))
    facts = {}
    for word in wanted:
        for spelt in SCALARS[word]:
            value = getattr(module, spelt, None)
            value = getattr(getattr(module, "config", None), spelt, None) if value is None else value
            if value is not None:
                facts[word] = float(value)
                break
        else:
            wanted_names = f"one of {', '.join(SCALARS[word])} on the module or its config"
            raise ArgumentError(explain("patch", f"{name}.{word}", wanted_names, "none", "Set it on the module."))
    return facts


# ---- what stands in ------------------------------------------------------------------------------------------------------


def _pre(self: Any, x: Any, rms_weight: Any = None, rms_eps: float = 0.0) -> Any:
    facts = self.__dict__[MARK]
    given = (facts["norm_eps"], facts["hc_eps"], facts["magnitude"], rms_weight, rms_eps)
    return api.ihc_pre(x, tensor_of(self.hc_fn), self.hc_scale, self.hc_base, *given)


def _head(self: Any, x: Any, norm: Any = None) -> Any:
    facts = self.__dict__[MARK]
    options = {} if norm is None else {"rms_weight": norm.weight, "rms_eps": eps_of("patch", norm)}
    return api.ihc_head(x, tensor_of(self.hc_head_fn), self.hc_head_scale, self.hc_head_base, facts["norm_eps"], facts["hc_eps"], **options)


def _post(self: Any, *args: Any, **kwargs: Any) -> Any:
    names = self.__dict__[MARK]["names"]
    x, residual, gates = (*args, *(kwargs[n] for n in names[len(args) :]))
    return api.ihc_post(x, residual, gates.float())


def _rope(old: Any) -> RopeNorm:
    normed = old.qk_norm_policy != 0
    module = RopeNorm(
        old.num_heads, old.num_kv_heads, old.head_dim, old.cos_sin_cache, normed, old.fallback_qnorm, old.fallback_knorm,
        "fp8_e4m3" if old.use_fp8 else "auto", old.layer_name, old.qk_norm_policy,
    )  # fmt: skip
    module.process_weights_after_loading()
    return module
