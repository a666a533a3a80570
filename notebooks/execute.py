"""python notebooks/execute.py [NAME...]: run the .py sources and write the .ipynb beside them, with outputs (make notebooks)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def source(path: Path) -> nbformat.NotebookNode:
    """The notebook of a .py file, without outputs; nothing in it depends on when or where it is made."""
    notebook = jupytext.read(path)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    return notebook


def main(names: list[str]) -> None:
    """Execute those named (default: all), each in a kernel of its own."""
    for path in sorted(HERE.glob("0*.py")):
        if names and path.stem not in names:
            continue
        notebook, start = source(path), time.perf_counter()
        NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(notebook, path.with_suffix(".ipynb"))
        print(f"{path.with_suffix('.ipynb').name}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
