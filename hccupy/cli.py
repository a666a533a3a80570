"""The command line: hccupy demo | doctor | explain | warmup | build | bench | cache. argparse: the core dependencies are enough."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .errors import ArgumentError, HccupyError
from .version import __version__


def _word(text: str) -> tuple[str, Any]:
    """name=value of explain: ints, floats, True/False, or a word."""
    name, sep, value = text.partition("=")
    if not sep:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, {"True": True, "False": False, "None": None}.get(value, value)


def explain(options: argparse.Namespace) -> int:
    """Print the Plan of an op and its reasons."""
    from . import arch, plan
    from .explain import imagine, plan_for
    from .ops import get

    sizes = dict(options.sizes)
    made = plan_for(options.op, sizes, options.dtype, options.arch)
    bound = imagine(get(options.op), sizes, options.dtype)
    launch = made.launch
    print(f"{made.op} on {made.arch.name}: variant {made.variant}, kernels/{made.source}, entry {made.entry}")
    print(f"  why      {launch.why}")
    print(f"  grid     {launch.grid}   block {launch.block}   shared memory {launch.smem} bytes")
    print(f"  cluster  {launch.cluster}   programmatic dependent launch {'yes' if launch.pdl else 'no'}")
    print(f"  baked    {' '.join(flag[2:] for flag in made.flags)}")
    print(f"  moves    {get(options.op).bytes_moved(bound):,} bytes (each input and output once)")
    for name, ok, reason in plan.candidates(get(options.op), bound, arch.named(made.arch.name)):
        print(f"  variant  {name}: {'can run this' if ok else 'no: ' + reason}")
    return 0


def _heads(text: str) -> tuple[int, int]:
    """Q/K of --heads."""
    try:
        q_heads, kv_heads = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected query/KV heads such as 64/8, got {text!r}") from None
    return q_heads, kv_heads


def _asked(options: argparse.Namespace, everything: bool) -> Any:
    """The requests of warmup's and build's words."""
    from .warmup import requests

    op, words = None, list(options.words)
    if words and "=" not in words[0]:
        op = words.pop(0)
    try:
        sizes = dict(_word(w) for w in words)
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"hccupy: sizes: {error}.") from None
    return requests(op, sizes, options.dtype, options.hidden, options.hc, options.heads, options.head_dim, everything)


def _bar(title: str, items: Iterable[Any], total: int) -> Iterable[Any]:
    """`items` under a progress bar, where rich is installed and somebody is watching."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    bar: Iterable[Any] = track(items, title, total, console=console, disable=not console.is_terminal)
    return bar


def warmup(options: argparse.Namespace) -> int:
    """Compile (and load) every kernel that calls of such sizes can need."""
    from . import build as builds
    from .warmup import compile_ahead, plans, ready, target

    asked = _asked(options, options.all)
    for name in options.arch or [None]:
        found, device = target(name)
        todo = plans(asked, found)
        start, before, title = time.perf_counter(), len(builds.compiled), f"kernels for {found.name}"
        fresh = compile_ahead(todo, options.jobs, partial(_bar, f"compiling {title}"))
        for made in _bar(title, todo, len(todo)):
            ready(made, device)
        seconds, fresh = time.perf_counter() - start, fresh + len(builds.compiled) - before
        print(f"{len(todo)} kernels for {found.name} {'ready' if device is None else 'loaded'} in {seconds:.1f} s, {fresh} of them compiled")
    return 0


