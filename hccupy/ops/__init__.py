"""REGISTRY: the name of every op and its one statement, found in the modules of this package."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..errors import UnknownOpError
from ..spec import OpSpec


def _found() -> dict[str, OpSpec]:
    """Every OpSpec that a module of this package holds, by name: modules in alphabetical order, specs in that of the file."""
    modules = (import_module(f".{module.name}", __name__) for module in iter_modules(__path__))
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, OpSpec)}


REGISTRY = _found()


def get(name: str) -> OpSpec:
    """The spec of that name.

    Raises UnknownOpError naming the ops there are.
    """
    if name not in REGISTRY:
        raise UnknownOpError(f"op: expected one of {', '.join(REGISTRY)}, got {name!r}.")
    return REGISTRY[name]
