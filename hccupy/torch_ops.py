"""Every op as a registered torch op, `torch.ops.hccupy.<name>`, generated from REGISTRY: what torch.compile and vLLM passes see.

The plain functions are for eager code (a registered call costs about 2 us more); inside torch.compile they turn into these by
themselves (hccupy/traced.py). A registered op has one form that returns fresh outputs:

    hccupy::ihc_pre(Tensor x, Tensor w, ..., float rms_eps=1e-05, bool round_before_norm=True) -> (Tensor y, Tensor h_post)

and `<name>_out`, whose first output is the caller's (`out=`, `out_q=`; it may be the residual, an update in place). Caches and every
caller's output are declared as mutated. Schemas cannot return an optional tensor beside mutated arguments: static Q of
rope_norm_store_kv_fp8, which has no q_scale, is the op `rope_norm_store_kv_fp8_no_q_scale`.

Fakes work from the spec's axis expressions on symbolic sizes: a new token count is no recompilation. No gradient flows through
the ops: results do not require grad, as with the plain functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import api, check
from .arrays import Meta
from .errors import ArgumentError, explain
from .frameworks.torch_ import NAME_OF, TORCH_DTYPE
from .ops import REGISTRY
from .spec import Bound, OpSpec, Out, Scalar

NAMESPACE = "hccupy"
KINDS = {"float": "float", "int": "SymInt", "bool": "bool", "choice": "str"}
TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)
library = torch.library.Library(NAMESPACE, "DEF")  # its registrations live as long as this object


@dataclass(frozen=True)
class Form:
    """One registered op. supplied: outputs the caller passes and the op mutates; returned: the fresh ones."""

    spec: OpSpec
    name: str
    supplied: tuple[Out, ...]
    returned: tuple[Out, ...]

    @property
    def schema(self) -> str:
        """The torch schema: the public signature without the outputs it allocates and without stream."""
        letters = iter("abcdefgh")
        words: list[str] = []
        starred = False
        scalars = {s.name: s for s in self.spec.scalars}
        arrays = {a.name: a for a in self.spec.args}
        outs = {o.keyword: o for o in self.spec.outputs if o.keyword}
        for p in inspect.signature(getattr(api, self.spec.name)).parameters.values():
            if p.name in arrays:
                a = arrays[p.name]
                text = f"Tensor{f'({next(letters)}!)' if a.mutated else ''}{'? ' if a.optional else ' '}{p.name}{'=None' if a.optional else ''}"
            elif p.name in scalars:
                text = f"{KINDS[scalars[p.name].kind]}{'?' if scalars[p.name].optional else ''} {p.name}"
                if p.default is not p.empty:
                    text += f'="{p.default}"' if isinstance(p.default, str) else f"={p.default!r}"
            elif p.name in outs and outs[p.name] in self.supplied:
                text = f"Tensor({next(letters)}!) {p.name}"
            elif p.name in outs and not outs[p.name].allocate:
                text = f"Tensor({next(letters)}!)? {p.name}=None"
            else:
                continue
            if p.kind is p.KEYWORD_ONLY and not starred:
                words.append("*")
                starred = True
            words.append(text)
        results = ", ".join(f"Tensor {o.name}" if o.name not in (*arrays, "out") else "Tensor" for o in self.returned)
        return f"{self.name}({', '.join(words)}) -> ({results})"


def forms(spec: OpSpec) -> Iterator[Form]:
    """The registered ops of one op."""
    made = tuple(o for o in spec.outputs if o.allocate)
    optional = tuple(o for o in made if o.when is not None)
    for absent in dict.fromkeys(((), optional)):
        name = spec.name + "".join(f"_no_{o.name}" for o in absent)
        returned = tuple(o for o in made if o not in absent)
        yield Form(spec, name, (), returned)
        if returned and returned[0].keyword:
            yield Form(spec, f"{name}_out", returned[:1], returned[1:])


def _packed(values: Sequence[Any]) -> Any:
    """What a torch op returns for these results."""
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _real(form: Form) -> Callable[..., Any]:
    """The plain function, giving only what this form returns."""
    function = getattr(api, form.spec.name)
    made = [o for o in form.spec.outputs if o.allocate]
    places = [made.index(o) for o in form.returned]

    def real(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        for o, value in zip(made, results, strict=False):
            if (value is None) == (o in form.returned or o in form.supplied):
                mend = f"Call the registered op {form.spec.name}{'' if value is not None else f'_no_{o.name}'}."
                raise ArgumentError(explain(f"{NAMESPACE}::{form.name}", o.name, "the mode this op is for", "the other one", mend))
        return _packed([results[i] for i in places])

    return real


def _fake(form: Form) -> Callable[..., Any]:
    """Outputs of the right shape, dtype and device, from sizes that may be symbolic."""
    signature = inspect.signature(getattr(api, form.spec.name))

    def fake(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        bound, lead, like = _bound(form.spec, call.arguments)
        return _packed([like.new_empty(_shape(o, bound, lead), dtype=TORCH_DTYPE[check.out_dtype(o, bound)]) for o in form.returned])

    return fake


def _bound(spec: OpSpec, given: Mapping[str, Any]) -> tuple[Bound, tuple[Any, ...], Any]:
    """(facts, leading shape, first tensor) of a call on fake tensors. Ranks, dtypes, devices and plain scalars are checked here;
    sizes are not compared, since that could fix one that is symbolic: the real op checks them.
    """
    tensors = {p.name: given[p.name] for p in spec.args if given[p.name] is not None}
    metas = {}
    for name, t in tensors.items():
        metas[name] = Meta(tuple(t.shape), (), NAME_OF.get(t.dtype, str(t.dtype)), (t.device.type, t.device.index or 0))
    scalars = {s.name: _scalar(spec, s, given[s.name]) for s in spec.scalars}
    check._one_device(spec, metas)
    dtypes = check._dtypes(spec, metas)
    axes: dict[str, Any] = {}
    lead: tuple[Any, ...] = ()
    for p in spec.args:
        if p.name not in metas:
            continue
        front, sizes = check._split(spec, p, metas[p.name])
        if front is not None:
            lead, sizes = front, (math.prod(front), *sizes)
        for word, size in zip(p.axes, sizes, strict=True):
            if word.isidentifier():
                axes.setdefault(word, size)
    if spec.derive is not None:
        spec.derive(axes, scalars)
    like = next(iter(tensors.values()))
    return Bound(spec.name, axes, scalars, dtypes, {}, {}, "torch", (like.device.type, like.device.index or 0)), lead, like


def _scalar(spec: OpSpec, p: Scalar, value: Any) -> Any:
    return value if isinstance(value, torch.SymInt | torch.SymFloat) else check.scalar(spec, p, value)


def _shape(o: Out, bound: Bound, lead: tuple[Any, ...]) -> tuple[Any, ...]:
    if callable(o.axes):
        return o.axes(bound)
    sizes = tuple(eval(check._compiled(e), {"__builtins__": {}}, dict(bound.axes)) for e in o.axes)  # the spec's words, never the caller's
    return (*lead, *sizes[1:]) if o.lead else sizes


def _register() -> dict[str, Any]:
    ops = {}
    for spec in REGISTRY.values():
        for form in forms(spec):
            library.define(form.schema, tags=TAGS)
            for key in ("CPU", "CUDA"):
                library.impl(form.name, _real(form), key)
            torch.library.register_fake(f"{NAMESPACE}::{form.name}", _fake(form), lib=library)
            library.impl(form.name, _no_grad(form.name), "Autograd")
            ops[form.name] = getattr(getattr(torch.ops, NAMESPACE), form.name).default
    return ops


def _no_grad(name: str) -> Callable[..., Any]:
    """Below autograd: results do not require grad, and none of torch's warnings about a missing formula."""

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return OPS[name](*args, **kwargs)

    return below


