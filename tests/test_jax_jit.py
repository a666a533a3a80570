"""JAX: jit, donation, several calls in one program, vmap and gradients. (test_frameworks.py compares the bits of every op.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import hccupy  # noqa: E402
from hccupy.ops import REGISTRY  # noqa: E402

from .adapters import Adapter  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
JAX, NUMPY = Adapter("jax", mutable=False), Adapter("numpy")
OPS = list(REGISTRY)


def inputs(op, rng, on=JAX):
    """(arrays, scalars) of the op's second case."""
    case = [c for c in REGISTRY[op].cases if not c.name.startswith("bench")][1]
    given = REGISTRY[op].make_inputs(case, rng)
    arrays = {n: on.put(v) for n, v in given.items() if isinstance(v, np.ndarray)}
    return arrays, {n: v for n, v in given.items() if n not in arrays}


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


def bytes_of(a):
    return np.asarray(a).tobytes()


@pytest.mark.parametrize("op", OPS)
def test_donated_caches_are_functional(op, rng):
    """Under jit with the caches donated: results first, caches after them, equal to the NumPy path that writes in place."""
    spec = REGISTRY[op]
    arrays, scalars = inputs(op, rng)
    caches = [a.name for a in spec.args if a.mutated]
    plain = {n: np.array(v) for n, v in arrays.items()}
    kept = {n: bytes_of(arrays[n]) for n in arrays if n not in caches}
    want = [r for r in flat(getattr(hccupy, op)(**plain, **scalars)) if r is not None]
    want += [plain[n] for n in caches]
    donated = {n: arrays.pop(n) for n in caches}
    step = jax.jit(lambda donated, rest: getattr(hccupy, op)(**donated, **rest, **scalars), donate_argnums=0)
    got = [r for r in flat(step(donated, arrays)) if r is not None]
    assert len(got) == len(want)
    assert all(bytes_of(g) == bytes_of(w) for g, w in zip(got, want, strict=True))
    assert all(v.is_deleted() for v in donated.values()), "donated caches are used up"
    assert all(bytes_of(v) == kept[n] for n, v in arrays.items())


@pytest.mark.parametrize("op", ["rope_norm_store_kv", "store_kv"])
def test_caches_that_are_not_donated_stay_as_they_are(op, rng):
    arrays, scalars = inputs(op, rng)
    before = {n: bytes_of(v) for n, v in arrays.items()}
    result = jax.jit(lambda a: getattr(hccupy, op)(**a, **scalars))(arrays)
    assert {n: bytes_of(v) for n, v in arrays.items()} == before
    assert bytes_of(flat(result)[-1]) != before[next(a.name for a in reversed(REGISTRY[op].args) if a.mutated)]


def test_donation_is_an_alias_in_the_program():
    """The compiled program updates the cache where it lies: input and output are one buffer."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((6, 4, 2, 8), jnp.float32), ((3, 2, 8), jnp.float32), ((3,), jnp.int32))]
    lowered = jax.jit(hccupy.store_kv, donate_argnums=0).lower(*shapes)
    assert "tf.aliasing_output = 0" in lowered.as_text() or "jax.buffer_donor" in lowered.as_text()
    assert "input_output_alias={ {}: (0, {}" in lowered.compile().as_text().replace("may-alias", "")


def test_a_decode_loop_inside_one_program(rng):
    """Ops of several steps in one lax.scan, caches carried: the same as step by step with NumPy."""
    steps, width, block = 5, (4 + 2 * 2) * 64, 4
    qkv = rng.standard_normal((steps, 1, width)).astype(jnp.bfloat16)
    table = np.arange(4, dtype=np.int32)[None]
    cos_sin = rng.uniform(-1, 1, (16, 64)).astype(np.float32)
    index = np.array([0, 1], np.int32)
    zeros = np.zeros((4, block, 2, 64), jnp.bfloat16)

    def step(caches, now):
        row, length = now
        q, key, value = hccupy.rope_norm_store_kv(*caches, row, jnp.asarray(cos_sin), length, jnp.asarray(index), jnp.asarray(table))
        return (key, value), q

    lengths = np.arange(1, steps + 1, dtype=np.int32)[:, None]
    (key, value), q = jax.jit(lambda c, n: jax.lax.scan(step, c, n))((jnp.asarray(zeros), jnp.asarray(zeros)), (jnp.asarray(qkv), jnp.asarray(lengths)))
    mine = zeros.copy(), zeros.copy()
    for i in range(steps):
        want = hccupy.rope_norm_store_kv(*mine, qkv[i], cos_sin, lengths[i], index, table)
        assert bytes_of(q[i]) == bytes_of(want)
    assert bytes_of(key) == bytes_of(mine[0]) and bytes_of(value) == bytes_of(mine[1]) and mine[0].any()


def test_a_network_under_jit(rng):
    """pre, block, post and head traced into one program, with the ops between JAX's own."""
    arrays, scalars = inputs("ihc_pre", rng)
    x = arrays["x"].astype(jnp.float32)
    gates = {k: v for k, v in arrays.items() if k not in ("x", "rms_weight")}
    hc = x.shape[1]

    def network(x):
        y, h_post = hccupy.ihc_pre(x, **gates, **scalars)
        x = hccupy.ihc_post(jnp.tanh(y) + 1, x, h_post)
        return hccupy.ihc_head(x, gates["w"][:hc], gates["hc_scale"][:1], gates["hc_base"][:hc]) * 2

    np.testing.assert_allclose(jax.jit(network)(x), network(x), rtol=1e-6, atol=1e-6)
    assert jax.jit(network)(x[:0]).shape == (0, x.shape[2])


