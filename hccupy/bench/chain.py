"""Programmatic dependent launch where it matters: a chain pre -> matmul -> post_pre -> matmul -> ..., with and without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import hccupy

from .. import run
from ..ops import REGISTRY
from ..spec import Case, Variant
from . import inputs, timing

LAYERS = 16  # weights of 16 layers (gates 0.8 MB, a 6144 x 1024 matmul 12.6 MB each) are far larger than L2


def _without(variant: Variant) -> Variant:
    plain: Callable[..., Any] = lambda bound, arch: dataclasses.replace(variant.launch(bound, arch), pdl=False)  # noqa: E731
    return dataclasses.replace(variant, launch=plain)


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    """Inside, every op starts with (as planned) or without the programmatic attribute."""
    kept = dict(REGISTRY)
    if not on:
        for name, spec in kept.items():
            REGISTRY[name] = dataclasses.replace(spec, variants=tuple(_without(v) for v in spec.variants))
    run.forget()
    try:
        yield
    finally:
        REGISTRY.update(kept)
        run.forget()


def chain_times() -> list[dict[str, Any]]:
    """Microseconds a layer (post_pre and a narrow matmul), H 6144, hc 4, bf16, at a few token counts."""
    import torch

    rows = []
    spec = REGISTRY["ihc_post_pre"]
    for tokens in (1, 16, 64, 256):
        case = Case("chain", {"tokens": tokens, "hc": 4, "hidden": 6144}, {}, "bfloat16")
        host = spec.make_inputs(case, np.random.default_rng(0))
        layers = [inputs.to_torch(host) for _ in range(LAYERS)]
        down = [torch.randn(6144, 512, device="cuda", dtype=torch.bfloat16) / 80 for _ in range(LAYERS)]
        up = [torch.randn(512, 6144, device="cuda", dtype=torch.bfloat16) / 23 for _ in range(LAYERS)]

        def network(layers: Any = layers, down: Any = down, up: Any = up) -> Any:
            first = layers[0]
            residual, gates = first["residual"], ("w", "hc_scale", "hc_base")
            z, h_post = hccupy.ihc_pre(residual, *(first[k] for k in gates))
            for k, a, b in zip(layers, down, up, strict=True):
                residual, z, h_post = hccupy.ihc_post_pre(z @ a @ b, residual, h_post, *(k[g] for g in gates))
            return residual

        for on in (True, False):
            with dependent_launch(on):
                times = timing.graph_us([network])
            rows.append({"tokens": tokens, "pdl": on, "us_per_layer": times["us"] / LAYERS})
    return rows
