"""The iHC layers of an engine. Weights belong to the eager layer (the owner), which is read at every forward.

The owner is kept outside the module tree: an owner that holds one of these as its child would otherwise make the tree
cyclic, and state_dict() would list its weights twice.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .. import api
from ..errors import ArgumentError, DtypeError, FrameworkError, ShapeError, explain
from ..explain import supports
from .common import eps_of, tensor_of


class _Layer(torch.nn.Module):  # type: ignore[misc]
    op: ClassVar[str]

    def __init__(self, hc_mult: int, hidden_size: int) -> None:
        super().__init__()
        self.hc_mult = hc_mult
        self.hidden_size = hidden_size

    @classmethod
    def support(cls, hc_mult: int, hidden_size: int) -> bool:
        """Can this machine run such sizes?"""
        return supports(cls.op, hc=hc_mult, hidden=hidden_size)[0]

    @classmethod
    def support_reason(cls, hc_mult: int, hidden_size: int) -> str:
        """Which kernel runs such sizes, or why none does."""
        return supports(cls.op, hc=hc_mult, hidden=hidden_size)[1]

    def process_weights_after_loading(self, model: Any = None) -> None:
        """Nothing to pick up."""

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"hc_mult={self.hc_mult}, hidden_size={self.hidden_size}"


class _Gated(_Layer):
    """A layer with an owner: weight, hc_scale, hc_base, rms_weight and rms_eps are the owner's, None until they are loaded."""

    names: ClassVar[tuple[str, str, str]] = ("hc_fn", "hc_scale", "hc_base")
    rows: ClassVar[int] = 2  # gates a channel

    def __init__(self, hc_mult: int, hidden_size: int, hc_eps: float, norm_eps: float, fallback_op: Any, norm_owner: Any = None) -> None:
        super().__init__(hc_mult, hidden_size)
        self.hc_eps = hc_eps
        self.norm_eps = norm_eps
        self.loaded = False
        object.__setattr__(self, "_fallback_op", fallback_op)
        object.__setattr__(self, "_norm_owner", norm_owner)

    @property
    def weight(self) -> Any:
        """The gate projection, fp32 [rows, hc_mult * hidden_size]."""
        return tensor_of(getattr(self._fallback_op, self.names[0])) if self.loaded else None

    @property
    def hc_scale(self) -> Any:
        """The scales of the gate logits."""
        return getattr(self._fallback_op, self.names[1]) if self.loaded else None

    @property
    def hc_base(self) -> Any:
        """The offsets of the gate logits."""
        return getattr(self._fallback_op, self.names[2]) if self.loaded else None

    @property
    def rms_weight(self) -> Any:
        """The folded norm's weight, or None."""
        return self._norm_owner.weight if self.loaded and self._norm_owner is not None else None

    @property
    def rms_eps(self) -> float:
        """The folded norm's eps (0.0 without one)."""
        return eps_of(type(self).__name__, self._norm_owner) if self.loaded and self._norm_owner is not None else 0.0

    def process_weights_after_loading(self, model: Any = None) -> None:
        """Check the owner's weights and use them from now on. A refit that replaces parameters needs no second call.

        Raises FrameworkError, ShapeError or DtypeError naming the weight: gates stay fp32 from load to gate.
        """
        me = type(self).__name__
        rows = self.rows * self.hc_mult
        shapes = ((rows, self.hc_mult * self.hidden_size), (self.rows,), (rows,))
        for name, shape in zip(self.names, shapes, strict=True):
            held = getattr(self._fallback_op, name, None)
            if held is None:
                mend = f"{type(self._fallback_op).__name__} must hold {', '.join(self.names)}."
                raise FrameworkError(explain(me, name, "a parameter of the owner", "none", mend))
            value = tensor_of(held)
            if tuple(value.shape) != shape:
                raise ShapeError(explain(me, name, f"shape {list(shape)}", f"{list(value.shape)}", "hc_mult and hidden_size must be the owner's."))
            if value.dtype != torch.float32:
                raise DtypeError(explain(me, name, "float32", str(value.dtype), "Load it in fp32; do not cast or quantise it with the model."))
        if self._norm_owner is not None:
            eps_of(me, self._norm_owner)
        self.loaded = True

    def _weights(self) -> tuple[Any, Any, Any]:
        if not self.loaded:
            mend = "Call it once the model's weights are loaded."
            raise ArgumentError(explain(type(self).__name__, "weights", "process_weights_after_loading() before forward", "forward first", mend))
        return self.weight, self.hc_scale, self.hc_base


class IHCPre(_Gated):
    """Merge the channels for a block, with the RMSNorm that follows folded in if its owner is given.

    hc_mult, hidden_size: channels and width. magnitude: multiplier of the post gates. hc_eps: added to both gates.
    norm_eps: inside the RMS of the projection input. fallback_op: the eager layer with hc_fn.weight, hc_scale, hc_base.
    norm_owner: the RMSNorm after it, or None.
    """

    op = "ihc_pre"

    def __init__(self, hc_mult: int, hidden_size: int, magnitude: float, hc_eps: float, norm_eps: float, fallback_op: Any, norm_owner: Any = None) -> None:
        super().__init__(hc_mult, hidden_size, hc_eps, norm_eps, fallback_op, norm_owner)
        self.magnitude = magnitude

    def forward(self, x: Any) -> tuple[Any, Any]:
        """x [tokens, hc, hidden] -> (input of the block [tokens, hidden], H_post [tokens, hc] fp32)."""
        options = {"rms_weight": self.rms_weight, "rms_eps": self.rms_eps}
        return api.ihc_pre(x, *self._weights(), self.norm_eps, self.hc_eps, self.magnitude, **options)  # type: ignore[no-any-return]


class IHCPostPre(IHCPre):
    """Finish one block and open the next in one launch; fallback_op and norm_owner are the next block's."""

    op = "ihc_post_pre"

    def forward(self, x: Any, residual: Any, H_post: Any) -> tuple[Any, Any, Any]:  # type: ignore[override]
        """-> (new residual [tokens, hc, hidden], input of the next block [tokens, hidden], its H_post)."""
        options = {"rms_weight": self.rms_weight, "rms_eps": self.rms_eps}
        return api.ihc_post_pre(x, residual, H_post, *self._weights(), self.norm_eps, self.hc_eps, self.magnitude, **options)  # type: ignore[no-any-return]


class IHCPost(_Layer):
    """Add a block's output to every channel of the residual through its gate. No weights."""

    op = "ihc_post"

    def forward(self, x: Any, residual: Any, H_post: Any) -> Any:
        """x [tokens, hidden], residual [tokens, hc, hidden], H_post [tokens, hc] -> the new residual."""
        return api.ihc_post(x, residual, H_post)


class IHCHead(_Gated):
    """Merge the channels into one hidden state after the last layer; fallback_op holds hc_head_fn, hc_head_scale, hc_head_base."""

    op = "ihc_head"
    names = ("hc_head_fn", "hc_head_scale", "hc_head_base")
    rows = 1

    def forward(self, x: Any) -> Any:
        """x [tokens, hc, hidden] -> [tokens, hidden]."""
        return api.ihc_head(x, *self._weights(), self.norm_eps, self.hc_eps, rms_weight=self.rms_weight, rms_eps=self.rms_eps)