def test_another_token_count_is_another_program_not_an_error(rng):
    step = jax.jit(hccupy.ihc_post)
    for tokens in (1, 2, 3):
        x, residual, h_post = (jnp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((tokens, 8), (tokens, 4, 8), (tokens, 4)))
        assert bytes_of(step(x, residual, h_post)) == bytes_of(hccupy.ihc_post(x, residual, h_post))


@pytest.mark.parametrize("op", OPS)
def test_vmap_is_the_calls_one_after_the_other(op, rng):
    arrays, scalars = inputs(op, rng)
    pairs = {n: jnp.stack([v, v if v.dtype.kind == "i" else jnp.flip(v, 0)]) for n, v in arrays.items()}
    shared = [n for n, v in arrays.items() if v.dtype.kind == "i"]  # metadata is the same for both: not mapped
    mapped = {n: v for n, v in pairs.items() if n not in shared}
    got = jax.vmap(lambda a: getattr(hccupy, op)(**a, **{n: arrays[n] for n in shared}, **scalars))(mapped)
    for i in range(2):
        want = getattr(hccupy, op)(**{n: v[i] for n, v in pairs.items()}, **scalars)
        for g, w in zip(flat(got), flat(want), strict=True):
            assert (g is None) == (w is None)
            assert w is None or bytes_of(g[i]) == bytes_of(w)


def test_a_leading_shape_is_the_vmap_of_the_ihc_ops(rng):
    x, residual, h_post = (jnp.asarray(rng.standard_normal((2, 3, *s)).astype(np.float32)) for s in ((8,), (4, 8), (4,)))
    whole = jax.jit(hccupy.ihc_post)(x, residual, h_post)
    for i in range(2):
        assert bytes_of(whole[i]) == bytes_of(hccupy.ihc_post(x[i], residual[i], h_post[i]))


@pytest.mark.parametrize("transform", ["grad", "jvp"])
@pytest.mark.parametrize("op", ["ihc_pre", "ihc_post", "rope_norm_store_kv"])
def test_gradients_are_refused_clearly(op, transform, rng):
    arrays, scalars = inputs(op, rng)
    name = next(iter(k for k in ("x", "qkv") if k in arrays))

    def loss(a):
        return flat(getattr(hccupy, op)(**{**arrays, name: a}, **scalars))[0].astype(jnp.float32).sum()

    with pytest.raises(hccupy.ArgumentError, match=f"{op}: gradient: .*stop_gradient"):
        if transform == "grad":
            jax.grad(loss)(arrays[name])
        else:
            jax.jvp(loss, (arrays[name],), (arrays[name],))


def test_stop_gradient_lets_the_rest_be_differentiated(rng):
    """What to write where the ops stand in a function that is differentiated otherwise."""
    x, residual, h_post = (jnp.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((3, 8), (3, 4, 8), (3, 4)))

    def loss(scale):
        return (scale * hccupy.ihc_post(*map(jax.lax.stop_gradient, (x, residual, h_post)))).sum()

    np.testing.assert_allclose(jax.grad(loss)(1.0), hccupy.ihc_post(x, residual, h_post).sum(), rtol=1e-5)
    both = jax.grad(lambda x: (x * hccupy.ihc_post(jax.lax.stop_gradient(x), residual, h_post)[:, 0]).sum())(x)
    np.testing.assert_allclose(both, hccupy.ihc_post(x, residual, h_post)[:, 0], rtol=1e-6)


def test_first_use_of_jax_may_be_inside_jit():
    code = (
        "import jax, hccupy\n"
        "y = jax.jit(hccupy.ihc_post)(jax.numpy.ones((2, 8)), jax.numpy.ones((2, 4, 8)), jax.numpy.ones((2, 4)))\n"
        "assert (y == 2).all() and isinstance(y, jax.Array)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
