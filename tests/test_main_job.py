"""The main job keeps its promise: every emoji is drawn so that it can be told from all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_command_without_settings_learns_all_64_pictures(tmp_path: Path) -> None:
    command("flowrun", "tracker=[csv]", folder=tmp_path)
    (run,) = (tmp_path / "outputs" / "runs" / "train").glob("*/*")
    command("flowrun.nearest", str(run), folder=tmp_path)
    report = json.loads((run / "nearest.json").read_text())
    assert report["accuracy"] >= 0.98 and report["mse"] <= 0.02
    assert {path.name for path in (run / "samples").glob("*.png")} >= {"step-000000.png", "step-000500.png", "step-001000.png"}


def command(module: str, *words: str, folder: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-m", module, *words], cwd=folder, check=True, env={**inherited, "PYTHONPATH": str(ROOT)})
