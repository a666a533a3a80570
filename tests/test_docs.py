"""The README's words stay true: its op table is the specs', its code blocks run, its links exist, its commands parse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hccupy import cli, switches, tables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_op_table_is_generated():
    held = README.split("see hccupy/tables.py -->\n")[1].split("<!-- /ops -->")[0].strip()
    assert held == tables.op_table(), "paste the output of: python -c 'from hccupy import tables; print(tables.op_table())'"


def test_switches_are_listed():
    assert switches.table() in README


def test_status_is_what_the_reports_say():
    """Every figure of the README comes from a report committed under notebooks/results/."""
    results = ROOT / "notebooks" / "results" / "h200"
    held = README.split("<!-- status -->\n")[1].split("<!-- /status -->")[0].strip()
    assert held == tables.status(*(json.loads((results / f"{name}.json").read_text()) for name in ("tests", "bench", "demo")))


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.S))
def test_code_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {})


def test_files_named_exist():
    for name in re.findall(r"`((?:hccupy|notebooks|kernels|tests)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_commands_parse():
    for line in re.findall(r"python -m hccupy ([^`\n]+)", README):
        cli.parser().parse_args(line.split("`")[0].split())
