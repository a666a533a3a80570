"""The short way of a call like one before: a function written for it, which compares, allocates and launches, and no more.

It serves frameworks that can compare many arrays in one call (`same` in frameworks/torch_.py and cupy_.py), on CUDA. For ihc_post with
torch tensors the function reads, in essence,

    def call(given, outs, stream):
        x, residual, h_post, = given
        out, = outs
        if not (out is None and check(x, residual, h_post)): return MISS
        p_x = x.data_ptr(); p_residual = residual.data_ptr(); p_h_post = h_post.data_ptr()
        if (p_x | p_residual | p_h_post) & 15: return MISS
        ...
        out = new_0(); p_out = out.data_ptr()
        pack(buffer, 32, current_stream(0), attributes, count, p_x, p_residual, p_h_post, p_out)
        ...

It decides nothing anew: whatever is not exactly like the call remembered is a MISS, and goes the long way through
run.prepare and Binding. Written out, a call of ihc_pre spends 2 us less on the host than in loops over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import cuda, switches
from .binding import Binding, stream_handle
from .launch import STREAM, Launcher
from .spec import OpSpec, Scalar

MISS: Any = object()  # "not like the call remembered"
RECENT = 4  # calls remembered an op: decode, prefill, and a few more shapes that take turns
REMADE = 8  # functions a binding may have: inference mode, Parameters and the like need one each
SEEN_LIMIT = 4096  # sets of addresses known to be fine

Call = Callable[..., Any]
recent: dict[str, tuple[Call, ...]] = {}  # by op, the latest first; run.run tries that one itself


def served(binding: Binding) -> bool:
    """Is there a short way for such calls?"""
    return hasattr(binding.framework, "same") and type(binding.launcher) is Launcher and not binding.empty


def _outputs(spec: OpSpec) -> list[str]:
    """What outputs are called in the functions: not by parameters' names, of which an output may have one."""
    return [f"out_{o.name}" for o in spec.outputs]


def _arrays(spec: OpSpec) -> list[str]:
    """What all arrays are called, in the kernel's order."""
    return [a.name for a in spec.args] + _outputs(spec)


def write(
    binding: Binding,
    launcher: Any,
    tensors: dict[str, Any],
    slots: dict[str, Any],
    before: Iterable[str],
    fresh: dict[str, str],
    words: dict[str, Any],
    miss: str = "MISS",
) -> Call:
    """The function of a call.

    launcher   the binding's, or one like it
    tensors    what is compared, and whose address is looked at: name -> an example
    slots      all arrays of the kernel in its order -> the expression of their address
    before     the signature and what precedes the comparison
    fresh      outputs to allocate: name -> the expression that does
    words      what the expressions use; "answer" is the expression that is returned
    miss       the expression returned for a call that is not like the one remembered
    """
    spec, framework = binding.spec, binding.framework
    places = [list(slots).index(n) for n in tensors]
    align = [framework.pointer(t) & 15 for t in tensors.values()]
    rest = [0 if isinstance(s, str) else s for s in slots.values()]
    seen: set[tuple[int, ...]] = set()

    def fine(*pointers: int) -> bool:
        """Alignment as remembered? Then remember these addresses. Raises LayoutError where arrays overlap."""
        if [p & 15 for p in pointers] != align:
            return False
        full = rest.copy()
        for k, pointer in zip(places, pointers, strict=True):
            full[k] = pointer
        binding.check_overlap(full)
        if len(seen) >= SEEN_LIMIT:
            seen.clear()
        seen.add(pointers)
        return True

    names = ", ".join(tensors)
    pointers = "".join(f"p_{n}, " for n in tensors)
    doubt = f"({pointers}) not in seen and not fine({pointers})"
    if not binding.pairs and not any(align):  # nothing given is written, all of it is aligned: no sets of addresses to remember
        doubt = f"({' | '.join(f'p_{n}' for n in tensors) or 0}) & 15"
    text = [
        *before,
        f"    if not check({names}): return {miss}",
        *(f"    p_{n} = {n}.{framework.ADDRESS}" for n in tensors),
        f"    if {doubt}: return {miss}",
        "    try:",
        f"        if current_device() != {binding.bound.device[1]}{' or debug()' if spec.debug else ''}: return {miss}",
        *(f"        {n} = {how}; p_{n} = {n}.{framework.ADDRESS}" for n, how in fresh.items()),
        f"    except Exception: return {miss}",  # a forked child, memory at its end: the long way says it in words
        "    try: buffer, config, table, _ = local.block",
        "    except AttributeError: buffer, config, table, _ = block()",
        f"    handle = current_stream({binding.bound.device[1]}) if stream is None else stream_handle(stream)",
        f"    pack(buffer, {STREAM}, handle, {', '.join(map(str, (*launcher.attributes, *list(slots.values())[: launcher.patched])))})",
        "    code = launch(config, function, table, None)",
        "    if code: refused(code)",
        f"    return {words['answer']}",
    ]
    space = words | {
        "MISS": MISS, "check": framework.same(list(tensors.values())) if tensors else lambda: True, "seen": seen, "fine": fine, "debug": switches.debug,
        "current_device": cuda.cupy().cuda.runtime.getDevice, "current_stream": framework.stream, "stream_handle": stream_handle,
        "local": launcher.local, "block": launcher.block, "pack": launcher.patch, "function": launcher.function, "launch": launcher.call,
        "refused": launcher.refused,
    }  # fmt: skip
    exec("\n".join(text), space)  # names of specs and our own words, never the caller's
    call: Call = space["call"]
    return call


