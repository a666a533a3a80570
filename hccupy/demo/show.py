"""The demo as it is seen: load with a progress bar, stream the text, prove the network, report the time per op."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..provenance import record
from .backend import Backend, Clock, make_backend
from .cache import CACHE_DTYPE, PagedCache
from .missing import need
from .network import HC, HyperNetwork, Network, PlainNetwork, make_gates
from .tokenizer import Tokenizer, chat_prompt
from .weights import Weights, find_gguf, open_gguf, read_config, read_weights

# On CUDA both networks do the same arithmetic with some sums in another order. Now and then that turns the rounding of
# a q, k or v value to 16 (or 8) bits the other way, and such a step shows in the logits. The largest difference seen
# over 200 tokens, with the norms summed in two orders, was 0.33 % of the largest logit for bf16, 0.05 % for fp16 and
# 6.6 % for fp8, where 4 tokens of 181 were ties that fell the other way. Allowed is a few times that.
TOLERANCE = {"bf16": 0.02, "fp16": 0.01, "fp32": 0.01, "fp8": 0.2}
AGREE = 0.9


@dataclass
class Run:
    """One greedy generation."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)  # [vocab] each, the row that chose tokens[i]
    prefill: float = 0.0  # seconds until the first token
    seconds: float = 0.0  # in all


@dataclass(frozen=True)
class Proof:
    """The iHC run against the plain network on the same text."""

    agree: int  # tokens that the plain network chooses too
    total: int
    difference: float  # largest |logit difference|
    largest: float  # largest |logit|


@dataclass(frozen=True)
class DemoResult:
    """What `demonstrate` found; `ok` decides the exit status."""

    text: str
    tokens: list[int]
    proof: Proof
    tokens_per_second: float
    prefill_ms: float
    ops: list[tuple[str, int, float]]  # (name, calls, seconds) of the iHC network's ops
    decode: list[Any]  # of compiled.Decode, if asked for
    ok: bool


def generate(
    network: Network,
    prompt: list[int],
    tokens: int,
    stop: set[int],
    show: Callable[[int], None] = lambda token: None,
) -> Run:
    """Greedy generation of up to `tokens` tokens, ended early by one of `stop`."""
    run, feed, start = Run(), prompt, time.perf_counter()
    while len(run.tokens) < tokens:
        logits = network.logits(feed)
        token = network.backend.argmax(logits)  # the only wait for the device
        run.seconds = time.perf_counter() - start
        run.prefill = run.prefill or run.seconds
        run.tokens.append(token)
        run.logits.append(logits)
        if token in stop:
            break
        show(token)
        feed = [token]
    return run


def prove(run: Run, plain: Network, prompt: list[int]) -> Proof:
    """Feed the plain network the text of `run` and compare what each would say next.

    While both choose the same tokens this *is* the plain network's own greedy generation; with seeded gates, where they
    may part, it keeps the comparison on one text.
    """
    agree, difference, largest, feed = 0, 0.0, 0.0, prompt
    for token, logits in zip(run.tokens, run.logits, strict=True):
        expected = plain.backend.host(plain.logits(feed))
        agree += int(expected.argmax()) == token
        # np.maximum, not max: a NaN must stay one and fail the proof
        difference = float(np.maximum(difference, np.abs(plain.backend.host(logits) - expected).max()))
        largest = float(np.maximum(largest, np.abs(expected).max()))
        feed = [token]
    return Proof(agree, len(run.tokens), difference, largest)


def proven(proof: Proof, exact: bool, kv: str) -> bool:
    """Equal tokens and equal logits; or, where sums may differ in order, as close as rounding leaves them."""
    if exact:
        return proof.agree == proof.total and proof.difference == 0.0
    return proof.agree >= AGREE * proof.total and proof.difference <= TOLERANCE[kv] * proof.largest


def run_demo(
    prompt: str = "The capital of France is",
    chat: bool = False,
    tokens: int = 32,
    framework: str | None = None,
    device: str | None = None,
    kv: str = "bf16",
    block_size: int = 16,
    seed_gates: int | None = None,
    compile: bool = False,
    report_to: Path | None = None,
    console: Any = None,
) -> int:
    """`hccupy demo`: as `demonstrate`, with an exit status: 0, or 1 where the proof failed.

    framework   "numpy", "torch", "cupy" or None (fits the device)
    device      "cpu", "cuda" or None (fits the framework)
    compile     also time the network as torch modules: eager, compiled, captured; with hccupy.nn and in torch ops
    report_to   a JSON file that gets what was found
    """
    console = console or need("rich.console", '"hccupy[demo]"').Console()
    backend = make_backend(framework, device)
    with idle_cores_only():
        result = demonstrate(prompt, chat, tokens, backend, kv, block_size, seed_gates, compile, console)
    if report_to is not None:
        facts = {"framework": backend.name, "cuda": backend.cuda, "kv": kv, "block_size": block_size, "seed_gates": seed_gates, "prompt": prompt}
        report_to.parent.mkdir(parents=True, exist_ok=True)
        report_to.write_text(json.dumps({**record(_gpu(backend)), **facts, **asdict(result)}, indent=1) + "\n")
    return 0 if result.ok else 1


