"""The logger "hccupy": one INFO line per cold compile, warnings for a cache or bundle that is not used. HCCUPY_LOG shows them."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("hccupy")


def from_environment() -> None:
    """HCCUPY_LOG=INFO (or another level): a handler on stderr. Called once, by the import of hccupy."""
    word = os.environ.get("HCCUPY_LOG")
    if not word:
        return
    level = logging.getLevelNamesMapping().get(word.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False  # the application's own handlers would print the line again
    log.setLevel(logging.INFO if level is None else level)
    if level is None:
        log.warning("hccupy: HCCUPY_LOG: expected a level such as INFO, got %r", word)
