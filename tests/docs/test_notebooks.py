"""The notebooks in docs/notebooks run from top to bottom, and their stored outputs are those of a run."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MISSING = 'needs nbclient and ipykernel: pip install "keel-rl[test]"'


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[str]:
    """Return what a cell shows: the kinds of its outputs, without what libraries print to standard error."""
    return [output.output_type for output in cell.outputs if output.get("name") != "stderr"]


def test_both_notebooks_exist_and_the_page_links_to_them() -> None:
    page = (ROOT / "docs/train_in_python.md").read_text()
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_reward"]
    assert all(f"notebooks/{path.name}" in page for path in NOTEBOOKS)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    pytest.importorskip("ipykernel", reason=MISSING)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    stored = code_cells(notebook)
    shown = [kinds(cell) for cell in stored]
    assert sum(not cell.outputs for cell in stored) <= 1  # the cell that only imports and assigns
    assert not any(text in path.read_text() for text in ("Traceback", str(ROOT), "site-packages"))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert [kinds(cell) for cell in code_cells(notebook)] == shown
    display = next(output for cell in stored for output in cell.outputs if output.output_type == "display_data")
    assert "evaluation dataset on" in display.data["text/html"] and "<progress" not in display.data["text/html"]
