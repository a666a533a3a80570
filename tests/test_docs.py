"""What is written stays true: names documented, code blocks run, links lead somewhere, tables and figures are those of specs and reports."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from hccupy import cli, switches, tables
from hccupy.bench import plot
from hccupy.compat import hpc
from hccupy.ops import REGISTRY
from hccupy.switches import SWITCHES

from . import pages
from .pages import PAGES, ROOT, blocks, commands

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / tables.RESULTS
NAMES = {p: p.relative_to(ROOT).as_posix() for p in PAGES}

# ---- names ------------------------------------------------------------------------------------------------------

PUBLIC = ("hccupy", "hccupy.nn", "hccupy.compat", "hccupy.compat.hpc", "hccupy.demo", "hccupy.jax", "hccupy.torch_ops", "hccupy.patching", "hccupy.warmup")


def public(module):
    """(name, object) of what a module offers: its __all__, or what it defines without an underscore."""
    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
    return [(n, getattr(module, n)) for n in names if not n.startswith("__")]


def undocumented(name, thing):
    """Names without a docstring of their own: `thing`, and the public methods and properties of a class."""
    if not callable(thing) and not inspect.isclass(thing):
        return []
    found = [] if (thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__) else [name]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if method[0] != "_" and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)) and not value.__doc__:
                found.append(f"{name}.{method}")
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    offered = public(importlib.import_module(name))
    if name == "hccupy":
        import hccupy

        offered += [("patch", hccupy.patch), ("unpatch", hccupy.unpatch)]
    assert offered and not [n for pair in offered for n in undocumented(*pair)]


@pytest.mark.parametrize("op", REGISTRY)
def test_ops_say_shapes_dtypes_results_and_errors(op):
    import hccupy

    spec, text = REGISTRY[op], getattr(hccupy, op).__doc__
    for p in spec.args:
        line = re.search(rf"^{p.name} : (.*)$", text, re.M)[1]
        assert f"[{', '.join(p.axes)}]" in line and all(d.lstrip("=") in line for d in p.dtypes), p.name
    assert "ShapeError, DtypeError" in text and spec.summary in text and "Examples\n" in text
    assert all(p.meaning for p in spec.params) and all(a.meaning for a in spec.axes) and all(o.meaning for o in spec.outputs)


# ---- code -------------------------------------------------------------------------------------------------------

PYTHON = [(page, i, b) for page in PAGES for i, b in enumerate(blocks(page)) if b.language == "python" and page.name != "add-an-op.md"]
SHELL = [(page, line) for page in PAGES for b in blocks(page) if b.language == "bash" for line in commands(b.text) if page.name != "add-an-op.md"]
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "hccupy").rglob("*.py") if ">>> " in p.read_text() and p.name != "__main__.py"
)


@pytest.mark.parametrize(("page", "block"), [pytest.param(p, b, id=f"{NAMES[p]}-{i}") for p, i, b in PYTHON])
def test_python_blocks_run(page, block):
    """Those behind <!-- needs a GPU --> are compiled only. (docs/add-an-op.md has a test of its own.)"""
    code = compile(block.text, page.name, "exec")
    if pages.NEEDS_GPU not in block.before:
        exec(code, {"__name__": "page"})


def test_every_fence_names_a_language_that_is_looked_at():
    languages = {b.language for page in PAGES for b in blocks(page)}
    assert languages <= {"python", "bash", "cuda"}
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize(("page", "line"), [pytest.param(p, line, id=f"{NAMES[p]}-{line[:40]}") for p, line in SHELL])
def test_shell_lines_are_commands_that_exist(page, line):
    """make targets, hccupy command lines, and extras of setup.cfg."""
    words = shlex.split(line)
    if words[0] == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in words[1:])
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[([\w,]+)\]", line):
            assert all(f"\n{e} =" in (ROOT / "setup.cfg").read_text() for e in extra.split(","))
    else:
        assert words[0] == "hccupy" or words[:3] == ["python", "-m", "hccupy"], line
        cli.parser().parse_args(words[1:] if words[0] == "hccupy" else words[3:])


def test_commands_in_sentences_parse():
    for page in PAGES:
        for line in re.findall(r"`(?:python -m )?hccupy ([a-z][^`\n]*)`", page.read_text()):
            if not re.search(r"[A-Z|\[]", line):  # not a pattern such as `hccupy bench OP`
                words = line.split()
                missing = (
                    {"warmup": [], "explain": ["ihc_pre"], "build": ["--arch", "90a", "-o", "x"], "cache": ["info"]}.get(words[0], [])
                    if len(words) == 1
                    else []
                )
                cli.parser().parse_args([*words, *missing])


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    """Every >>> of a module, its generated docstrings included, and none is lost."""
    module = importlib.import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=dict(vars(module)))
    tests = [t for t in found if t.examples]
    assert tests
    for test in tests:
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test)
        assert runner.failures == 0, test.name


# ---- links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_links_lead_somewhere(page):
    """Files and anchors of the repository; `make links` asks the web for the others."""
    assert not pages.broken(page)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_files_named_exist(page):
    names = re.findall(r"`((?:hccupy|notebooks|kernels|tests|docs)/[\w./*<>]+)`", page.read_text())
    for name in names if page.name != "add-an-op.md" else ():
        if "<" not in name and name not in ("kernels/x.cu", "hccupy/ops/x.py"):
            assert list(ROOT.glob(name)), name


def test_switches_named_exist():
    for page in PAGES:
        assert set(re.findall(r"\bHCCUPY_[A-Z_]+\b", page.read_text())) <= set(SWITCHES), page


def test_pages_speak_of_the_project_only():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|opt)/", page.read_text()), page


# ---- tables and figures -----------------------------------------------------------------------------------------


def test_generated_parts_are_what_specs_and_reports_say():
    """Every figure of the README comes from a report committed under notebooks/results/."""
    assert tables.filled(README, tables.sections(ROOT)) == README, "make figures"
    assert tables.op_table() in README and switches.table() in README


def test_a_page_without_its_comments_is_an_error():
    with pytest.raises(ValueError, match="expected <!-- ops -->"):
        tables.filled("nothing", {"ops": "x"})
    assert tables.filled("<!-- a: b -->\nold\n<!-- /a -->", {"a": r"\1 new"}) == "<!-- a: b -->\n\\1 new\n<!-- /a -->"


@pytest.mark.parametrize("name", plot.FIGURES)
def test_figures_are_drawn_from_the_report(name, tmp_path):
    """The digest in the committed SVG is that of the data and the drawing code; drawing works, and gives the same again."""
    bench = json.loads((RESULTS / "bench.json").read_text())
    held = plot.figure_file(RESULTS / "bench.json", name)
    assert f"data {plot.digest(bench)}" in held.read_text(), "make figures"
    assert held.relative_to(ROOT).as_posix() in README
    drawn = [next(p for p in plot.plot(bench, tmp_path / f"{i}.json") if p.name.endswith(f"-{name}.svg")).read_text() for i in range(2)]
    assert drawn[0] == drawn[1] and "</svg>" in drawn[0]


def test_figures_and_tables_know_every_peer_of_a_record():
    """The message and the table name the best other kernel, size by size; nothing is rounded in our favour."""
    bench = json.loads((RESULTS / "bench.json").read_text())
    ours = [r for r in bench["records"] if plot.of_the_model(r) and r["op"] == "ihc_post"]
    bench["records"] = ours + [
        {**r, "op": f"ihc_post ({name})", "peer": name, "us": r["us"] * k} for r in ours for name, k in (("hpc-ops", 0.94), ("other", 3))
    ]
    assert plot.time_message(bench) == "0.9 to 0.9 times as fast as the best other kernel of the record"
    assert f"{0.94 * ours[0]['us']:.1f} hpc-ops | " in tables.rivals(bench)
    assert [t.get_text() for t in plot.time_figure(bench).legends[0].get_texts()] == ["hccupy", "hpc-ops", "other", "floor: each byte once"]
    bench["records"] = ours
    assert tables.rivals(bench) == "" and plot.time_message(bench) == "Microseconds a call"


def test_the_digest_follows_the_data():
    bench = json.loads((RESULTS / "bench.json").read_text())
    before = plot.digest(bench)
    next(r for r in bench["records"] if r["op"] == "ihc_post" and r["tokens"] == 64)["us"] += 0.1
    assert plot.digest(bench) != before


def luminance(colour):
    """Relative luminance of #rrggbb (WCAG)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(k * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for k, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize("paper", ["#ffffff", "#0d1117"])
