"""How much the drawn tests draw: a few examples by default, many with TEST_PROFILE=long (`make test-long`), none smaller with TEST_PROFILE=first."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

LONG = os.environ.get("TEST_PROFILE") == "long"


def examples(few: int, many: int) -> Any:
    """Hypothesis settings: the same examples in every short run, so that compiled kernels are found again; fresh ones in a long run."""
    # Faults (tests/mutations) want to be found, not explained: shrinking an example compiles dozens of kernels.
    phases = (Phase.generate,) if os.environ.get("TEST_PROFILE") == "first" else tuple(Phase)
    return settings(
        phases=phases, max_examples=many if LONG else few, derandomize=not LONG, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
