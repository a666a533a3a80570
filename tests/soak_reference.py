"""What the soak compares with: fp64 on the arrays' own device, written from the contract, and how far from it a result may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float8_e4m3fn: 3}
CANCELLED = 8 * 2.0**-23  # of the largest term: what fp32 keeps where terms cancel


class Difference(Exception):
    """A result that is not what it must be."""


def ulps(got: Any, want: Any, terms: Any) -> Any:
    """|got - want| in ulps of got's dtype at the exact value, or at CANCELLED of the largest term where that is more."""
    mantissa = MANTISSA[got.dtype]
    size = torch.maximum(want.abs(), terms * (2.0**mantissa * CANCELLED)).clamp_min(torch.finfo(got.dtype).tiny)
    off = (got.double() - want).abs() / torch.exp2(torch.floor(torch.log2(size)) - mantissa)
    return torch.where(torch.isfinite(off), off, torch.full_like(off, math.inf))


def close(name: str, got: Any, want: Any, terms: Any, most: float, all_: float) -> float:
    """99.9 % within `most` ulps, all within `all_`; the worst."""
    if got.shape != want.shape:
        raise Difference(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    if not got.numel():
        return 0.0
    off = ulps(got, want, terms)
    worst, share = float(off.max()), float((off > most).double().mean())
    if worst > all_ or share > max(1e-3, 1.5 / off.numel()):
        raise Difference(f"{name}: worst {worst:.2f} ulps at element {int(off.argmax())} of {list(got.shape)}, {share:.3%} over {most}")
    return worst


def gates_close(name: str, got: Any, want: Any) -> None:
    if got.numel() and not float((got.double() - want).abs().max() / want.abs().max()) <= 4e-6:
        raise Difference(f"{name}: {float((got.double() - want).abs().max() / want.abs().max()):.2e} of the largest gate")


def raw(t: Any) -> Any:
    """The bits of a tensor as integers, with its shape."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def equal(name: str, a: Any, b: Any) -> None:
    """Bit for bit."""
    if a.shape != b.shape or not torch.equal(raw(a), raw(b)):
        wrong = (raw(a) != raw(b)).nonzero() if a.shape == b.shape else torch.zeros(1, 1)
        raise Difference(f"{name}: {len(wrong)} elements differ, the first at {wrong[0].tolist()}")


# ---- iHC --------------------------------------------------------------------------------------------------------


def _pre(name: str, x: Any, a: dict[str, Any], y: Any, h_post: Any, head: bool) -> float:
    n, hc, hidden = x.shape
    xd = x.double()
    flat = xd.reshape(n, hc * hidden)
    mixes = (flat @ a["w"].double().T) / torch.sqrt((flat * flat).mean(1, keepdim=True) + a["norm_eps"])
    scale, base = a["hc_scale"].double(), a["hc_base"].double()
    h_pre = torch.sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + a["hc_eps"]
    if not head:
        gates_close(f"{name} h_post", h_post, a["magnitude"] * torch.sigmoid(mixes[:, hc:] * scale[1] + base[hc:]) + a["hc_eps"])
    want = torch.einsum("nm,nmh->nh", h_pre, xd)
    terms = xd.abs().amax(1)
    if a.get("rms_weight") is None:
        return close(f"{name} y", y, want, terms, 1, 2)
    inverse = 1 / torch.sqrt((want * want).mean(1, keepdim=True) + a["rms_eps"])
    weight = a["rms_weight"].double()
    terms = terms * weight.abs() * inverse
    if a["round_before_norm"]:
        want = want.float().to(x.dtype).double()
        inverse = 1 / torch.sqrt((want * want).mean(1, keepdim=True) + a["rms_eps"])
    return close(f"{name} y", y, want * inverse * weight, terms, 2, 3)


def ihc(op: str, a: dict[str, Any], results: tuple[Any, ...]) -> float:
    """Compare the results of an iHC op; the worst ulps."""
    if op in ("ihc_pre", "ihc_head"):
        return _pre(op, a["x"], a, results[0], results[1] if op == "ihc_pre" else None, op == "ihc_head")
    x, residual, h = a["x"].double(), a["residual"].double(), a["h_post"].double()
    product = h[:, :, None] * x[:, None, :]
    worst = close(f"{op} y", results[0], product + residual, torch.maximum(product.abs(), residual.abs()), 1, 2)
    if op == "ihc_post_pre":
        worst = max(worst, _pre(op, results[0], a, results[1], results[2], False))
    return worst


# ---- RoPE -------------------------------------------------------------------------------------------------------


def placed(a: dict[str, Any], tokens: int, pages: int, block_size: int, positions: int) -> dict[str, Any]:
    """Of every row, by the rules of the contract, on the host: position, live (q is computed), page, slot (-1: not stored), request, place."""
    q, lens, table = (a[k].cpu().numpy().astype(np.int64) for k in ("q_index", "seq_lens", "block_table"))
    new = np.diff(q)
    out = {k: np.full(tokens, -1, np.int64) for k in ("position", "page", "slot", "request", "place")}
    live = np.zeros(tokens, bool)
    request = np.repeat(np.arange(len(lens)), new)
    row = np.arange(len(request))
    position = lens[request] - (q[request + 1] - row)
    out["request"][row], out["place"][row] = request, row - q[request]
    good = (position >= 0) & (position < positions)
    out["position"][row[good]] = position[good]
    column = position // block_size
    good &= column < table.shape[1]
    page = np.full(len(row), -1)
    page[good] = table[request[good], column[good]]
    null = good & (page == a["null_block"] if a["null_block"] is not None else np.zeros(len(row), bool))
    stored = good & ~null & (page >= 0) & (page < pages)
    live[row[null | stored]] = True
    out["page"][row[stored]], out["slot"][row[stored]] = page[stored], (position % block_size)[stored]
    last = stored & (row + 1 == q[request + 1]) & (a["tail"] == "zero")
    behind = block_size - 1 - position[last] % block_size
    step = np.arange(int(behind.sum())) - np.repeat(np.cumsum(behind) - behind, behind)
    slots = np.repeat(position[last] % block_size + 1, behind) + step
    return {**out, "live": live, "tails": (np.repeat(page[last], behind), slots)}


def turned(x: Any, angles: Any, weight: Any, a: dict[str, Any]) -> tuple[Any, Any]:
    """Heads [tokens, heads, dim] in fp64 after rope and norm, and the size of the terms of each element."""
    x = x.double()
    size = x.abs()
    r = angles.shape[1]
    gain = lambda v: (weight.double() + a["norm_weight_offset"]) / torch.sqrt((v * v).mean(-1, keepdim=True) + a["norm_eps"])
    if a["qk_norm_policy"] == "norm_then_rope":
        g = gain(x)
        x, size = x * g, size * g.abs()
    if r:
        c, s = angles[:, None, : r // 2].double(), angles[:, None, r // 2 :].double()
        first, second = (slice(0, r // 2), slice(r // 2, r)) if a["rope_style"] == "neox" else (slice(0, r, 2), slice(1, r, 2))
        u, v = x[..., first], x[..., second]
        y, most = x.clone(), torch.maximum(size[..., first], size[..., second]) * torch.maximum(c.abs(), s.abs())
        y[..., first], y[..., second] = u * c - v * s, v * c + u * s
        size = size.clone()
        size[..., first] = size[..., second] = most
        x = y
    if a["qk_norm_policy"] == "rope_then_norm":
        g = gain(x)
        x, size = x * g, size * g.abs()
    return x, size


def codes(value: Any, bound: float) -> Any:
    """e4m3 of fp32 values held inside +-bound."""
    return value.float().clamp(-bound, bound).to(torch.float8_e4m3fn)


def near_codes(name: str, got: Any, value: Any, bound: float) -> None:
    """Codes of `value` (fp64) by the rule; one step off, seldom, where fp32 lies at a midpoint."""
    ordered = lambda t: torch.where(raw(t).int() >= 128, 128 - raw(t).int(), raw(t).int())
    steps = (ordered(got.view(torch.float8_e4m3fn)) - ordered(codes(value, bound))).abs()
    if steps.numel() and (int(steps.max()) > 1 or int((steps > 0).sum()) > max(3, 2e-3 * steps.numel())):
        raise Difference(f"{name}: {int(steps.max())} steps, {int((steps > 0).sum())} of {steps.numel()} codes off")


def rope(a: dict[str, Any], want: dict[str, Any], got: dict[str, Any]) -> float:
    """Everything the op wrote: q, K and V at their places (or in out_k, out_v), scales, flags, tails.

    want: both caches as they were, in memory of their own; what must be written there is written, so that the rest can be compared too.
    """
    pages, block_size, heads, dim = want["key_cache"].shape
    v_dim, tokens = want["value_cache"].shape[3], len(a["qkv"])
    q_heads = (a["qkv"].shape[1] - heads * (dim + v_dim)) // dim
    where = placed(a, tokens, pages, block_size, len(a["cos_sin"]))
    device, fp8 = a["qkv"].device, "k_scale" in a
    at = {k: torch.from_numpy(v).to(device) for k, v in where.items() if k != "tails"}
    live, stored = at["live"], at["page"] >= 0
    both = got.get("out_k") is not None and got.get("out_v") is not None
    if both:  # the block table is not read
        live = at["position"] >= 0
    angles = a["cos_sin"][at["position"].clamp_min(0)]
    q, q_size = turned(a["qkv"][:, : q_heads * dim].reshape(tokens, q_heads, dim), angles, a.get("q_norm_weight"), a)
    k, k_size = turned(a["qkv"][:, q_heads * dim : (q_heads + heads) * dim].reshape(tokens, heads, dim), angles, a.get("k_norm_weight"), a)
    v = a["qkv"][:, (q_heads + heads) * dim :].reshape(tokens, heads, v_dim)
    worst = 0.0
    if int(integers(got["q"])[~live].count_nonzero()):
        raise Difference("q: rows of padding or bad metadata are not zero")
    bound = a.get("upper_max") or 448.0
    if not fp8:
        worst = close("q", got["q"][live], q[live], q_size[live], 1, 1)
    else:
        if a["q_quant"] == "dynamic":
            scale = got["q_scale"]
            if a["is_prefill"]:
                full = torch.zeros_like(scale)
                rows = live & (at["place"] < scale.shape[2])
                held = scale[at["request"][rows], :, at["place"][rows]]
                full[at["request"][rows], :, at["place"][rows]] = held
                equal("q_scale where no token is", scale, full)
                by_row = torch.ones(tokens, q_heads, device=device)
                by_row[rows] = held
            else:
                rows, by_row = live, scale
                if int(raw(scale[~live]).count_nonzero()):
                    raise Difference("q_scale: rows of nobody are not zero")
            exact = q.abs().amax(-1).clamp_min(1e-12) / bound
            if rows.any() and not torch.allclose(by_row[rows].double(), exact[rows], rtol=1e-6, atol=0):
                raise Difference("q_scale")
            inverse = (1 / by_row[rows])[:, :, None].double()
        else:
            rows, inverse = live, a["q_scale_inv"].double()
        near_codes("q", integers(got["q"])[rows], q[rows] * inverse, bound)
        if int(got["split_k_flag"].count_nonzero()):
            raise Difference("split_k_flag is not zero")
        k, v = k * (1 / a["k_scale"]).double(), codes(v.float() * (1 / a["v_scale"]), bound)
    for name, out, value in (("key_cache", "out_k", k), ("value_cache", "out_v", v)):
        dense = got.get(out)
        rows = live if dense is not None else stored
        have = integers(dense)[rows] if dense is not None else integers(got[name])[at["page"][rows], at["slot"][rows]]
        if dense is not None and int(integers(dense)[~live].count_nonzero()):
            raise Difference(f"{out}: rows of nobody are not zero")
        if name == "value_cache":
            equal(f"v in {out if dense is not None else name}", have, integers(value)[rows])
        elif fp8:
            near_codes("k", have, value[rows], bound)
        else:
            worst = max(worst, close("k", have.view(a["qkv"].dtype), value[rows], k_size[rows], 1, 1))
        if dense is None:
            cache = integers(want[name])
            cache[at["page"][rows], at["slot"][rows]] = have
            page, slot = (torch.from_numpy(t).to(device) for t in where["tails"])
            cache[page, slot] = 0
    return worst


def integers(t: Any) -> Any:
    """A view of the same memory as integers (fp8 cannot be indexed everywhere)."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
