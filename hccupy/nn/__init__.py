"""torch modules around the ops.

For engines: IHCPre, IHCPost, IHCHead, IHCPostPre and RopeNorm take the constructor arguments of vLLM's Hpc* layers, whose
names are aliases here. They own no gate weights: they read those of the eager layer they stand in for.
For models of one's own: HyperConnection and HyperHead hold their parameters.

Inference only: no gradient flows through any of them.
"""

from __future__ import annotations

from .connection import HyperConnection, HyperHead
from .context import ForwardContext, set_forward_context
from .ihc import IHCHead, IHCPost, IHCPostPre, IHCPre
from .rope import QkNormPolicy, RopeNorm

HpcIHCPre, HpcIHCPost, HpcIHCHead, HpcIHCPostPre, HpcRopeNorm = IHCPre, IHCPost, IHCHead, IHCPostPre, RopeNorm

__all__ = [
    "ForwardContext",
    "HpcIHCHead",
    "HpcIHCPost",
    "HpcIHCPostPre",
    "HpcIHCPre",
    "HpcRopeNorm",
    "HyperConnection",
    "HyperHead",
    "IHCHead",
    "IHCPost",
    "IHCPostPre",
    "IHCPre",
    "QkNormPolicy",
    "RopeNorm",
    "set_forward_context",
]
