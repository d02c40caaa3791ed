"""A run that is stopped, killed or failed goes on as if nothing had happened."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrun.stages.trainer import Trainer
from tests.conftest import SMALL, Runs, losses, result

STEPS = (
    "train.steps=12",
    "train.checkpoint_every=4",
    "task.caption_dropout=0.3",
    "train.accumulate=2",
    "adapter=lora",
    "adapter.dropout=0.1",
)


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, how: BaseException | None = None) -> None:
    """During update `step` (from 0) the process gets a Ctrl-C, or `how` is raised."""
    original = Trainer.step

    def interrupted(self: Trainer, at: int) -> dict[str, float]:
        if at == step:
            if how is not None:
                raise how
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, at)

    monkeypatch.setattr(Trainer, "step", interrupted)


def test_ctrl_c_saves_and_the_resumed_losses_are_those_of_an_unbroken_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(runs(*STEPS, "run_id=whole"))
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*STEPS, "run_id=broken", "resume=none", code=130)
    assert result(broken)["status"] == "stopped"
    assert (broken / "checkpoints" / "step-000006").is_dir()
    resumed = runs(*STEPS)
    assert resumed == broken
    assert losses(resumed) == whole
    assert result(resumed)["status"] == "finished"


def test_a_killed_run_goes_on_from_its_last_checkpoint_without_doubled_rows(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(runs(*STEPS, "run_id=whole"))
    with monkeypatch.context() as patch:
        stop_at(10, patch, SystemError("the machine is gone"))
        with pytest.raises(SystemError):
            runs(*STEPS, "run_id=killed", "resume=none")
    resumed = runs(*STEPS)
    assert resumed.name == "killed"
    assert losses(resumed) == whole
    with open(resumed / "metrics.csv", encoding="utf-8") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(1, 13)]


def test_a_damaged_newest_checkpoint_is_skipped(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(runs(*STEPS, "run_id=whole"))
    with monkeypatch.context() as patch:
        stop_at(8, patch)
        broken = runs(*STEPS, "run_id=broken", "resume=none", code=130)
    newest = broken / "checkpoints" / "step-000009" / "trained.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert losses(runs(*STEPS)) == whole


def test_a_finished_run_is_not_resumed(runs: Runs) -> None:
    first = runs(*STEPS, "run_id=first")
    second = runs(*STEPS, "run_id=second")
    assert (first.name, second.name) == ("first", "second")
    assert losses(first) == losses(second)


def test_another_rank_is_refused_in_one_line(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*STEPS, "adapter.rank=8", code=130)
    runs(*STEPS, "adapter.rank=4", f"resume={broken}", code=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("flowrun: resume:")
    assert "[8, " in error and "[4, " in error


def test_a_run_that_another_process_holds_is_left_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*STEPS, "run_id=broken", code=130)
    with open(broken / "lock", "a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert runs(*STEPS, "run_id=other").name == "other"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_real_command_saves_and_exits_130(runs: Runs, number: int) -> None:
    command = [sys.executable, "-m", "flowrun", *SMALL, "train.steps=100000", "resume=none"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not ((run := runs.newest("train")) and (run / "metrics.csv").exists() and len(losses(run)) > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "which is saved" in errors
    assert list((run / "checkpoints").glob("step-*"))
