"""bind(): a call with its shapes fixed, for hot loops. Only addresses are looked at each time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from . import api, repeat
from .arrays import framework
from .binding import Binding
from .errors import ArgumentError, FrameworkError, LayoutError, ShapeError, explain
from .frameworks import dlpack_
from .ops import get
from .run import prepare
from .spec import Arg


class BoundCall:
    """An op with fixed shapes, strides, dtypes and scalars. Call it with arrays like the example's, in their order.

    Arguments left out at the end stay those of the example. Outputs given to bind() are written at every call (nothing
    is allocated then); others are allocated anew.
    """

    def __init__(self, op: str, binding: Binding, given: list[Any], outs: list[Any], pointers: list[int], stream: Any) -> None:
        self.override = stream
        self.op, self.binding, self.given, self.outs, self.pointers = op, binding, given, outs, pointers
        self.framework = made_by = binding.framework
        self.foreign = made_by is dlpack_
        places = [i for i, p in enumerate(binding.spec.params) if isinstance(p, Arg)]
        # (position in given, position in pointers, facts, alignment) of every array of the example
        self.arrays = [(i, k, made_by.key(given[i]), pointers[k] & 15) for k, i in enumerate(places) if given[i] is not None]
        self.key, self.pointer = made_by.key, made_by.pointer
        # The direct way: on CUDA, nothing to allocate.
        self.direct = binding.launcher is not None and not binding.fresh and not binding.empty
        self.result = binding.returned(outs)
        self.served = self.direct and repeat.served(binding)
        self.short: dict[int, repeat.Call] = {}  # by the number of arrays given
        self.learnt = 0

    def __call__(self, *arrays: Any, stream: Any = None) -> Any:
        """Run once. Raises ShapeError or LayoutError where an array is not like the example's."""
        return self.any_number(*arrays, stream=stream)

    def any_number(self, *arrays: Any, stream: Any = None) -> Any:
        """The same; __call__ of a call that was learnt serves one number of arrays."""
        short = self.short.get(len(arrays))
        if short is not None:
            return short(self, *arrays, stream=stream)
        if not self.direct and self.binding.repeat is not None and len(arrays) <= len(self.arrays):  # outputs to allocate
            given = self.given.copy()
            for array, (i, *_) in zip(arrays, self.arrays, strict=False):
                given[i] = array
            result = self.binding.repeat(given, self.outs, self.override if stream is None else stream)
            if result is not repeat.MISS:
                return result
        return self.long(arrays, stream)

    def long(self, arrays: tuple[Any, ...], stream: Any) -> Any:
        """The same with every array looked at by itself, and told why it is refused."""
        stream = self.override if stream is None else stream
        pointers = self.pointers.copy()
        given = self.given.copy()
        if len(arrays) > len(self.arrays):
            raise ArgumentError(explain(self.op, "arguments", f"at most {len(self.arrays)} arrays", f"{len(arrays)}", "Scalars are fixed by bind()."))
        if self.foreign:
            arrays = tuple(dlpack_.adopt(a) for a in arrays)
        for array, (i, k, facts, align) in zip(arrays, self.arrays, strict=False):
            if framework(array) is not self.framework:
                raise FrameworkError(self._unlike(i, f"a {self.framework.NAME} array like the example's", type(array).__name__, "Convert it first."))
            address = self.pointer(array)
            if self.key(array) != facts:
                raise ShapeError(self._unlike(i, f"an array like the example's, {facts}", f"{self.key(array)}", "Bind again for other shapes."))
            if address & 15 != align:
                expected = f"an address of the example's alignment ({align} mod 16)"
                raise LayoutError(self._unlike(i, expected, f"{address & 15}", "Bind again."))
            pointers[k], given[i] = address, array
        result = self.binding(given, self.outs, pointers, stream)
        if self.served:
            self._learn(arrays)
        elif self.binding.launcher is not None:
            repeat.remember(self.binding, given, self.outs)
        return result

    def _learn(self, arrays: tuple[Any, ...]) -> None:
        """Serve as many arrays like these the short way from now on."""
        self.learnt += 1
        if self.learnt > repeat.REMADE:  # arrays of several kinds that take turns
            return
        params = self.binding.spec.params
        named = {params[i].name: array for array, (i, *_) in zip(arrays, self.arrays, strict=False)}
        try:
            call = repeat.bound(self.binding, named, self.pointers, self.result, self.override)
        except Exception:  # the framework's own comparison is not public: every call goes the long way then
            self.served = False
            return
        if self.short.keys() <= {len(arrays)}:  # Python calls the type's __call__: a type of its own spares 0.2 us, a look-up and a frame
            self.__class__ = type("BoundCall", (BoundCall,), {"__call__": call, "__doc__": BoundCall.__doc__})
        self.short[len(arrays)] = call

    def _unlike(self, place: int, expected: str, got: str, mend: str) -> str:
        return explain(self.op, self.binding.spec.params[place].name, expected, got, mend)


def bind(op: str, *args: Any, **kwargs: Any) -> BoundCall:
    """`op` with the shapes of these example arguments fixed.

    The example is checked, planned, compiled and loaded, not run. The result is called with the arrays that change, in
    signature order; see BoundCall. Serving loops and graph captures use it; host time is the driver's launch and little more.

    >>> import numpy as np
    >>> x, residual, h_post = np.ones((2, 8)), np.ones((2, 4, 8)), np.ones((2, 4))
    >>> call = bind("ihc_post", *(a.astype("float32") for a in (x, residual, h_post)))
    >>> call().shape
    (2, 4, 8)

    Raises what the op raises, FrameworkError for JAX arrays (use jax.jit), TypeError for arguments it does not take.
    """
    spec = get(op)
    call = inspect.signature(getattr(api, op)).bind(*args, **kwargs)
    call.apply_defaults()
    words = call.arguments
    given: Sequence[Any] = [words[p.name] for p in spec.params]
    outs: Sequence[Any] = [words.get(o.keyword) if o.keyword else None for o in spec.outputs]
    made_by, given, outs, pointers, binding = prepare(spec, given, outs, words["stream"])
    if binding is None or not made_by.MUTABLE:
        raise FrameworkError(explain(op, "arrays", "NumPy, CuPy, PyTorch or DLPack arrays", f"{made_by.NAME} arrays", "Under JAX, jax.jit is the bound call."))
    return BoundCall(op, binding, list(given), list(outs), pointers, words["stream"])
