"""The whole flow of a call on one screen: view -> bind -> plan -> build -> launch -> wrap. Read this first.

Everything that shapes, dtypes, strides, devices and scalars decide is worked out once and remembered (`_memo`);
a repeat call looks that up, compares addresses where arrays could overlap, allocates outputs and launches. With torch
tensors on CUDA most repeat calls need not even look up: repeat.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import arch, arrays, build, check, cuda, launch, plan, repeat
from .binding import Binding, stream_handle
from .errors import CaptureError, DeviceError, FrameworkError, HccupyError, explain
from .frameworks import dlpack_
from .spec import Arg, OpSpec, Out, Scalar

_memo: dict[tuple[Any, ...], Binding] = {}
MEMO_LIMIT = 4096  # a server sees thousands of token counts; past this the memo starts anew rather than grow for ever


def run(spec: OpSpec, given: Sequence[Any], outs: Sequence[Any] = (), stream: Any = None) -> Any:
    """Run an op. `given`: parameters in signature order; `outs`: caller's outputs in spec order (None: allocate)."""
    recent = repeat.recent.get(spec.name)
    if recent is not None:
        result = recent[0](given, outs, stream)
        if result is not repeat.MISS or (result := repeat.again(spec.name, given, outs, stream)) is not repeat.MISS:
            return result
    _, given, outs, pointers, binding = prepare(spec, given, outs, stream)
    if binding is None:
        from . import jax

        return jax.run(spec, given)
    result = binding(given, outs, pointers, stream)
    if binding.launcher is not None:
        repeat.remember(binding, given, outs)
    return result


def prepare(spec: OpSpec, given: Sequence[Any], outs: Sequence[Any], stream: Any) -> tuple[ModuleType, Sequence[Any], Sequence[Any], list[int], Binding | None]:
    """(framework, arguments, outputs, addresses, what is known of such a call); None where JAX has to make the call."""
    framework = _framework(spec, given)
    if framework.NAME == "dlpack":  # read each foreign array once
        given = [_adopt(spec, p, v) for p, v in zip(spec.params, given, strict=True)]
        outs = [_adopt(spec, o, v) for o, v in zip(spec.outputs, outs, strict=True)]
    elif framework.NAME == "jax":
        from . import jax

        jax.refuse_outs(spec, outs)
        if jax.on_cuda(spec, given) or not jax.concrete(given):
            return framework, given, outs, [], None
    key: list[Any] = [spec.name, framework.NAME]
    pointers: list[int] = []
    for p, value in zip((*spec.params, *spec.outputs), (*given, *outs), strict=True):
        if isinstance(p, Scalar):
            key += value, type(value)  # True == 1 == 1.0, and only one of them may be a flag
        elif value is None:
            key.append(None)
            pointers.append(0)
        else:
            if arrays.framework(value) is not framework:
                _refuse(spec, framework, given, word(p), value)
            try:
                address = framework.pointer(value)
            except HccupyError as error:
                raise arrays.named(spec.name, word(p), error) from None
            pointers.append(address)
            key += framework.key(value), address & 15
    try:
        known = tuple(key)
        binding = _memo.get(known)
    except TypeError:  # an unhashable scalar: the checks say which
        binding = None
    if binding is None:
        binding = bind(spec, framework, given, outs, pointers, stream)
        if len(_memo) >= MEMO_LIMIT:
            _memo.clear()
        _memo[known] = binding
    return framework, given, outs, pointers, binding


def forget() -> None:
    """Work everything out anew at the next calls (after a change to the registry)."""
    _memo.clear()
    repeat.forget()


def bind(spec: OpSpec, framework: ModuleType, given: Sequence[Any], outs: Sequence[Any], pointers: Sequence[int], stream: Any) -> Binding:
    """Steps 1 to 4 of a call seen for the first time: facts, checks, plan, kernel."""
    metas = {}
    scalars = {}
    named = [(p, v) for p, v in zip(spec.params, given, strict=True)] + list(zip(spec.outputs, outs, strict=True))
    for p, value in named:
        if not isinstance(p, Arg) and p in spec.scalars:
            scalars[p.name] = value
        elif value is not None:
            metas[p.name] = arrays.view(spec.name, word(p), value)[1]
    slots = [a.name for a in spec.arrays]
    addresses = dict(zip(slots, pointers, strict=True))
    bound = check.bind(spec, metas, scalars, framework.NAME, addresses)  # 2
    launcher = None
    if bound.device[0] == "cuda" and all(bound.axes[a] for a in spec.empty):
        cuda.check_fork()
        index = bound.device[1]
        handle = framework.stream(index) if stream is None else stream_handle(stream)
        with cuda.cupy().cuda.Device(index):
            cuda.ensure_context()  # a thread's first call may be this one
            capturing = cuda.is_capturing(handle)
            made = None if capturing and not build.any_loaded(index) else plan.make(spec, bound, arch.of_device(index))  # 3
            if made is None or (capturing and not build.is_loaded(made, index)):
                raise CaptureError(
                    f"{spec.name}: a CUDA graph is being captured and the kernel of this call is not loaded: it cannot be compiled or loaded now. "
                    "Call the op once with such arguments before the capture, or use hccupy.warmup."
                )
            launcher = launch.launcher(spec, made, bound, index)  # 4
    return Binding(spec, framework, bound, metas, check.lead_of(spec, metas), launcher)


def word(p: Arg | Scalar | Out) -> str:
    """The caller's name for a parameter or output."""
    return (p.keyword if isinstance(p, Out) else None) or p.name


def _adopt(spec: OpSpec, p: Arg | Scalar | Out, value: Any) -> Any:
    try:
        return value if isinstance(p, Scalar) else dlpack_.adopt(value)
    except HccupyError as error:
        raise arrays.named(spec.name, word(p), error) from None


def _framework(spec: OpSpec, given: Sequence[Any]) -> ModuleType:
    """The framework of the first array, which all must share."""
    name, first = next((p.name, v) for p, v in zip(spec.params, given, strict=True) if isinstance(p, Arg))
    return arrays.framework(first) or arrays.view(spec.name, name, first)[0]


def _refuse(spec: OpSpec, framework: ModuleType, given: Sequence[Any], name: str, value: Any) -> None:
    """Say why an argument of another framework cannot be used: another device first, since that is the usual cause."""
    other, meta = arrays.view(spec.name, name, value)
    first = framework.meta(next(v for p, v in zip(spec.params, given, strict=True) if isinstance(p, Arg)))
    if meta.device != first.device:
        where = f"an array on {first.device[0]}:{first.device[1]} like the first argument"
        raise DeviceError(explain(spec.name, name, where, f"a {other.NAME} array on {meta.device[0]}:{meta.device[1]}", "Move it there."))
    raise FrameworkError(explain(spec.name, name, f"a {framework.NAME} array like the first argument", f"a {other.NAME} array", "Convert it first."))
