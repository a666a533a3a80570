"""python -m hccupy bench: verify, then time every bench case of the registry; ceilings, torch and peers in the same run."""

from .run import run_bench

__all__ = ["run_bench"]
