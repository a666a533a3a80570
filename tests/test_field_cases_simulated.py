"""The field cases of rope_field_cases.py on the real kernels, in the CPU simulator: no GPU needed."""

from __future__ import annotations

import zlib

import pytest

from . import rope_field_cases
from .profile import LONG
from .simulated import SimulatedAdapter

# What the host answers, before a kernel is chosen: other tests.
HOST = ("B16_debug_names_the_page", "H3_position_is_the_cache_slot", "I8_outputs_that_overlap_an_input")
# A kernel for each of a dozen head counts, dims or modes: in the long run. test_kernels_drawn.py draws from them at all times.
MANY_KERNELS = () if LONG else ("A12_tail_of_the_last_block", "D12_head_dims", "D15_head_groups", "F8_scales_are_used")
CHECKS = sorted({n.removeprefix("test_") for n in rope_field_cases.tests([])} - {*HOST, *MANY_KERNELS})
ARCHS = ("sm_80", "sm_90a")  # on sm_90a metadata are guessed before they are read, and rows come by bulk copies
BUILDS = ({}, {"sanitize": True}, {"watch": True}) if LONG else ({},)


@pytest.mark.parametrize("name", CHECKS)
def test_field_case(name, rng):
    """By default on one of the architectures, which follows from the name."""
    for target in ARCHS if LONG else ARCHS[zlib.crc32(name.encode()) % 2 :][:1]:
        for build in BUILDS:
            getattr(rope_field_cases, name)(SimulatedAdapter(arch_name=target, build=build), rng)
