"""`import hpc` answered with hccupy.compat.hpc, and a real hpc-ops, if there is one, behind it for every other name."""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from . import hpc

NAME = "hpc"
_lock = threading.RLock()


class _Shim(ModuleType):
    """The module engines get. Names that hccupy does not offer are the real hpc-ops', imported when first asked for."""

    __hccupy__ = True

    def __init__(self, before: ModuleType | None) -> None:
        super().__init__(NAME, hpc.__doc__)
        self.__dict__["_before"] = before  # the real hpc-ops, as far as it is imported
        spec = None if before is not None else find_spec(NAME)
        if spec is not None and spec.loader is None:  # just a folder of that name
            spec = None
        self.__dict__["_installed"] = before is not None or spec is not None
        paths = getattr(before, "__path__", None) if before is not None else getattr(spec, "submodule_search_locations", None)
        self.__file__ = hpc.__file__
        self.__path__ = list(paths or [])  # `import hpc.attention` finds the real one's
        self.__spec__ = ModuleSpec(NAME, None, origin=hpc.__file__, is_package=True)
        self.__spec__.submodule_search_locations = self.__path__
        self.__all__ = list(hpc.__all__)
        for name in hpc.__all__:
            setattr(self, name, getattr(hpc, name))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            real = self._real()
            if real is not None:
                return getattr(real, name)
        offered = ", ".join(n for n in hpc.__all__ if not n.startswith("_"))
        where = "the installed hpc-ops has not either" if self.__dict__["_installed"] else "no real hpc-ops is installed behind it"
        raise AttributeError(f"hpc: hccupy stands in for hpc-ops and offers {offered}; it has no {name!r}, and {where}.")

    def _real(self) -> ModuleType | None:
        if self.__dict__["_before"] is None and self.__dict__["_installed"]:
            with _lock:
                mine = sys.modules.pop(NAME, None)
                try:
                    self.__dict__["_before"] = importlib.import_module(NAME)
                except ImportError:  # built for another torch or GPU: as good as absent
                    self.__dict__["_installed"] = False
                finally:
                    if mine is not None:
                        sys.modules[NAME] = mine
                    else:
                        sys.modules.pop(NAME, None)
        return self.__dict__["_before"]  # type: ignore[no-any-return]


def install_hpc() -> ModuleType:
    """Make `import hpc`, `importlib.util.find_spec("hpc")` and `getattr(hpc, name, None)` answer with hccupy's functions.

    For this process; HCCUPY_HPC=1 does it in every process of vLLM and SGLang (hccupy/compat/plugins.py). Call it before the engine
    looks, since engines remember what they found. A second call changes nothing.
    """
    with _lock:
        held = sys.modules.get(NAME)
        if not isinstance(held, _Shim):
            held = sys.modules[NAME] = _Shim(held)
        return held


def uninstall_hpc() -> None:
    """Undo install_hpc(): the real hpc-ops, or nothing, is `hpc` again. Engines keep what they have already looked up."""
    with _lock:
        held = sys.modules.get(NAME)
        if isinstance(held, _Shim):
            del sys.modules[NAME]
            if held.__dict__["_before"] is not None:
                sys.modules[NAME] = held.__dict__["_before"]
