"""What the modules share: finding a norm's weight and eps, and staying fp32 when a model is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, explain

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def eps_of(op: str, norm: Any) -> float:
    """The eps of an RMSNorm, by the names that vLLM, SGLang, Hugging Face and torch give it.

    Raises ArgumentError where it has none.
    """
    for name in EPS_NAMES:
        value = getattr(norm, name, None)
        if value is not None:
            return float(value)
    raise ArgumentError(explain(op, "norm", f"an RMSNorm with {' or '.join(EPS_NAMES[:2])}", type(norm).__name__, "Set norm.variance_epsilon."))


def tensor_of(linear: Any) -> Any:
    """The weight of a linear layer, or the tensor itself where the model keeps a bare parameter."""
    return linear if isinstance(linear, torch.Tensor) else linear.weight


class KeepsFp32(torch.nn.Module):  # type: ignore[misc]
    """A module whose fp32 parameters and buffers stay fp32, bit for bit, under .to(dtype), .bfloat16() and .half()."""

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        def moved(t: Any) -> Any:
            out = fn(t)
            if t.dtype == torch.float32 and out.dtype != torch.float32:
                return torch.empty_like(out, dtype=torch.float32) if t.is_meta else t.to(out.device)
            return out

        return super()._apply(moved, recurse)
