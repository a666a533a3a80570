"""REGISTRY: the name of every op and its one statement."""

from __future__ import annotations

from ..errors import UnknownOpError
from ..spec import OpSpec
from .ihc import IHC_HEAD, IHC_POST, IHC_POST_PRE, IHC_PRE
from .rope_norm_store_kv import ROPE_NORM_STORE_KV, ROPE_NORM_STORE_KV_FP8
from .store_kv import STORE_KV, ZERO_KV_TAIL

REGISTRY: dict[str, OpSpec] = {
    spec.name: spec for spec in (IHC_PRE, IHC_HEAD, IHC_POST, IHC_POST_PRE, ROPE_NORM_STORE_KV, ROPE_NORM_STORE_KV_FP8, STORE_KV, ZERO_KV_TAIL)
}


def get(name: str) -> OpSpec:
    """The spec of that name.

    Raises UnknownOpError naming the ops there are.
    """
    if name not in REGISTRY:
        raise UnknownOpError(f"op: expected one of {', '.join(REGISTRY)}, got {name!r}.")
    return REGISTRY[name]