def build(options: argparse.Namespace) -> int:
    """Write a bundle of cubins."""
    from . import arch, bundle, clusters, cuda
    from . import build as builds
    from .warmup import TRIAL, compile_ahead, plans

    asked = [*_asked(options, options.all or not (options.words or options.hidden or options.heads)), TRIAL]
    todo = []
    for name in options.arch:
        found = arch.named(name)
        todo += plans(asked, found) + ([clusters.probe(found, 8)] if found.clusters_of_8 else [])
    compile_ahead(todo, options.jobs, partial(_bar, "compiling kernels"))
    made = [(builds.identity(p), p, builds.cached(p)) for p in _bar("kernels", todo, len(todo))]
    nvrtc = ".".join(map(str, cuda.nvrtc_version()))
    held = bundle.write(options.output, made, builds.sources_digest().hex(), nvrtc)
    print(f"{len(made)} kernels written, {held} in {options.output}. Use it: HCCUPY_KERNEL_BUNDLE={options.output.resolve()}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Examine the installation; exit status 1 where CUDA use is broken."""
    from .doctor import examine, text

    found = examine()
    print(json.dumps(found, indent=1) if options.json else text(found))
    return 1 if found["problems"] else 0


def cache(options: argparse.Namespace) -> int:
    """Show or clear the kernel cache."""
    from . import cache as store

    if options.action == "clear":
        print(f"{store.clear()} kernels removed from {store.directory()}")
        return 0
    files = [p for p in store.entries() if p.suffix == ".cubin"]
    state = "usable" if store.usable() else "not usable"
    print(f"{store.directory()}: {len(files)} kernels, {sum(p.stat().st_size for p in files):,} bytes, {state}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Verify and time the kernels."""
    from .bench import run_bench
    from .ops import REGISTRY, get

    ops = [get(o).name for o in options.ops] or list(REGISTRY)
    return run_bench(ops, options.output, match=options.match, compiled=options.compile, with_peers=not options.no_peers, check=options.check)


def demo(options: argparse.Namespace) -> int:
    """Run SmolLM2 as an iHC network."""
    from .demo import run_demo

    return run_demo(
        prompt=options.prompt,
        chat=options.chat,
        tokens=options.tokens,
        framework=options.framework,
        device=options.device,
        kv=options.kv,
        block_size=options.block_size,
        seed_gates=options.seed_gates,
        compile=options.compile,
        report_to=options.json,
    )


def _archs(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _sizes(p: argparse.ArgumentParser) -> None:
    """The words by which warmup and build are told what to compile."""
    p.add_argument(
        "words", nargs="*", metavar="[op] name=value", help="an op and its sizes as in explain; without an op the words go to every op that knows them"
    )
    p.add_argument("--hidden", type=int, metavar="H", help="every iHC op at this width")
    p.add_argument("--hc", type=int, default=4, metavar="M", help="channels (default: %(default)s)")
    p.add_argument("--heads", type=_heads, metavar="Q/K", help="every RoPE and KV-cache op at these query and KV heads")
    p.add_argument("--head-dim", type=int, default=128, metavar="D", help="(default: %(default)s)")
    p.add_argument("--all", action="store_true", help="all ops: --hidden 6144 --heads 64/8 where those are not given")
    p.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    p.add_argument("--jobs", "-j", type=int, metavar="N", help="processes to compile in (default: one a core)")


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="hccupy", description="Fused hyper-connection and RoPE + paged-KV kernels.")
    top.add_argument("--version", action="version", version=f"hccupy {__version__}")
    commands = top.add_subparsers(dest="command", required=True)

    p = commands.add_parser("demo", help="SmolLM2-135M as an iHC network, every block on hccupy's ops")
    p.add_argument("--prompt", default="The capital of France is", help="text to continue (default: %(default)r)")
    p.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    p.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: %(default)s)")
    p.add_argument("--framework", choices=("numpy", "torch", "cupy"), help="whose arrays the network uses (default: numpy; with --device cuda torch or cupy)")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with cupy, else cpu")
    p.add_argument("--kv", choices=("bf16", "fp16", "fp32", "fp8"), default="bf16", help="KV-cache format (default: bf16)")
    p.add_argument("--block-size", type=int, default=16, help="slots of a KV block (default: %(default)s)")
    p.add_argument("--seed-gates", type=int, metavar="S", help="random small gates from this seed, so that the channels really mix")
    p.add_argument("--compile", action="store_true", help="with torch: also time decoding as torch modules, compiled and captured, with hccupy.nn and without")
    p.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    p.set_defaults(run=demo)

    p = commands.add_parser("explain", help="print the plan of an op: which kernel, built how, started how, and why")
    p.add_argument("op")
    p.add_argument("sizes", nargs="*", type=_word, metavar="name=value", help="axes, scalars, and name=True for optional arrays")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--arch", help="sm_80 ... sm_120a (default: this machine's GPU)")
    p.set_defaults(run=explain)

    p = commands.add_parser("doctor", help="examine the installation: versions, driver, GPU, compiler, cache, a trial launch; exit status 1 on a problem")
    p.add_argument("--json", action="store_true", help="for programs")
    p.set_defaults(run=doctor)

    p = commands.add_parser("warmup", help="compile and load every kernel that calls of some sizes can need, at any token count")
    _sizes(p)
    p.add_argument("--arch", type=_archs, help="only compile into the cache, for these (90a,100a); needs no GPU")
    p.set_defaults(run=warmup)

    p = commands.add_parser("build", help="write a bundle of compiled kernels for HCCUPY_KERNEL_BUNDLE; needs no GPU")
    _sizes(p)
    p.add_argument("--arch", type=_archs, required=True, help="architectures, such as 90a,100a")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="an existing bundle of the same version is added to")
    p.set_defaults(run=build)

    p = commands.add_parser("bench", help="verify and time the kernels: CUDA graphs, cold L2, medians; ceilings and peers in the same run")
    p.add_argument("ops", nargs="*", help="default: all")
    p.add_argument("--match", default="", help="only cases whose name holds this text")
    p.add_argument("--output", type=Path, default=Path("bench.json"), help="the record (a .csv and two figures are written beside it)")
    p.add_argument("--compile", action="store_true", help="time torch.compile too (seconds a shape)")
    p.add_argument("--no-peers", action="store_true", help="time nothing but ours")
    p.add_argument("--check", type=Path, metavar="FILE", help="exit 1 where a case is over 10 %% slower than in this record")
    p.set_defaults(run=bench)

    p = commands.add_parser("cache", help="the compiled kernels on disk")
    p.add_argument("action", choices=("info", "clear"))
    p.set_defaults(run=cache)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an HccupyError is one sentence on stderr and exit status 2."""
    options = parser().parse_args(arguments)
    try:
        status = options.run(options)
    except HccupyError as error:
        print(f"hccupy: {error}" if not str(error).startswith("hccupy") else error, file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
