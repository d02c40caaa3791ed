"""What the README shows works as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrun import cli
from tests.conftest import SMALL, Runs, losses

TEXT = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def block(language: str, holding: str) -> str:
    """The one code block of this language that holds these words."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if holding in text]
    return found


def test_the_loss_of_ones_own_trains_alike_in_one_stage_and_in_two(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs.folder / "huber.py").write_text(block("python", "class Huber"))
    options = runs.folder / "options" / "task"
    options.mkdir(parents=True)
    (options / "huber.yaml").write_text(block("yaml", "huber:Huber"))
    monkeypatch.syspath_prepend(str(runs.folder))
    found = []
    for splitter in ("replay", "none"):
        command = ["--config-dir", "options", "task=huber", f"task.splitter={splitter}", *SMALL, "train.steps=3"]
        assert cli.main(command) == 0
        found.append(losses(runs.newest("train")))
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_the_python_example_makes_a_plan(runs: Runs) -> None:
    names: dict = {}
    exec(block("python", "from flowrun.run import assemble").replace("print(assembly.plan)", ""), names)
    assert "flowrun sft_split on emoji_tiny" in str(names["assembly"].plan)