def test_figures_are_readable_in_light_and_dark(paper):
    def contrast(colour):
        a, b = sorted((luminance(colour), luminance(paper)))
        return (b + 0.05) / (a + 0.05)

    assert contrast(plot.GREY) > 4 and min(map(contrast, plot.COLOURS)) > 2.2
    assert len(set(plot.MARKERS)) == len(plot.MARKERS) == len(plot.COLOURS)


def test_every_figure_has_labelled_axes_and_one_message():
    bench, demo = (json.loads((RESULTS / f"{n}.json").read_text()) for n in ("bench", "demo"))
    for name, draw in vars(plot).items():
        if name.endswith("_figure"):
            figure = draw(demo if name == "decode_figure" else bench)
            assert figure.get_suptitle() and figure.get_supxlabel(), name
            assert all(axis.get_xlabel() for axis in figure.axes), name
            first = figure.axes[0]
            assert first.get_ylabel() or [t.get_text() for t in first.get_yticklabels()], name


def test_a_report_without_curves_has_no_figure(tmp_path):
    assert plot.plot({"gpu": "x", "date": "y", "commit": "z", "records": []}, tmp_path / "bench.json") == []


def test_tables_as_a_command(tmp_path):
    """make figures: in another place, from the committed reports, gives what is committed."""
    target = tmp_path / tables.RESULTS
    target.mkdir(parents=True)
    for name in ("tests", "bench", "demo", "guards"):
        (target / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes())
    (tmp_path / "README.md").write_text(README)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "hccupy.tables"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "README.md" in done.stdout, done.stderr
    assert (tmp_path / "README.md").read_text() == README
    assert (target / "bench.csv").read_text() == (RESULTS / "bench.csv").read_text(), "make figures"


