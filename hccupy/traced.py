"""Inside torch.compile every public call becomes the registered op of torch_ops.py.

Dynamo reads a function's `_torchdynamo_inline` and traces what it finds there instead (torch.jit uses it too). So eager
calls pay nothing, not even a look, and torch is imported only by whoever compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .run import run
from .spec import OpSpec


def traced(spec: OpSpec, given: Sequence[Any], outs: Sequence[Any] = (), stream: Any = None) -> Any:
    """run.run as torch.compile sees it."""
    from . import torch_ops

    return torch_ops.traced(spec.name, given, outs, stream)


run._torchdynamo_inline = traced  # type: ignore[attr-defined]
