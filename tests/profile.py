"""How much the drawn tests draw: a few examples by default, many with TEST_PROFILE=long (`make test-long`)."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

LONG = os.environ.get("TEST_PROFILE") == "long"


def examples(few: int, many: int) -> Any:
    """Hypothesis settings: the same examples in every short run, so that compiled kernels are found again; fresh ones in a long run."""
    return settings(max_examples=many if LONG else few, derandomize=not LONG, deadline=None, suppress_health_check=list(HealthCheck), database=None)
