"""The command line: hccupy demo | explain | bench | cache. argparse, so that it runs on the core dependencies alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import HccupyError
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
    )


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
    p.set_defaults(run=demo)

    p = commands.add_parser("explain", help="print the plan of an op: which kernel, built how, started how, and why")
    p.add_argument("op")
    p.add_argument("sizes", nargs="*", type=_word, metavar="name=value", help="axes, scalars, and name=True for optional arrays")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--arch", help="sm_80 ... sm_120a (default: this machine's GPU)")
    p.set_defaults(run=explain)

    p = commands.add_parser("bench", help="verify and time the kernels: CUDA graphs, cold L2, medians; ceilings and peers in the same run")
    p.add_argument("ops", nargs="*", help="default: all")
    p.add_argument("--match", default="", help="only cases whose name holds this text")
    p.add_argument("--output", type=Path, default=Path("bench.json"), help="the record (a .csv is written beside it)")
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
