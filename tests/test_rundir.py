"""Run directories: found again, locked, never written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrun import rundir
from flowrun.compose import compose
from flowrun.config import ConfigError

SMOKE = ["model=emoji_tiny"]

DATA = "a stamp of the rows"


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWRUN_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("FLOWRUN_RUN_DIR", raising=False)
    return tmp_path


def test_the_path_says_stage_task_model_and_id(outputs: Path) -> None:
    run = compose([*SMOKE, "run_id=a"])
    assert rundir.place(run, "train") == outputs / "runs" / "train" / "sft_split-emoji_tiny" / "a"


def test_only_an_unfinished_run_of_the_same_configuration_is_found() -> None:
    first = rundir.open_run(compose([*SMOKE, "run_id=a"]), "train", None, DATA)
    first.close()
    assert rundir.find(compose([*SMOKE, "run_id=b"]), "train", DATA) == first.path
    assert rundir.find(compose([*SMOKE, "run_id=b", "tracker=[csv]", "resume=auto"]), "train", DATA) == first.path
    assert rundir.find(compose([*SMOKE, "run_id=b", "seed=1"]), "train", DATA) is None
    assert rundir.find(compose([*SMOKE, "run_id=b", "resume=none"]), "train", DATA) is None
    assert rundir.find(compose([*SMOKE, "run_id=b"]), "train", "other rows") is None
    first.save_result({"status": "finished"})
    assert rundir.find(compose([*SMOKE, "run_id=b"]), "train", DATA) is None


def test_of_two_unfinished_runs_the_newest_free_one_is_found() -> None:
    old = rundir.open_run(compose([*SMOKE, "run_id=a"]), "train", None, DATA)
    new = rundir.open_run(compose([*SMOKE, "run_id=b"]), "train", None, DATA)
    old.close()
    assert rundir.find(compose([*SMOKE, "run_id=c"]), "train", DATA) == old.path
    new.close()
    assert rundir.find(compose([*SMOKE, "run_id=c"]), "train", DATA) == new.path


def test_a_held_or_finished_directory_is_refused() -> None:
    run = compose([*SMOKE, "run_id=a"])
    opened = rundir.open_run(run, "train", None, DATA)
    with pytest.raises(ConfigError, match="another process is using"):
        rundir.open_run(run, "train", opened.path, DATA)
    opened.save_result({"status": "finished"})
    opened.close()
    with pytest.raises(ConfigError, match="already holds a run"):
        rundir.open_run(run, "train", None, DATA)


def test_resuming_with_other_settings_keeps_the_configuration_before() -> None:
    opened = rundir.open_run(compose([*SMOKE, "run_id=a"]), "train", None, DATA)
    before = (opened.path / "config.yaml").read_text()
    opened.close()
    rundir.open_run(compose([*SMOKE, "run_id=b", "train.steps=30"]), "train", opened.path, DATA).close()
    assert (opened.path / "config-before-b.yaml").read_text() == before
    assert "steps: 30" in (opened.path / "config.yaml").read_text()


def test_a_sweeps_job_is_told_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRUN_RUN_DIR", str(tmp_path / "job"))
    run = compose([*SMOKE, "run_id=a"])
    assert (rundir.place(run, "cache"), rundir.place(run, "train")) == (tmp_path / "job" / "cache", tmp_path / "job")
