"""What tests of whole runs share."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from flowrun import cli

SMALL = (
    "model=emoji_tiny", "data.captions=[red apple,green apple,pear,lemon]", "tracker=[csv]", "sample.prompts=[]",
    "train.log_every=1", "train.batch_size=2",
)  # fmt: skip


class Runs:
    """Commands of the program in a directory of their own, and what they left there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *overrides: str, code: int = 0) -> Path | None:
        """Run `flowrun SMALL... overrides...`; returns the newest train directory, if any. code: the expected exit code."""
        assert cli.main([*SMALL, *overrides]) == code
        return self.newest("train")

    def newest(self, stage: str) -> Path | None:
        found = sorted(
            (self.folder / "outputs" / "runs" / stage).glob("*/*/config.yaml"), key=lambda path: path.stat().st_mtime_ns
        )
        return found[-1].parent if found else None


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWRUN_OUTPUTS", raising=False)
    monkeypatch.delenv("FLOWRUN_RUN_DIR", raising=False)
    return Runs(tmp_path)


def losses(run: Path) -> list[str]:
    """The loss column of metrics.csv as text: equal text is equal bits."""
    with open(run / "metrics.csv", encoding="utf-8") as file:
        return [row["loss"] for row in csv.DictReader(file)]


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny networks are slower on several threads."""
    torch.set_num_threads(1)
