"""Inside torch.compile every public call becomes the registered op of torch_ops.py.

Dynamo reads a function's `_torchdynamo_inline` and traces what it finds there instead (torch.jit uses it too). So eager
calls pay nothing, not even a look, and torch is imported only by whoever compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bound import BoundCall
from .run import run
from .spec import OpSpec


def traced(spec: OpSpec, given: Sequence[Any], outs: Sequence[Any] = (), stream: Any = None) -> Any:
    """run.run as torch.compile sees it."""
    from . import torch_ops

    return torch_ops.traced(spec.name, given, outs, stream)


run._torchdynamo_inline = traced  # type: ignore[attr-defined]
# A bound call is addresses and a launch, which no compiler can see into: it breaks the graph, and fullgraph=True says this.
BoundCall.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
BoundCall.__call__._torchdynamo_disable_msg = "hccupy.bind() is for eager code: inside torch.compile call the op itself"  # type: ignore[attr-defined]