OPS: dict[str, Any] = _register()

# What the router below needs, as plain tuples that torch.compile reads as constants.
_PARAMS = {s.name: tuple(p.name for p in s.params) for s in REGISTRY.values()}
_SCALARS = {s.name: tuple(p.name for p in s.scalars) for s in REGISTRY.values()}
_OUTS: dict[str, tuple[tuple[str, str, bool, Any], ...]] = {
    s.name: tuple((o.name, o.keyword or "", o.allocate, o.when) for o in s.outputs) for s in REGISTRY.values()
}


class _Mode:
    """What Out.when looks at."""

    def __init__(self, scalars: dict[str, Any]) -> None:
        self.scalars = scalars


def traced(op: str, given: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
    """What run.run(spec, given, outs, stream) is inside torch.compile: the same call through the registered ops."""
    if stream is not None:
        raise ArgumentError(explain(op, "stream", "None inside torch.compile", "a stream", "The compiled code chooses its own."))
    named = dict(zip(_PARAMS[op], given, strict=True))
    mode = _Mode({name: named[name] for name in _SCALARS[op]})
    name = op
    supplied = False
    missing = []
    for place, ((output, word, allocate, when), out) in enumerate(zip(_OUTS[op], outs, strict=True)):
        absent = allocate and when is not None and not when(mode)
        missing.append(absent)
        if absent:
            name += f"_no_{output}"
        if out is not None and (place == 0 or not allocate):
            named[word] = out
            supplied = supplied or place == 0
    result = OPS[f"{name}_out" if supplied else name](**named)
    results = [] if result is None else list(result) if isinstance(result, tuple | list) else [result]
    values: list[Any] = []
    for place, (_, _, allocate, _) in enumerate(_OUTS[op]):
        if not allocate:
            continue
        if missing[place]:
            values.append(None)
        elif place == 0 and supplied:
            values.append(outs[0])
        else:
            fresh = results.pop(0)
            values.append(fresh if outs[place] is None else outs[place].copy_(fresh))
    return _packed(values)
