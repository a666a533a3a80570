"""The short way of a call like one before: all arrays compared at one look, then addresses, outputs, launch.

It serves frameworks that can compare many arrays in one call (`same` in frameworks/torch_.py), on CUDA. It decides nothing
anew: whatever is not exactly like the call remembered goes the long way, run.prepare and Binding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from . import cuda, switches
from .binding import Binding, stream_handle
from .launch import Launcher
from .spec import Scalar

MISS: Any = object()  # "not like the call remembered"
RECENT = 4  # calls remembered an op: decode, prefill, and a few more shapes that take turns
REMADE = 8  # a binding's Repeats: inference mode, Parameters and the like have one each
SEEN_LIMIT = 4096  # sets of addresses known to be fine

_recent: dict[str, tuple[Repeat, ...]] = {}


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """values -> tuple of those at `places`."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else (lambda values: ())


class Repeat:
    """One call: which arrays it had, what they and the scalars were like, and how to do the same with others of that kind."""

    def __init__(self, binding: Binding, launcher: Launcher, same: Any, given: Sequence[Any], outs: Sequence[Any]) -> None:
        spec, values = binding.spec, (*given, *outs)
        words = (*spec.params, *spec.outputs)
        slots = {p.name: k for k, p in enumerate(spec.arrays)}
        places = [i for i, v in enumerate(values) if v is not None and not isinstance(words[i], Scalar)]
        self.arrays_of = picker(places)
        self.fixed_of = picker([i for i in range(len(values)) if i not in places])  # scalars, and arrays that are absent
        self.fixed = self.fixed_of(values)
        self.types = list(map(type, self.fixed))  # True == 1 == 1.0
        arrays = self.arrays_of(values)
        self.check = same(arrays)
        self.binding, self.launcher, self.device = binding, launcher, binding.bound.device[1]
        self.framework = framework = binding.framework
        self.address, self.stream, self.current_device = framework.ADDRESS, framework.stream, cuda.cupy().cuda.runtime.getDevice
        self.debug = spec.debug is not None
        self.align = [framework.pointer(a) & 15 for a in arrays]
        self.seen: set[tuple[int, ...]] = set()
        # (index of an array of the same dtype, shape, options): the cheapest way to a new one
        self.fresh = [framework.beside(arrays, shape, dtype) for _, shape, dtype in binding.fresh]
        # Kernel order out of (addresses of arrays, addresses of fresh outputs, 0 for what is absent).
        made = {len(spec.args) + i: len(places) + n for n, (i, *_) in enumerate(binding.fresh)}
        at = {slots[words[i].name]: n for n, i in enumerate(places)} | made
        order = [at.get(k, len(places) + len(made)) for k in range(len(slots))]
        self.order = None if order == list(range(len(order))) else picker(order)
        answers = [(i, o) for i, o in enumerate(spec.outputs) if o.allocate]
        new = {i: len(outs) + n for n, (i, *_) in enumerate(binding.fresh)}
        picks = [new.get(i, i) for i, _ in answers]
        self.answer: Callable[[Sequence[Any]], Any] = itemgetter(*picks) if picks else lambda results: None

    def fits(self, values: Sequence[Any]) -> bool:
        """Is this a call like the one remembered? Addresses are not looked at."""
        fixed = self.fixed_of(values)
        return list(map(type, fixed)) == self.types and fixed == self.fixed and self.check(*self.arrays_of(values))

    def __call__(self, values: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
        """Run a call that fits, or MISS."""
        arrays = self.arrays_of(values)
        pointers = tuple(map(self.address, arrays))
        if pointers not in self.seen and not self.fine(pointers):
            return MISS
        try:
            if self.current_device() != self.device or (self.debug and switches.debug()):
                return MISS
            made = tuple([arrays[j].new_empty(shape, **options) for j, shape, options in self.fresh])
        except Exception:  # a forked child, memory at its end: the long way says it in words
            return MISS
        handle = self.stream(self.device, None) if stream is None else stream_handle(stream)
        pointers = (*pointers, *map(self.address, made), 0)
        self.launcher(pointers[:-1] if self.order is None else self.order(pointers), handle)
        return self.answer((*outs, *made))

    def fine(self, pointers: tuple[int, ...]) -> bool:
        """Alignment as remembered? Then remember these addresses. Raises LayoutError where arrays overlap."""
        if [p & 15 for p in pointers] != self.align:
            return False
        full = (*pointers, *(0 for _ in self.fresh), 0)
        self.binding.check_overlap(full[:-1] if self.order is None else self.order(full))
        if len(self.seen) >= SEEN_LIMIT:
            self.seen.clear()
        self.seen.add(pointers)
        return True


def again(op: str, given: Sequence[Any], outs: Sequence[Any], stream: Any) -> Any:
    """The result of a call like one remembered, or MISS."""
    recent = _recent.get(op)
    if recent is None:
        return MISS
    values = (*given, *outs)
    for n, repeat in enumerate(recent):
        if repeat.fits(values):
            if n:
                _recent[op] = (repeat, *recent[:n], *recent[n + 1 :])
            return repeat(values, outs, stream)
    return MISS


def remember(binding: Binding, given: Sequence[Any], outs: Sequence[Any]) -> Repeat | None:
    """Serve calls like this one the short way from now on, where there is one."""
    same, launcher = getattr(binding.framework, "same", None), binding.launcher
    if same is None or type(launcher) is not Launcher or binding.empty:
        return None
    repeat: Repeat | None = binding.repeat
    if repeat is None or not repeat.fits((*given, *outs)):
        if binding.remade >= REMADE:
            return None
        binding.remade += 1
        try:
            repeat = binding.repeat = Repeat(binding, launcher, same, given, outs)
        except Exception:  # the framework's own comparison is not public: without it every call goes the long way
            binding.remade = REMADE
            return None
    op = binding.spec.name
    _recent[op] = (repeat, *(r for r in _recent.get(op, ()) if r is not repeat))[:RECENT]
    return repeat


def forget() -> None:
    """Forget every call."""
    _recent.clear()