# ---- the page for engines ---------------------------------------------------------------------------------------


def test_the_engines_page_names_every_hpc_function_and_argument():
    text = (ROOT / "docs" / "from-hpc-ops-vllm-sglang.md").read_text()
    import hccupy

    for name in (n for n in hpc.__all__ if inspect.isfunction(getattr(hpc, n))):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        ours = row.split("|")[2].strip(" `")
        taken = set(inspect.signature(getattr(hccupy, ours)).parameters)
        renamed = set(inspect.signature(getattr(hpc, name)).parameters) - taken - {"rms_eps"}
        assert all(f"`{argument}`" in text for argument in renamed), (name, renamed)
        for new in re.findall(r"`\w+`(?: [\d, ]+)? is `(\w+)`", row):
            assert new in taken, new


def test_the_changelog_is_complete():
    """This version, every public function, module layer, command and switch."""
    import hccupy
    from hccupy import nn

    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {hccupy.__version__}" in text and hccupy.__version__ == "0.1.0"
    commands = next(a for a in cli.parser()._actions if a.dest == "command").choices
    functions = [n for n in hccupy.__all__ if inspect.isfunction(getattr(hccupy, n))]
    layers = [n for n in nn.__all__ if not n.startswith("Hpc")]
    missing = [n for n in (*functions, *layers, *SWITCHES, "hccupy.patch") if not re.search(rf"\b{n}\b", text)]
    assert not missing + [c for c in commands if f"hccupy {c}" not in text]
