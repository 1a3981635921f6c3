"""Notebooks of examples/notebooks: each runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import of_this_checkout

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.nightly  # make test-notebooks
@pytest.mark.processes
@pytest.mark.new_programs
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # of the packages of Jupyter
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in of_this_checkout().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    assert notebook.cells[-1].outputs  # the numbers of the tutorial
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "\x1b[2K" not in printed  # progress is one line that changes, without the control sequences of a terminal