def plain(binding: Binding, given: Sequence[Any], outs: Sequence[Any]) -> Call:
    """call(given, outs, stream) for what `run` gets."""
    spec = binding.spec
    outputs = _outputs(spec)
    values = {p.name: v for p, v in zip(spec.params, given, strict=True)} | dict(zip(outputs, outs, strict=True))
    scalars = {p.name for p in spec.params if isinstance(p, Scalar)}
    tensors = {n: v for n, v in values.items() if n not in scalars and v is not None}
    words: dict[str, Any] = {}
    tests = []
    for n, v in values.items():
        if n in scalars and v is not None:
            words |= {f"is_{n}": v, f"type_{n}": type(v)}
            tests.append(f"({n} is is_{n} or ({n} == is_{n} and type({n}) is type_{n}))")  # True == 1 == 1.0
        elif v is None:
            tests.append(f"{n} is None")
    fresh = {}
    for i, shape, dtype in binding.fresh:
        words[f"new_{i}"] = binding.framework.maker(shape, dtype, next(iter(tensors.values())))
        fresh[outputs[i]] = f"new_{i}()"
    slots = {n: f"p_{n}" if n in tensors or n in fresh else 0 for n in _arrays(spec)}
    answers = [n for n, o in zip(outputs, spec.outputs, strict=True) if o.allocate]
    words["answer"] = ", ".join(answers) or "None"
    before = [
        "def call(given, outs, stream):",
        f"    {''.join(f'{p.name}, ' for p in spec.params)} = given",
        f"    {''.join(f'{n}, ' for n in outputs)} = outs" if outputs else "",
        f"    if not ({' and '.join(tests) or True}): return MISS",
    ]
    return write(binding, binding.launcher, tensors, slots, before, fresh, words)


def bound(binding: Binding, arrays: dict[str, Any], pointers: Sequence[int], result: Any, override: Any) -> Call:
    """__call__ of a BoundCall that allocates nothing, called with the first so many arrays; the others stay."""
    slots = {n: f"p_{n}" if n in arrays else p for n, p in zip(_arrays(binding.spec), pointers, strict=True)}
    before = [
        "def call(self, *arrays, stream=None):",
        f"    if len(arrays) != {len(arrays)}: return self.any_number(*arrays, stream=stream)",
        f"    {''.join(f'{n}, ' for n in arrays)} = arrays" if arrays else "",
        "    stream = override if stream is None else stream" if override is not None else "",
    ]
    count = 1 + max((list(slots).index(n) for n in arrays), default=-1)
    launcher: Any = binding.launcher
    words = {"answer": "result", "result": result, "override": override}
    return write(binding, launcher.holding(pointers, count), arrays, slots, before, {}, words, "self.long(arrays, stream)")


def again(op: str, given: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
    """The result of a call like one of those remembered behind the first, which it becomes, or MISS. run.run has tried the first."""
    calls = recent.get(op, ())
    for n, call in enumerate(calls[1:], 1):
        result = call(given, outs, stream)
        if result is not MISS:
            recent[op] = (call, *calls[:n], *calls[n + 1 :])
            return result
    return MISS


def remember(binding: Binding, given: Sequence[Any], outs: Sequence[Any]) -> None:
    """Serve calls like this one the short way from now on, where there is one."""
    if not served(binding) or cuda.current_device() != binding.bound.device[1] or (binding.spec.debug and switches.debug()):
        return
    op = binding.spec.name
    calls = recent.get(op, ())
    call = binding.repeat
    if call is None or call in calls:  # it just was a MISS, though the facts are the same: Parameters, inference mode
        if binding.remade >= REMADE:
            return
        binding.remade += 1
        try:
            call = binding.repeat = plain(binding, given, outs)
        except Exception:  # the framework's own comparison is not public: without it every call goes the long way
            binding.remade = REMADE
            return
    recent[op] = (call, *calls)[:RECENT]


def forget() -> None:
    """Forget every call."""
    recent.clear()
