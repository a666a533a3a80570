"""Where RopeNorm finds a forward's metadata and caches: what vLLM calls the forward context."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError, explain


@dataclass
class ForwardContext:
    """attn_metadata: one object, a dict of them by layer name, or None (nothing is stored then, q is zero).

    no_compile_layers: by layer name, objects with kv_cache and, for fp8, _k_scale and _v_scale (one fp32 value each).
    """

    attn_metadata: Any
    no_compile_layers: Mapping[str, Any] = field(default_factory=dict)


_current: ContextVar[ForwardContext | None] = ContextVar("hccupy_forward_context", default=None)


@contextmanager
def set_forward_context(attn_metadata: Any, no_compile_layers: Mapping[str, Any] | None = None) -> Iterator[ForwardContext]:
    """For the length of a `with` block, RopeNorm modules take metadata and caches from here."""
    context = ForwardContext(attn_metadata, no_compile_layers or {})
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def get_forward_context() -> Any:
    """The context of set_forward_context, else vLLM's where vLLM runs in this process.

    Raises ArgumentError where there is neither.
    """
    context = _current.get()
    if context is not None:
        return context
    vllm = sys.modules.get("vllm.forward_context")
    if vllm is not None:
        return vllm.get_forward_context()
    mend = "Use hccupy.nn.set_forward_context(...), or give RopeNorm forward_context=."
    raise ArgumentError(explain("RopeNorm", "forward context", "one that is set", "none", mend))
