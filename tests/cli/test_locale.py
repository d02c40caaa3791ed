"""Captions, file names and output in any script, on machines whose locale knows other letters or hardly any.

pytest tests/cli/test_locale.py"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from flowrun.cache import Cache
from tests.conftest import SMALL, result

REPOSITORY = Path(__file__).parents[2]
SAID = {"りんご.png": "赤い りんご 🍎", "más/🍎.png": "ein grüner Apfel", "绿.png": "绿色的苹果"}
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0"}
SETTINGS = [*(text for text in SMALL if not text.startswith("data.")), "data=folder", 'data.path="絵"']


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name, caption in SAID.items():
        file = tmp_path / "絵" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), "red").save(file)
        file.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return tmp_path


def python_m(folder: Path, environment: dict[str, str], module: str, *words: str) -> tuple[int, bytes, bytes]:
    """Exit code and what was printed, in bytes."""
    settings = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=folder, capture_output=True, timeout=120,
                          env={**os.environ, **settings, **environment})  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("module", "words"), [("flowrun", ["--config-dir", "絵"]), ("flowrun.cache", ["stats", "絵"])])
def test_a_mistake_is_one_line_with_the_name_as_it_was_typed(tmp_path: Path, module: str, words: list[str]) -> None:
    (tmp_path / "絵").touch()
    code, out, error = python_m(tmp_path, ASCII_ONLY, module, *words)
    assert (code, out, error.count(b"\n")) == (2, b"", 1)
    assert error.startswith(f"{module}: ".encode()) and "絵 is ".encode() in error


@pytest.mark.slow
def test_a_run_in_an_ascii_locale_trains_on_all_rows_and_writes_utf_8(pictures: Path) -> None:
    (pictures / "絵" / "空.png").write_bytes(b"")
    code, _, error = python_m(pictures, ASCII_ONLY, "flowrun", *SETTINGS, "train.steps=2", "train.batch_size=4",
                              'sample.prompts=["赤い りんご 🍎"]', "sample.steps=1", 'run_id="走"', "data.on_error=skip")  # fmt: skip
    assert code == 0, error.decode()
    assert "less than a batch of 4, so in short batches: más/🍎.png" in error.decode("utf-8")
    rows = {row.id: row.caption for _, row in Cache(pictures / "outputs" / "cache").rows()}
    assert SAID.items() <= rows.items()
    (train,) = (pictures / "outputs" / "runs" / "train").glob("*/走")
    assert result(train)["status"] == "finished"
    assert "りんご.png" in (train / "plan.txt").read_text(encoding="utf-8")
    assert "りんご" in (train / "config.yaml").read_text(encoding="utf-8")
    with open(train / "skipped.csv", encoding="utf-8", newline="") as file:
        assert [row["row"] for row in csv.DictReader(file)] == ["空.png"]


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    """GBK knows Chinese and Japanese, and no emoji."""
    words = ['sample.prompts=["绿🍎"]', "--cfg", "job"]
    code, out, _ = python_m(tmp_path, {"PYTHONIOENCODING": "gbk"}, "flowrun", *words)
    assert code == 0 and r"- 绿\U0001f34e" in out.decode("gbk")
