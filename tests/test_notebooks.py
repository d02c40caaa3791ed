"""Every notebook is stored with what it showed, and still runs: anywhere, in order, leaving nothing behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 400_000  # bytes
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|var|opt|usr|mnt|Users|private|workspace|work)/")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> Iterator[str]:
    """Everything that was printed or shown as text."""
    for output in (output for cell in cells(notebook) for output in cell.outputs):
        yield output.get("text", "")
        yield from (text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells(notebook) for output in cell.outputs)


def faults(notebook: Any) -> list[str]:
    """Errors and warnings among the outputs."""
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    return [output.get("evalue") or output.text for output in outputs
            if output.output_type == "error" or output.get("name") == "stderr"]  # fmt: skip


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each
def test_it_was_run_from_top_to_bottom_and_kept_what_it_showed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))
    assert faults(notebook) == []
    assert any(texts(notebook)) and pictures(notebook)


@each
def test_it_is_small_and_names_no_place_on_the_machine_that_ran_it(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    shown = "\n".join([*texts(nbformat.read(path, as_version=4)), path.read_text(encoding="utf-8")])
    assert [match[0] for match in MACHINE_PATH.finditer(shown)] == []


@pytest.mark.slow
@each
def test_it_runs_elsewhere_and_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, temporary = tmp_path / "there", tmp_path / "temporary"
    there.mkdir()
    temporary.mkdir()
    for source in (*FOLDER.glob("*.py"), *FOLDER.glob("*.csv")):
        shutil.copy(source, there)
    before = sorted(there.iterdir())
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))  # the package under test, installed or not
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("FLOWRUN_OUTPUTS", raising=False)

    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.from_dict(stored)
    NotebookClient(fresh, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(there)}}).execute()

    assert faults(fresh) == []
    assert pictures(fresh) == pictures(stored)
    assert sorted(there.iterdir()) == before
    assert [left.name for left in temporary.iterdir() if left.name.startswith("flowrun")] == []
