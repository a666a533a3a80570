"""What an op is, as data. One OpSpec drives checks, CPU path, CUDA path, torch op, JAX, tests and bench.

Words: an *axis* is a named length ("tokens"); it is *baked* into the CUDA binary or given at run time.
A *parameter* is an array (Arg) or a Scalar of the public signature; an *output* (Out) is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from .arch import Arch


@dataclass(frozen=True)
class Axis:
    """A named length. `choices` or `low`/`high` bound it; out of bounds is a ShapeError."""

    name: str
    baked: bool = False
    low: int = 0
    high: int = 2**31 - 1
    choices: tuple[int, ...] = ()
    meaning: str = ""


@dataclass(frozen=True)
class Arg:
    """An array of the signature.

    axes     names, or expressions of names such as "2*hc"
    dtypes   names of dtypes.py; "=x" means the dtype of argument x
    strides  the axes along which any stride is taken, given to the kernel in elements; the axes that are
             not listed must be packed, the last of all with stride 1
    lead     the first axis stands for any leading shape (flattened for the kernel, restored in outputs)
    mutated  the op writes into it (a cache)
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    strides: tuple[str, ...] = ()
    lead: bool = False
    mutated: bool = False
    optional: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Scalar:
    """A number, flag or named choice of the signature.

    baked   becomes a compile-time int of the kernel (the index, for a choice)
    low     smallest value allowed (floats must be finite as well)
    """

    name: str
    kind: Literal["float", "int", "bool", "choice"]
    default: Any
    choices: tuple[str, ...] = ()
    baked: bool = False
    low: float | None = None
    optional: bool = False  # None is allowed
    keyword: bool = False  # keyword-only in the signature
    in_kernel: bool = True
    presence: bool = True  # whether an optional one was given is baked (kHas...)
    meaning: str = ""


@dataclass(frozen=True)
class Out:
    """A returned array.

    keyword   the signature's name for a caller-supplied one ("out")
    axes      as Arg.axes, or a function of the Bound giving the shape
    dtypes    one name, "=x", or a function of the Bound
    when      None of this output is returned unless this holds
    allocate  False: exists only when the caller supplies it, and is not in the returned tuple
    alias     names of inputs it may *be* (same memory, same strides): an update in place
    """

    name: str
    keyword: str | None
    axes: tuple[str, ...] | Callable[[Bound], tuple[int, ...]]
    dtype: str | Callable[[Bound], str]
    strides: tuple[str, ...] = ()
    lead: bool = False
    when: Callable[[Bound], bool] | None = None
    allocate: bool = True
    alias: tuple[str, ...] = ()
    meaning: str = ""


@dataclass(frozen=True)
class Bound:
    """Checked facts of one call: everything that checks, plans, references and output shapes may look at."""

    op: str
    axes: Mapping[str, int]
    scalars: Mapping[str, Any]
    dtypes: Mapping[str, str]  # of every array present, outputs included
    strides: Mapping[str, tuple[int, ...]]  # in elements, of the flattened arrays
    aligned: Mapping[str, int]  # largest power of two <= 16 dividing address and byte strides of an array
    framework: str
    device: tuple[str, int]

    def has(self, name: str) -> bool:
        """Is that array part of the call?"""
        return name in self.dtypes


@dataclass(frozen=True)
class Launch:
    """How one kernel is started. Sizes in threads and bytes; `why` is the measured or stated reason."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int = 0
    cluster: int = 1
    pdl: bool = False
    defines: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up: what every launch function counts blocks with."""
    return -(-a // b)


@dataclass(frozen=True)
class Variant:
    """One kernel that can run an op. The first whose `when` says yes is taken."""

    name: str
    source: str  # file in kernels/
    entry: str  # its extern "C" name
    launch: Callable[[Bound, Arch], Launch]
    when: Callable[[Bound, Arch], tuple[bool, str]] = lambda bound, arch: (True, "")


@dataclass(frozen=True)
class Case:
    """A named size with its scalars, for tests and bench."""

    name: str
    axes: Mapping[str, int]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpSpec:
    """The only statement of an op."""

    name: str
    summary: str
    axes: tuple[Axis, ...]
    params: tuple[Arg | Scalar, ...]  # in signature order
    outputs: tuple[Out, ...]  # in return order
    reference: Callable[[SimpleNamespace], None]  # NumPy arrays and scalars in, outputs filled
    variants: tuple[Variant, ...]
    make_inputs: Callable[..., dict[str, Any]]  # (case, rng) -> keyword arguments, NumPy
    bytes_moved: Callable[[Bound], int]
    cases: tuple[Case, ...]
    derive: Callable[[dict[str, int], Mapping[str, Any]], None] | None = None  # axes not read off a shape
    rules: tuple[Callable[[Bound], None], ...] = ()  # op-specific checks
    debug: Callable[[SimpleNamespace], None] | None = None  # HCCUPY_DEBUG: looks at metadata values
    imagine: Mapping[str, str] = field(default_factory=dict)  # sizes to assume where only a model's sizes are given
    empty: tuple[str, ...] = ("tokens",)  # nothing is launched when the product of these is 0
    tolerance: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # ulps: 99.9 % and all
    source: str = ""  # where the formula comes from

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arrays among the parameters."""
        return tuple(p for p in self.params if isinstance(p, Arg))

    @property
    def arrays(self) -> tuple[Arg | Out, ...]:
        """Every array in the kernels' order: parameters, then outputs."""
        return (*self.args, *self.outputs)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalars among the parameters."""
        return tuple(p for p in self.params if isinstance(p, Scalar))
