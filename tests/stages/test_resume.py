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
import torch
from PIL import Image
from safetensors.torch import load_file

from flowrun import cli
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
    whole = runs(*STEPS, "run_id=whole")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*STEPS, "run_id=broken", "resume=none", code=130)
    assert result(broken)["status"] == "stopped"
    assert (broken / "checkpoints" / "step-000006").is_dir()
    resumed = runs(*STEPS)
    assert resumed == broken
    assert losses(resumed) == losses(whole)
    assert result(resumed)["status"] == "finished"
    weights = [run / "model" / "pytorch_lora_weights.safetensors" for run in (resumed, whole)]
    ours, theirs = (load_file(path) for path in weights)  # averaged over all updates
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("remainder", [pytest.param("repeat", marks=pytest.mark.slow), "drop"])
def test_rows_that_fill_no_batch_are_the_same_after_a_stop(remainder: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows in batches of 3: two an epoch, of which one is filled, or one."""
    few = ("train.steps=6", "train.batch_size=3", f"train.remainder={remainder}", "resume=none", "task.caption_dropout=0.3")
    whole = losses(runs(*few, "run_id=whole"))
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        broken = runs(*few, "run_id=broken", code=130)
    assert losses(runs(*few[:3], *few[4:], f"resume={broken}")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lokr", "loha"])
def test_products_go_on_bit_for_bit_from_any_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    settings = (*STEPS, f"adapter.variant={variant}", "adapter.dropout=0", "train.steps=8")
    whole = runs(*settings, "run_id=whole")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*settings, "run_id=broken", "resume=none", code=130)
    resumed = runs(*settings)
    assert resumed == broken and losses(resumed) == losses(whole)
    weights = [run / "model" / "peft" / "transformer" / "adapter_model.safetensors" for run in (resumed, whole)]
    ours, theirs = (load_file(path) for path in weights)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "change", ["optimizer=sgd", *(pytest.param(text, marks=pytest.mark.slow) for text in ("optimizer.ema=0", "adapter.rank=4"))]
)
def test_a_refused_resumption_leaves_the_run_as_it_was(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    settings = (*STEPS, "optimizer.ema=0.9")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*settings, code=130)
    before = {name: (broken / name).read_bytes() for name in ("config.yaml", "identity", "plan.txt", "result.json")}
    words = [word for word in settings if change != "optimizer=sgd" or not word.startswith("optimizer")]
    runs(*words, change, f"resume={broken}", code=2)
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("flowrun: resume: ")
    assert {name: (broken / name).read_bytes() for name in before} == before
    assert losses(runs(*settings)) and runs.newest("train") == broken


@pytest.mark.slow
def test_a_finished_run_goes_on_only_when_more_steps_are_asked_for(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    done = runs(*STEPS)
    before = (done / "result.json").read_bytes()
    for steps in (12, 8):
        runs(*STEPS, f"train.steps={steps}", f"resume={done}", code=2)
        assert "is finished after 12 steps" in capsys.readouterr().err
    assert (done / "result.json").read_bytes() == before
    assert len(losses(runs(*STEPS, "train.steps=14", f"resume={done}"))) == 14


def test_a_cache_run_is_not_resumed(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("stage=cache")
    runs(*STEPS, f"resume={runs.newest('cache')}", code=2)
    assert "holds no training run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_other_rows_is_another_run(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    words = [word for word in SMALL if not word.startswith("data.")]
    command = [*words, "data=folder", f"data.path={pictures}", *STEPS]
    for name in "abc":
        Image.new("RGB", (32, 32), "red" if name == "a" else "blue").save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(name)
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        assert cli.main([*command, "run_id=first"]) == 130
    (pictures / "b.txt").write_text("another caption")
    assert cli.main([*command, "run_id=second"]) == 0
    assert runs.newest("train").name == "second" and result(runs.newest("train"))["status"] == "finished"


@pytest.mark.slow
def test_the_picture_of_the_step_at_which_a_run_stopped_is_drawn_when_it_goes_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*STEPS, "sample.prompts=[pear]", "sample.every=3", "sample.steps=1")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        runs(*words, code=130)
    grids = {path.name for path in (runs(*words) / "samples").glob("*.png")}
    assert grids == {f"step-{step:06d}.png" for step in (0, 3, 6, 9, 12)}


def test_a_run_that_another_process_holds_is_left_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with monkeypatch.context() as patch:
        stop_at(5, patch)
        broken = runs(*STEPS, "run_id=broken", code=130)
    with open(broken / "lock", "a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert runs(*STEPS, "run_id=other").name == "other"


@pytest.mark.slow
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