def _gpu(backend: Backend) -> str:
    if not backend.cuda:
        return "none"
    if backend.name == "torch":
        return str(import_module("torch").cuda.get_device_name())
    return str(import_module("cupy").cuda.runtime.getDeviceProperties(0)["name"].decode())


def demonstrate(
    prompt: str,
    chat: bool,
    tokens: int,
    backend: Backend,
    kv: str,
    block_size: int,
    seed_gates: int | None,
    compile: bool,
    console: Any,
) -> DemoResult:
    """Generate up to `tokens` tokens after `prompt` on the iHC network and compare it with the plain one.

    backend     from make_backend
    kv          "bf16", "fp16", "fp32" or "fp8": the format of the paged KV cache
    seed_gates  None: gates at which iHC equals the plain network. A number: random gates that really mix the channels
    console     a rich.console.Console

    Raises HccupyError, with one sentence to show, where something is missing or does not fit.
    """
    check_options(prompt, tokens, kv, block_size)
    if compile:
        check_compile(backend, tokens, kv)
    reader = open_gguf(find_gguf())
    tokenizer, config = Tokenizer(reader), read_config(reader)
    ids = tokenizer.encode(chat_prompt(prompt) if chat else prompt)
    length = len(ids) + tokens
    if length > config.positions:
        room = config.positions - len(ids)
        raise ArgumentError(f"--tokens: expected at most {room} after a prompt of {len(ids)} tokens, got {tokens}.")
    weights = load(reader, backend, console)

    def hyper(clock: Clock) -> Network:
        cache = PagedCache(config, backend, clock, length, kv, block_size)
        return HyperNetwork(weights, backend, clock, cache, seed_gates)

    if backend.cuda:
        with console.status("compiling kernels …"):
            generate(hyper(Clock(backend)), ids, min(tokens, 2), set())  # the prompt, and one decode step
    clock = Clock(backend)
    stream = tokenizer.stream()

    def say(text: str) -> None:
        console.out(text, highlight=False, end="")

    console.rule(f"iHC network · {HC} channels · {config.layers} layers · {backend.name} · kv {kv}, pages of {block_size}")
    console.out(prompt, style="dim", highlight=False, end="\n" if chat else "")
    run = generate(hyper(clock), ids, tokens, tokenizer.stop, lambda token: say(stream.step(token)))
    say(stream.rest() + "\n")
    console.rule()

    silent = Clock(backend)
    plain = PlainNetwork(weights, backend, silent, PagedCache(config, backend, silent, length, kv, block_size))
    with console.status("comparing with the plain residual network …"):
        proof = prove(run, plain, ids)
    rate = len(run.tokens) / run.seconds
    ok = report(console, proof, backend, kv, seed_gates)
    console.print(
        f"{len(run.tokens)} tokens in {run.seconds:.2f} s: [bold]{rate:.1f} tokens/s[/bold] "
        f"(of it {run.prefill * 1e3:.0f} ms for the prompt's {len(ids)} tokens)"
    )
    console.print(time_table(clock, run.seconds))
    decode = compare_decode(weights, ids, tokens, backend, kv, block_size, seed_gates, console) if compile else []
    ok = ok and all(row.same for row in decode if row.fused)
    text = tokenizer.decode([token for token in run.tokens if token not in tokenizer.stop])
    return DemoResult(text, run.tokens, proof, rate, run.prefill * 1e3, clock.rows(), decode, ok)


def check_compile(backend: Backend, tokens: int, kv: str) -> None:
    """Refuse what the torch modules do not serve."""
    if backend.name != "torch":
        raise ArgumentError(f"--compile: expected --framework torch, got {backend.name}.")
    if kv not in ("bf16", "fp16"):
        raise ArgumentError(f"--kv: expected bf16 or fp16 with --compile, got {kv}.")
    if tokens < 2:
        raise ArgumentError(f"--tokens: expected 2 or more with --compile, got {tokens}.")


