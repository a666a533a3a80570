"""The list of faults fits the tree: `python -m tests.mutations` can run any day."""

from __future__ import annotations

import json

import pytest

from .mutations.__main__ import judge
from .mutations.table import MUTATIONS, ROOT, apply


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.id)
def test_the_fault_applies(mutation):
    """Its text is there exactly once, and its tests exist."""
    text = (ROOT / mutation.file).read_text()
    assert apply(mutation, text) != text
    for test in mutation.tests:
        file, *rest = test.split("::")
        assert (ROOT / file).exists(), test
        for word in rest:
            assert f"def {word.split('[')[0]}(" in (ROOT / file).read_text(), test
        assert not file.endswith(("test_mutations.py", "test_simulator_finds.py")), "these look at the text of kernels themselves"


def test_enough_faults_of_enough_kinds():
    assert len({m.id for m in MUTATIONS}) == len(MUTATIONS) >= 40
    assert len({m.kind for m in MUTATIONS}) >= 15
    assert sum(m.file.startswith("kernels/") for m in MUTATIONS) >= 20 and sum(m.file.startswith("hccupy/") for m in MUTATIONS) >= 20


def test_a_fault_that_no_longer_applies_is_an_error():
    with pytest.raises(ValueError, match="0 times"):
        apply(MUTATIONS[0], "")
    with pytest.raises(ValueError, match="2 times"):
        apply(MUTATIONS[0], 2 * MUTATIONS[0].before)


def test_what_counts_as_caught():
    """A failing test, a crash, a hang; but not tests that could not be collected."""
    assert judge(0, "") == ("missed", "")
    assert judge(1, "...\nFAILED tests/a.py::b[c d] - AssertionError\n") == ("caught", "tests/a.py::b[c d]")
    assert judge(-6, "")[0] == judge(None, "")[0] == "caught"
    for code in (2, 3, 4, 5):
        assert judge(code, "words") == ("error", "words")


def test_the_committed_table_says_that_all_were_caught():
    """Written by `python -m tests.mutations`; entries may have been added or changed since."""
    report = json.loads((ROOT / "notebooks" / "results" / "mutations.json").read_text())
    assert report["caught"] == report["total"] == len(report["faults"]) >= 40
    assert all(row["verdict"] == "caught" and row["by"] for row in report["faults"])
    assert len(report["commit"]) == 40 and report["kernels_digest"]
