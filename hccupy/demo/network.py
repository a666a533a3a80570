"""The two networks. They share weights, attention, MLP and number formats; only the residual path differs.

    PlainNetwork   x = x + block(norm(x))                                           one residual, the model as trained
    HyperNetwork   residual [tokens, hc, hidden]: pre merges the channels for a block, post adds its result to each

With hc_scale 0, hc_base (-log(hc-1) | 0), magnitude 2 and hc_eps 0 the gates are h_pre = 1/hc and h_post = 1. The
channels then stay equal, their weighted sum is the plain residual (exactly, for hc = 4: quarters lose no bit that the
last addition does not bring back), and the two networks give the same logits.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

import hccupy

from .backend import Backend, Clock
from .cache import PagedCache
from .weights import Config, Layer, Weights

HC = 4
MAGNITUDE = 2.0
SEEDED_SCALE = 0.01  # the initial hc_scale of HY V4 models


@dataclass(frozen=True)
class Gates:
    """Parameters of one pre (rows = 2 * hc) or of the head (rows = hc)."""

    w: Any  # [rows, hc * hidden] fp32
    hc_scale: Any  # [rows / hc]
    hc_base: Any  # [rows]


def make_gates(config: Config, backend: Backend, seed: int | None) -> list[Gates]:
    """Gates of every block and, last, of the head. Without a seed hc_scale is 0, which silences any w."""
    rng = np.random.default_rng(0 if seed is None else seed)
    scale = 0.0 if seed is None else SEEDED_SCALE

    def draw(groups: int) -> Gates:
        w = rng.standard_normal((groups * HC, HC * config.hidden)) / np.sqrt(HC * config.hidden)
        base = np.repeat([-np.log(HC - 1), 0.0], HC)[: groups * HC]
        return Gates(*(backend.put(a.astype(np.float32)) for a in (w, np.full(groups, scale), base)))

    return [draw(2) for _ in range(2 * config.layers)] + [draw(1)]


class Network:
    """What both networks share: embedding, attention, MLP, logits."""

    def __init__(self, weights: Weights, backend: Backend, clock: Clock, cache: PagedCache) -> None:
        self.weights, self.config, self.backend, self.clock, self.cache = weights, weights.config, backend, clock, cache

    def logits(self, tokens: list[int]) -> Any:
        """Feed the next tokens of the text; logits [vocab] fp32 after the last of them, left on the device."""
        self.cache.begin(len(tokens))
        # A slice for one token: a list of indices would be an upload.
        x = self.weights.embedding[tokens[0] : tokens[0] + 1] if len(tokens) == 1 else self.weights.embedding[tokens]
        return self._matmul(self.last_hidden(x), self.weights.embedding)[0]

    def last_hidden(self, x: Any) -> Any:
        """x [tokens, hidden] → the normalised state of the last token, [1, hidden]."""
        raise NotImplementedError

    def attention(self, index: int, layer: Layer, x: Any) -> Any:
        """Causal grouped-query attention over the paged cache; x [tokens, hidden] → [tokens, hidden]."""
        q = self.cache.write(index, self._matmul(x, layer.qkv))
        return self._matmul(self.clock("attention", self._attend, index, q), layer.attn_out)

    def _attend(self, index: int, q: Any) -> Any:
        tokens, q_heads, head_dim = q.shape
        kv_heads = self.config.kv_heads
        group = q_heads // kv_heads
        keys, values = self.cache.read(index)
        q = self.backend.permute(q.reshape(tokens, kv_heads, group, head_dim), 1, 2, 0, 3)
        q = q.reshape(kv_heads, group * tokens, head_dim) * head_dim**-0.5
        scores = q @ self.backend.permute(keys, 0, 2, 1)
        scores = scores.reshape(kv_heads, group, tokens, -1)
        shares = self.backend.masked_softmax(scores, self.cache.hidden).reshape(kv_heads, group * tokens, -1)
        out = (shares @ values).reshape(kv_heads, group, tokens, head_dim)
        return self.backend.permute(out, 2, 0, 1, 3).reshape(tokens, q_heads * head_dim)

    def mlp(self, layer: Layer, x: Any) -> Any:
        """down(silu(gate(x)) * up(x)); x [tokens, hidden] → [tokens, hidden]."""
        gate_up = self._matmul(x, layer.gate_up)
        gate, up = gate_up[:, : self.config.ffn], gate_up[:, self.config.ffn :]
        return self._matmul(self.backend.silu(gate) * up, layer.down)

    def _matmul(self, x: Any, weight: Any) -> Any:
        return self.clock("matmul", operator.matmul, x, weight.T)


class PlainNetwork(Network):
    """The model as it was trained."""

    def last_hidden(self, x: Any) -> Any:
        """One residual: norm, block, add."""
        for index, layer in enumerate(self.weights.layers):
            x = x + self.attention(index, layer, self._norm(x, layer.attn_norm))
            x = x + self.mlp(layer, self._norm(x, layer.ffn_norm))
        return self._norm(x[-1:], self.weights.output_norm)

    def _norm(self, x: Any, weight: Any) -> Any:
        return self.backend.rms_norm(x, weight, self.config.norm_eps)


class HyperNetwork(Network):
    """The same blocks between hyper-connections; every model RMSNorm is folded into the pre before its block."""

    def __init__(self, weights: Weights, backend: Backend, clock: Clock, cache: PagedCache, seed: int | None) -> None:
        super().__init__(weights, backend, clock, cache)
        self.gates = make_gates(self.config, backend, seed)

    def last_hidden(self, x: Any) -> Any:
        """pre · block · post+pre · block · post+pre · … · block · post · head."""
        residual = self.backend.copies(x, HC)
        layers = self.weights.layers
        gates = iter(self.gates)
        x, h_post = self.clock("ihc_pre", hccupy.ihc_pre, residual, **self._gated(next(gates), layers[0].attn_norm))
        for index, layer in enumerate(layers):
            block = self.attention(index, layer, x)
            x, h_post = self._post_pre(block, residual, h_post, next(gates), layer.ffn_norm)
            block = self.mlp(layer, x)
            if index + 1 < len(layers):
                x, h_post = self._post_pre(block, residual, h_post, next(gates), layers[index + 1].attn_norm)
        self.clock("ihc_post", hccupy.ihc_post, block, residual, h_post, out=residual)
        head = self._gated(next(gates), self.weights.output_norm)
        del head["magnitude"]  # the head has no post gates
        return self.clock("ihc_head", hccupy.ihc_head, residual[-1:], **head)

    def _post_pre(self, block: Any, residual: Any, h_post: Any, gates: Gates, norm: Any) -> tuple[Any, Any]:
        """Finish one block (residual is updated in place) and open the next: its input and its h_post."""
        options = self._gated(gates, norm)
        call = ("ihc_post_pre", hccupy.ihc_post_pre, block, residual, h_post)
        _, x, h_post = self.clock(*call, **options, out=residual)
        return x, h_post

    def _gated(self, gates: Gates, norm: Any) -> dict[str, Any]:
        eps = {"norm_eps": self.config.norm_eps, "hc_eps": 0.0, "rms_eps": self.config.norm_eps}
        return {**vars(gates), **eps, "magnitude": MAGNITUDE, "rms_weight": norm}
