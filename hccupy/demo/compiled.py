"""The demo's iHC network as torch modules of hccupy.nn: eager, compiled, and as one CUDA graph a token.

Beside it stands the same network in torch ops alone, so that the figures say what hccupy brings. A decode step keeps to
static shapes and leaves its token on the device: it is captured once and replayed without the host knowing the text.

Compiled by regions that all layers share, split at RopeNorm (its layer name would make each layer one of its own), as
serving engines do: the whole network as one graph takes Inductor minutes.
"""

# ruff: noqa: D102 (forward methods: the classes say what they do)

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from .. import nn
from ..bench import peers
from .cache import QKV_DTYPE, rope_table, shuffled_pages
from .network import HC, MAGNITUDE, Gates
from .weights import Config, Layer, Weights

REPEATS = 3


class TorchConnection(nn.HyperConnection):
    """nn.HyperConnection without hccupy's ops."""

    def pre(self, x: Any) -> Any:
        return peers.eager_pre({"x": x, "magnitude": self.magnitude, **self._gates()})

    def post(self, x: Any, residual: Any, h_post: Any, *, out: Any = None) -> Any:
        return peers.eager_post({"x": x, "residual": residual, "h_post": h_post})

    def post_pre(self, x: Any, residual: Any, h_post: Any, *, out: Any = None) -> Any:
        return peers.eager_post_pre({"x": x, "residual": residual, "h_post": h_post, "magnitude": self.magnitude, **self._gates()})


class TorchHead(nn.HyperHead):
    """nn.HyperHead without hccupy's ops."""

    def forward(self, x: Any) -> Any:
        return peers.eager_pre({"x": x, **self._gates()})


class Text(torch.nn.Module):  # type: ignore[misc]
    """One request on the device: its tokens, its length and where its pages are."""

    def __init__(self, length: int, block_size: int, device: str) -> None:
        super().__init__()
        pages = shuffled_pages(length, block_size)
        self.block_size, self.pool = block_size, 2 * len(pages)
        self.register_buffer("tokens", torch.zeros(length + 1, dtype=torch.int64, device=device))
        self.register_buffer("token", torch.zeros(1, dtype=torch.int64, device=device))  # the one to feed next
        self.register_buffer("seq_lens", torch.zeros(1, dtype=torch.int32, device=device))  # with the tokens being fed
        self.register_buffer("pages", torch.from_numpy(pages).to(device))
        self.register_buffer("block_table", self.pages.int()[None].contiguous())
        self.register_buffer("one_row", torch.tensor([0, 1], dtype=torch.int32, device=device))
        self.register_buffer("columns", torch.arange(len(pages) * block_size, dtype=torch.int32, device=device))
        self.metadata = SimpleNamespace()

    def begin(self, prompt: list[int]) -> Any:
        """The prompt on the device, and the metadata of its prefill."""
        ids = torch.tensor(prompt, device=self.token.device)
        self.tokens.zero_()[: len(prompt)] = ids
        self.seq_lens.fill_(len(prompt))
        self._metadata(0, 1, torch.tensor([0, len(prompt)], dtype=torch.int32, device=ids.device), len(prompt))
        return ids

    def decode(self) -> None:
        """The metadata of every later step: the same tensors each time, since a graph keeps their addresses."""
        self._metadata(1, 0, self.one_row, 1)

    def _metadata(self, decodes: int, prefills: int, index: Any, rows: int) -> None:
        self.metadata = SimpleNamespace(
            num_decodes=decodes, num_prefills=prefills, num_decode_tokens=decodes, seq_lens=self.seq_lens, block_table_tensor=self.block_table,
            qo_indptr=index, qo_indptr_decode=index, max_query_len=rows,
        )  # fmt: skip

    def positions(self, rows: int) -> Any:
        """Of the rows being fed, [rows]."""
        return self.seq_lens - rows + self.columns[:rows]

    def say(self, logits: Any) -> None:
        """Take the likeliest token as the next to feed."""
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.tokens.index_copy_(0, self.seq_lens.long(), self.token)
        self.seq_lens.add_(1)