def compare_decode(
    weights: Weights, ids: list[int], tokens: int, backend: Backend, kv: str, block_size: int, seed_gates: int | None, console: Any
) -> list[Any]:
    """Time decoding as torch modules, with hccupy.nn and in torch ops, and show a table."""
    from .compiled import compare

    table = need("rich.table", '"hccupy[demo]"').Table(title="Decoding, network as torch modules")
    for column in ("network", "tokens/s", "same tokens as eager hccupy.nn"):
        table.add_column(column, justify="left" if column == "network" else "right")
    rows = []
    with console.status("compiling the network …"):
        for row in compare(weights, make_gates(weights.config, backend, seed_gates), ids, tokens, kv, block_size):
            rows.append(row)
            table.add_row(row.how, f"{row.tokens_per_s:.1f}", "yes" if row.same else "no")
    console.print(table)
    return rows


def idle_cores_only() -> AbstractContextManager[Any]:
    """Give BLAS as many threads as there are idle cores, one at least (where threadpoolctl is installed).

    It reaches the libraries that are loaded by now, so the framework must be imported before.
    A BLAS thread spins until the slowest one is done. On 2 cores with 4 other busy processes two threads gave
    1 token/s and one thread 7; with the cores idle two threads gave 24.
    """
    try:
        threadpool_limits = import_module("threadpoolctl").threadpool_limits
    except ImportError:  # it only makes a busy machine faster
        return nullcontext()
    cores = len(os.sched_getaffinity(0))
    limits: AbstractContextManager[Any] = threadpool_limits(min(max(round(cores - os.getloadavg()[0]), 1), cores))
    return limits


def check_options(prompt: str, tokens: int, kv: str, block_size: int) -> None:
    """Refuse values without a meaning before anything is loaded."""
    if not prompt:
        raise ArgumentError("--prompt: expected some text, got an empty prompt.")
    if tokens < 1:
        raise ArgumentError(f"--tokens: expected 1 or more, got {tokens}.")
    if kv not in CACHE_DTYPE:
        raise ArgumentError(f"--kv: expected one of {', '.join(CACHE_DTYPE)}, got {kv}.")
    if block_size < 1:
        raise ArgumentError(f"--block-size: expected 1 or more, got {block_size}.")


def load(reader: Any, backend: Backend, console: Any) -> Weights:
    """Dequantise the weights and put them on the device, with a progress bar."""
    progress = need("rich.progress", '"hccupy[demo]"')
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("Loading SmolLM2-135M", total=len(reader.tensors))
        return read_weights(reader, lambda: bar.advance(task)).map(backend.put)


def report(console: Any, proof: Proof, backend: Backend, kv: str, seed_gates: int | None) -> bool:
    """Say how the iHC network compares with the plain one; True unless the proof failed."""
    share = f"{100 * proof.difference / proof.largest:.2g} % of the largest logit, {proof.largest:.1f}"
    same = f"{proof.agree} of {proof.total} tokens"
    if seed_gates is not None:
        finite = bool(np.isfinite(proof.difference))
        console.print(
            f"Gates seeded with {seed_gates}: the channels really mix. Against the plain network on the same text "
            f"the logits changed by up to [bold]{proof.difference:.4g}[/bold] ({share}); "
            f"it would choose the same {same}."
        )
        return finite
    ok = proven(proof, backend.exact, kv)
    expected = "exactly 0 is required" if backend.exact else f"up to {100 * TOLERANCE[kv]:.0f} % is rounding"
    tie = ", the others being ties" if proof.agree < proof.total and ok else ""
    verdict = "[bold green]proved[/bold green]" if ok else "[bold red]FAILED[/bold red]"
    amount = "exactly 0" if proof.difference == 0 else f"{proof.difference:.4g} ({share}; {expected})"
    console.print(f"{verdict}: the plain residual network chooses the same {same}{tie}; largest logit difference [bold]{amount}[/bold]")
    return ok


def time_table(clock: Clock, seconds: float) -> Any:
    """A table of the iHC run: calls, total and mean time of every op."""
    table = need("rich.table", '"hccupy[demo]"').Table(title="Time per op (iHC network)")
    table.add_column("op")
    for column in ("calls", "total ms", "µs per call", "share"):
        table.add_column(column, justify="right")
    rows = clock.rows()
    for name, calls, spent in rows:
        per_call = f"{spent / calls * 1e6:.1f}"
        table.add_row(name, str(calls), f"{spent * 1e3:.1f}", per_call, f"{100 * spent / seconds:.1f} %")
    rest = max(seconds - sum(row[2] for row in rows), 0.0)
    table.add_row("everything else", "", f"{rest * 1e3:.1f}", "", f"{100 * rest / seconds:.1f} %")
    return table
