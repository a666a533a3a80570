"""fp64 versions of the iHC formulas, written again from the contract, and how far from them a result may be."""

from __future__ import annotations

from typing import Any

import numpy as np

from hccupy.dtypes import BY_NAME, ulp


def sigmoid(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


def gates(x: Any, w: Any, norm_eps: float) -> Any:
    flat = x.astype(np.float64).reshape(len(x), x.shape[1] * x.shape[2])
    r = 1 / np.sqrt((flat * flat).mean(1, keepdims=True) + norm_eps)
    return (flat @ w.astype(np.float64).T) * r


def merge(x: Any, h_pre: Any, given: dict[str, Any]) -> Any:
    y = np.einsum("nm,nmh->nh", h_pre, x.astype(np.float64))
    if given.get("rms_weight") is not None:
        if given.get("round_before_norm", True):
            y = y.astype(np.float32).astype(x.dtype).astype(np.float64)
        y = y / np.sqrt((y * y).mean(1, keepdims=True) + given["rms_eps"]) * given["rms_weight"].astype(np.float64)
    return y


def ihc_pre(given: dict[str, Any]) -> tuple[Any, ...]:
    x, hc = given["x"], given["x"].shape[1]
    mixes = gates(x, given["w"], given["norm_eps"])
    scale, base = given["hc_scale"].astype(np.float64), given["hc_base"].astype(np.float64)
    h_pre = sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + given["hc_eps"]
    h_post = given.get("magnitude", 2.0) * sigmoid(mixes[:, hc:] * scale[1] + base[hc:]) + given["hc_eps"]
    return merge(x, h_pre, given), h_post


def ihc_head(given: dict[str, Any]) -> tuple[Any, ...]:
    mixes = gates(given["x"], given["w"], given["norm_eps"])
    h_pre = sigmoid(mixes * given["hc_scale"].astype(np.float64)[0] + given["hc_base"]) + given["hc_eps"]
    return (merge(given["x"], h_pre, given),)


def ihc_post(given: dict[str, Any]) -> tuple[Any, ...]:
    x, residual = given["x"].astype(np.float64), given["residual"].astype(np.float64)
    return (given["h_post"].astype(np.float64)[:, :, None] * x[:, None, :] + residual,)


def ihc_post_pre(given: dict[str, Any]) -> tuple[Any, ...]:
    """z and h_post_next are those of the y the op itself rounded: give it as given["y"]."""
    (y,) = ihc_post(given)
    return (y, *ihc_pre({**given, "x": given["y"]}))


ORACLES = {"ihc_pre": ihc_pre, "ihc_head": ihc_head, "ihc_post": ihc_post, "ihc_post_pre": ihc_post_pre}


def ulps(got: Any, want: Any, magnitude: Any = None) -> Any:
    """|got - want| in ulps of got's dtype, less the half ulp... counted from the exact value (0.5 is perfect rounding).

    magnitude: where sums cancel, the size of the terms, below which no relative accuracy can be asked.
    """
    got = np.asarray(got)
    spacing = ulp(want if magnitude is None else np.maximum(np.abs(want), magnitude), BY_NAME[got.dtype.name])
    difference = np.abs(got.astype(np.float64) - want)
    return np.where(np.isnan(got.astype(np.float64)), np.inf, difference / spacing)


def check_ulps(got: Any, want: Any, most: float, all_: float, label: str, magnitude: Any = None) -> float:
    """99.9 % of the elements within `most` ulps, all within `all_`. Returns the worst."""
    if np.size(want) == 0:
        return 0.0
    error = ulps(got, want, magnitude)
    worst = float(error.max())
    assert worst <= all_, f"{label}: worst error {worst:.2f} ulps at {np.unravel_index(error.argmax(), error.shape)}"
    share = float((error > most).mean())
    assert share <= 1e-3, f"{label}: {share:.2%} of the elements are more than {most} ulps off"
    return worst


def check_gates(got: Any, want: Any, label: str) -> float:
    """Within 4e-6 of fp64, relative to the largest gate."""
    if np.size(want) == 0:
        return 0.0
    worst = float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())
    assert worst <= 4e-6, f"{label}: gates {worst:.2e} from fp64"
    return worst
