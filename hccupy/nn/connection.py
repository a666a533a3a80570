"""Hyper-connections with parameters, for models of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import api
from ..errors import ArgumentError, FrameworkError, ShapeError, explain
from .common import KeepsFp32, eps_of

INITIAL_SCALE = 0.01  # of HY V4 models


class _Gates(KeepsFp32):
    """hc_fn, hc_scale and hc_base under the names checkpoints use, fp32 whatever the model is cast to, without gradients."""

    prefix = "hc_"
    rows = 2

    def __init__(self, hidden: int, hc: int, norm: Any, norm_eps: float, hc_eps: float, device: Any) -> None:
        super().__init__()
        self.hidden, self.hc, self.norm_eps, self.hc_eps = hidden, hc, norm_eps, hc_eps
        self.norm = norm
        if norm is not None:
            eps_of(type(self).__name__, norm)  # now, not at the first forward
        linear = torch.nn.Linear(hc * hidden, self.rows * hc, bias=False, device=device, dtype=torch.float32)
        setattr(self, f"{self.prefix}fn", linear.requires_grad_(False))
        for name, size in (("scale", self.rows), ("base", self.rows * hc)):
            setattr(self, f"{self.prefix}{name}", torch.nn.Parameter(torch.empty(size, device=device, dtype=torch.float32), requires_grad=False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """HY V4's start: scale 0.01; base -log(hc - 1) for the pre gates (they sum to 1) and 0 for the post gates

        (each 1 with magnitude 2). With one channel both are 0.
        """
        with torch.no_grad():
            self._part("fn").weight.normal_(std=(self.hc * self.hidden) ** -0.5)
            self._part("scale").fill_(INITIAL_SCALE)
            self._part("base").zero_()
            self._part("base")[: self.hc] = -math.log(self.hc - 1) if self.hc > 1 else 0.0

    def _part(self, name: str) -> Any:
        return getattr(self, self.prefix + name)

    def _gates(self) -> dict[str, Any]:
        given = {"w": self._part("fn").weight, "hc_scale": self._part("scale"), "hc_base": self._part("base")}
        given.update(norm_eps=self.norm_eps, hc_eps=self.hc_eps)
        if self.norm is not None:
            given.update(rms_weight=self.norm.weight, rms_eps=eps_of(type(self).__name__, self.norm))
        return given

    @classmethod
    def from_safetensors(cls, path: str | Path, prefix: str = "", **options: Any) -> Any:
        """The module with the weights `<prefix>hc_fn.weight`, `<prefix>hc_scale`, `<prefix>hc_base` of a file, or of a folder of files.

        hidden and hc are read from the shapes; `options` are the constructor's other arguments.
        Raises ArgumentError naming what is missing, FrameworkError where safetensors is not installed.
        """
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise FrameworkError(explain(cls.__name__, "safetensors", "the package", "none", "pip install safetensors")) from error
        names = {part: (f"{prefix}{cls.prefix}{part}", f"{prefix}{cls.prefix}{part}.weight") for part in ("fn", "scale", "base")}
        found: dict[str, Any] = {}
        files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
        for file in files:
            with safe_open(str(file), "pt") as held:
                keys = set(held.keys())
                found.update({part: held.get_tensor(n) for part, both in names.items() for n in both if n in keys})
        missing = [both[0] for part, both in names.items() if part not in found]
        if missing:
            raise ArgumentError(explain(cls.__name__, "path", f"tensors {', '.join(missing)} in {path}", "none of that name", "Is the prefix right?"))
        rows, width = found["fn"].shape
        hc = rows // cls.rows
        sizes = {"fn": (cls.rows * hc, width), "scale": (cls.rows,), "base": (cls.rows * hc,)}
        for part, size in sizes.items():
            if hc < 1 or width % hc or tuple(found[part].shape) != size:
                mend = "A hyper-connection with a combination matrix (mHC) has other shapes; these are independent ones."
                raise ShapeError(explain(cls.__name__, names[part][0], f"shape {list(size)}", f"{list(found[part].shape)}", mend))
        module = cls(width // hc, hc, **options)
        with torch.no_grad():
            module._part("fn").weight.copy_(found["fn"])
            module._part("scale").copy_(found["scale"])
            module._part("base").copy_(found["base"])
        return module


class HyperConnection(_Gates):
    """One iHC boundary: `y, h_post = m.pre(x)`, a block, `x = m.post(block(y), x, h_post)`; or m(x, block) for all three.

    hidden, hc: width and channels. magnitude, norm_eps, hc_eps: as hccupy.ihc_pre's. norm: the RMSNorm of the block's input, folded
    in; it becomes a child of this module. The gates keep fp32 and take no gradient.
    """

    def __init__(
        self, hidden: int, hc: int = 4, *, magnitude: float = 2.0, norm: Any = None, norm_eps: float = 1e-5, hc_eps: float = 1e-6, device: Any = None
    ) -> None:
        super().__init__(hidden, hc, norm, norm_eps, hc_eps, device)
        self.magnitude = magnitude

    def pre(self, x: Any) -> tuple[Any, Any]:
        """x [..., hc, hidden] -> (input of the block [..., hidden], h_post [..., hc])."""
        return api.ihc_pre(x, **self._gates(), magnitude=self.magnitude)  # type: ignore[no-any-return]

    def post(self, x: Any, residual: Any, h_post: Any, *, out: Any = None) -> Any:
        """The block's output x [..., hidden] added to residual [..., hc, hidden]; out=residual updates in place."""
        return api.ihc_post(x, residual, h_post, out=out)

    def post_pre(self, x: Any, residual: Any, h_post: Any, *, out: Any = None) -> tuple[Any, Any, Any]:
        """The previous block's post and this one's pre in one launch -> (new residual, input of this block, h_post)."""
        return api.ihc_post_pre(x, residual, h_post, **self._gates(), magnitude=self.magnitude, out=out)  # type: ignore[no-any-return]

    def forward(self, x: Any, block: Callable[[Any], Any]) -> Any:
        """The new residual channels after `block`."""
        y, h_post = self.pre(x)
        return self.post(block(y), x, h_post)


class HyperHead(_Gates):
    """Merge the channels into one hidden state after the last layer; weights hc_head_fn.weight, hc_head_scale, hc_head_base."""

    prefix = "hc_head_"
    rows = 1

    def __init__(self, hidden: int, hc: int = 4, *, norm: Any = None, norm_eps: float = 1e-5, hc_eps: float = 1e-6, device: Any = None) -> None:
        super().__init__(hidden, hc, norm, norm_eps, hc_eps, device)

    def forward(self, x: Any) -> Any:
        """x [..., hc, hidden] -> [..., hidden]."""
        return api.ihc_head(x, **self._gates())