class TorchRope(torch.nn.Module):  # type: ignore[misc]
    """What nn.RopeNorm does here (interleaved RoPE, K and V written to their pages), in torch ops."""

    def __init__(self, config: Config, text: Text, cos_sin: Any) -> None:
        super().__init__()
        self.heads = (config.q_heads, config.kv_heads, config.kv_heads)
        self.text = text
        self.register_buffer("cos_sin", cos_sin)

    def forward(self, qkv: Any, layer_name: str | None = None, kv_cache: Any = None) -> Any:
        position = self.text.positions(qkv.shape[0])
        cos, sin = self.cos_sin[position][:, None].chunk(2, -1)
        heads = qkv.view(qkv.shape[0], sum(self.heads), -1)
        a, b = heads[:, : -self.heads[2]].float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(qkv.dtype)
        q, k = rotated.split(self.heads[:2], 1)
        page, slot = self.text.block_table[0, position // self.text.block_size], position % self.text.block_size
        kv_cache[:, 0].index_put_((page, slot), k)
        kv_cache[:, 1].index_put_((page, slot), heads[:, -self.heads[2] :])
        return q


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Causal grouped-query attention over the request's pages."""

    def __init__(self, config: Config, weights: Layer, text: Text, rope: Any, kv: str) -> None:
        super().__init__()
        self.text, self.rope, self.kv_dtype = text, rope, getattr(torch, QKV_DTYPE[kv])
        self.qkv, self.out = weights.qkv, weights.attn_out
        shape = (text.pool, 2, text.block_size, config.kv_heads, config.head_dim)
        self.register_buffer("kv_cache", torch.zeros(shape, dtype=self.kv_dtype, device=text.token.device))

    def forward(self, x: Any) -> Any:
        return self.attend(self.rope(self.project(x), kv_cache=self.kv_cache))

    def project(self, x: Any) -> Any:
        return (x @ self.qkv.T).to(self.kv_dtype)

    def attend(self, q: Any) -> Any:
        k, v = self.kv_cache[self.text.pages].float().permute(1, 3, 0, 2, 4).flatten(2, 3)  # [kv_heads, slots, head_dim]
        seen = self.text.columns <= self.text.positions(q.shape[0])[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(q.float().transpose(0, 1)[None], k[None], v[None], seen, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1) @ self.out.T


class Mlp(torch.nn.Module):  # type: ignore[misc]
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: Layer) -> None:
        super().__init__()
        self.gate_up, self.down = weights.gate_up, weights.down

    def forward(self, x: Any) -> Any:
        gate, up = (x @ self.gate_up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ self.down.T


class Model(torch.nn.Module):  # type: ignore[misc]
    """pre · block · post+pre · block · … · post · head, with hccupy.nn (`fused`) or in torch ops."""

    def __init__(self, weights: Weights, gates: list[Gates], text: Text, kv: str, fused: bool) -> None:
        super().__init__()
        c, device = weights.config, text.token.device
        self.text, self.embedding = text, weights.embedding
        cos_sin = torch.from_numpy(rope_table(c, len(text.columns))).to(device)

        def rope(index: int) -> Any:
            if not fused:
                return TorchRope(c, text, cos_sin)
            context = lambda: nn.ForwardContext(text.metadata)  # noqa: E731
            sizes = (c.q_heads, c.kv_heads, c.head_dim)
            return nn.RopeNorm(*sizes, cos_sin, False, None, None, "auto", f"demo.{index}", forward_context=context, rope_style="interleaved")

        def boundary(norm: Any, given: Gates, kind: Any, **options: Any) -> Any:
            rms = torch.nn.RMSNorm(c.hidden, c.norm_eps, device=device)
            module = kind(c.hidden, HC, norm=rms, norm_eps=c.norm_eps, hc_eps=0.0, device=device, **options)
            with torch.no_grad():
                rms.weight.copy_(norm)
                for part, value in (("fn", given.w), ("scale", given.hc_scale), ("base", given.hc_base)):
                    held = module._part(part)
                    getattr(held, "weight", held).copy_(value)
            return module

        norms = [n for layer in weights.layers for n in (layer.attn_norm, layer.ffn_norm)]
        connection, head = (nn.HyperConnection, nn.HyperHead) if fused else (TorchConnection, TorchHead)
        self.connections = torch.nn.ModuleList(boundary(n, g, connection, magnitude=MAGNITUDE) for n, g in zip(norms, gates, strict=False))
        self.head = boundary(weights.output_norm, gates[-1], head)
        blocks = ((Attention(c, w, text, rope(i), kv), Mlp(w)) for i, w in enumerate(weights.layers))
        self.blocks = torch.nn.ModuleList(b for pair in blocks for b in pair)

    def forward(self, ids: Any) -> Any:
        """ids [rows] → logits [vocab] after the last."""
        residual = self.embedding[ids][:, None].repeat(1, HC, 1)
        x, h_post = self.connections[0].pre(residual)
        for block, following in zip(self.blocks[:-1], self.connections[1:], strict=True):
            residual, x, h_post = following.post_pre(block(x), residual, h_post)
        residual = self.connections[-1].post(self.blocks[-1](x), residual, h_post)
        return (self.head(residual[-1:]) @ self.embedding.T)[0]

    def step(self) -> None:
        """Feed the last token and choose the next; nothing leaves the device."""
        self.text.say(self(self.text.token))

    def compile_regions(self, backend: str) -> None:
        """Compile what stands between the rope calls; layers share the code."""
        regions = [(c, name) for c in self.connections for name in ("pre", "post_pre", "post")] + [(self.head, "forward")]
        for block in self.blocks:
            regions += [(block, "project"), (block, "attend")] if isinstance(block, Attention) else [(block, "forward")]
            if isinstance(block, Attention) and isinstance(block.rope, TorchRope):
                regions.append((block.rope, "forward"))
        for module, name in regions:
            setattr(module, name, torch.compile(getattr(module, name), fullgraph=True, backend=backend, dynamic=False))


@dataclass(frozen=True)
class Decode:
    """One way to run the network. fused: with hccupy. tokens: what it generated. same: they are those of hccupy.nn run eagerly."""

    how: str
    fused: bool
    tokens_per_s: float
    tokens: list[int]
    same: bool


def generate(model: Model, step: Callable[[], object], prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """(the tokens after `prompt`, decode tokens per second): the best of a few runs, the prompt's own time left out."""
    text, best = model.text, float("inf")
    for _ in range(REPEATS):
        text.say(model(text.begin(prompt)))
        text.decode()
        _wait(text)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            step()
        _wait(text)
        best = min(best, time.perf_counter() - start)
    return text.tokens[len(prompt) : len(prompt) + tokens].tolist(), (tokens - 1) / best


def _wait(text: Text) -> None:
    if text.token.is_cuda:
        torch.cuda.synchronize()


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """`step` as a CUDA graph. It runs three times here, on the side stream that capture wants."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


@torch.no_grad()  # type: ignore[untyped-decorator]
def compare(weights: Weights, gates: list[Gates], prompt: list[int], tokens: int, kv: str, block_size: int, backend: str = "inductor") -> Iterator[Decode]:
    """Decode with hccupy.nn and with torch ops, each eagerly, compiled, and (on CUDA) compiled and captured.

    kv: "bf16" or "fp16". backend: torch.compile's.
    """
    device = str(weights.embedding.device)
    wanted: list[int] | None = None
    for name, fused in (("hccupy.nn", True), ("torch ops", False)):
        torch._dynamo.reset()
        text = Text(len(prompt) + max(tokens, 8), block_size, device)
        model = Model(weights, gates, text, kv, fused)
        for how in ("eager", "compiled", "compiled, one CUDA graph a token")[: 3 if text.token.is_cuda else 2]:
            if how == "compiled":
                model.compile_regions(backend)
            text.say(model(text.begin(prompt)))
            text.decode()
            model.step()  # compiles; a step to capture needs a text to go on from
            step = captured(model.step) if "graph" in how else model.step
            said, rate = generate(model, step, prompt, tokens)
            wanted = said if wanted is None else wanted
            yield Decode(f"{name}, {how}", fused, rate, said, said == wanted)
