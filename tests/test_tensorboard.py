"""Event files as TensorBoard's own reader reads them: curves, grids and texts, through kills and resumption; never fatal."""

from __future__ import annotations

import csv
import itertools
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flowrun.stages.trainer import Trainer
from flowrun.tracking import Tracked, Trackers, choose
from tests.conftest import Runs

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

CHOICE = {"tensorboard": {}}


@pytest.fixture(autouse=True)
def later_files_have_later_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in the order of their names, which start with the second; here several are opened in one."""
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: float(next(seconds))))


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 3), dtype=np.uint8)  # [H, W, 3]
    Image.fromarray(pixels).save(tmp_path / "grid.png")
    return tmp_path / "grid.png"


def opened(folder: Path, start: int = 0) -> Trackers:
    run = Tracked(directory=folder, stage="train", config={"seed": 7, "train": {"steps": 5}}, plan="flowrun  *plan*\n  rows", start=start)
    return Trackers(choose(CHOICE), run)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return found.Reload()


def points(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def text(folder: Path, name: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in read(folder).Tensors(f"{name}/text_summary")]


def test_curves_pictures_and_texts_are_read_back(tmp_path: Path, grid: Path) -> None:
    trackers = opened(tmp_path)
    trackers.pictures(0, grid)
    trackers.log(10, {"loss": 0.1 + 0.2, "lr": 1e-4})
    trackers.log(20, {"loss": 0.25, "lr": 5e-5, "count": 3})
    trackers.summary({"steps": 20, "weights": ["model/x"]})
    trackers.close()
    assert points(tmp_path) == [(10, float(np.float32(0.1 + 0.2))), (20, 0.25)]
    assert points(tmp_path, "lr") == [(10, float(np.float32(1e-4))), (20, float(np.float32(5e-5)))]
    assert points(tmp_path, "count") == [(20, 3.0)]
    (image,) = read(tmp_path).Images("samples")
    (tmp_path / "again.png").write_bytes(image.encoded_image_string)
    assert image.step == 0 and np.array_equal(np.asarray(Image.open(tmp_path / "again.png")), np.asarray(Image.open(grid)))
    assert text(tmp_path, "plan") == [(0, "    flowrun  *plan*\n      rows")], "indented: shown as it is, not as Markdown"
    assert "    seed: 7\n    train:\n      steps: 5" in text(tmp_path, "config")[0][1]
    assert text(tmp_path, "result") == [(20, "    steps: 20\n    weights:\n    - model/x\n")]


def test_a_resumed_run_goes_on_without_doubled_points(tmp_path: Path, grid: Path) -> None:
    trackers = opened(tmp_path)
    for step in (10, 20, 30):
        trackers.log(step, {"loss": step / 10})
        trackers.pictures(step, grid)
    trackers.close()
    trackers = opened(tmp_path, start=20)
    trackers.log(30, {"loss": 9.0})
    trackers.pictures(30, grid)
    trackers.log(40, {"loss": 4.0})
    trackers.close()
    assert points(tmp_path) == [(10, 1.0), (20, 2.0), (30, 9.0), (40, 4.0)]
    assert [image.step for image in read(tmp_path).Images("samples")] == [10, 20, 30]
    assert [step for step, _ in text(tmp_path, "plan")] == [0], "told once"


def test_a_run_that_begins_again_drops_all_that_was_there(tmp_path: Path, grid: Path) -> None:
    for _ in range(2):
        trackers = opened(tmp_path)
        trackers.pictures(0, grid)
        trackers.log(1, {"loss": 1.0})
        trackers.close()
    assert points(tmp_path) == [(1, 1.0)]
    assert [image.step for image in read(tmp_path).Images("samples")] == [0]
    assert [step for step, _ in text(tmp_path, "plan")] == [0]


def test_a_tracker_chosen_on_resuming_has_the_plan(tmp_path: Path) -> None:
    opened(tmp_path, start=20).close()
    assert [step for step, _ in text(tmp_path, "plan")] == [20]


def test_a_killed_run_lacks_nothing_and_its_cut_last_event_is_none(tmp_path: Path) -> None:
    trackers = opened(tmp_path)
    trackers.log(10, {"loss": 1.0})
    trackers.log(20, {"loss": 2.0})
    assert points(tmp_path) == [(10, 1.0), (20, 2.0)], "on disk although nothing was closed"
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    trackers = opened(tmp_path, start=10)
    trackers.log(20, {"loss": 5.0})
    assert points(tmp_path) == [(10, 1.0), (20, 5.0)]


def test_a_missing_package_is_one_line_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    trackers = opened(tmp_path)
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    assert "tracker tensorboard is off" in caplog.text and "tensorboard is missing" in caplog.text
    assert "pip install 'flowrun[tensorboard]'" in caplog.text
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "tensorboard").exists()


def test_a_full_disk_turns_it_off_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's thread, which writes, ends by this error
    before = set(threading.enumerate())
    trackers = opened(tmp_path)
    threads = set(threading.enumerate()) - before
    (file,) = (tmp_path / "tensorboard").iterdir()
    os.replace(file, tmp_path / "kept")
    file.symlink_to("/dev/full")
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    for thread in threads:
        thread.join(timeout=60)
    assert caplog.text.count("tracker tensorboard is off") == 1 and "No space left" in caplog.text
    with open(tmp_path / "metrics.csv") as lines:
        assert len(list(csv.DictReader(lines))) == 3


def test_a_killed_and_resumed_run_has_the_points_of_its_metrics(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("tracker=[csv,tensorboard]", "train.steps=8", "train.checkpoint_every=3", "sample.prompts=[pear]",
                "sample.every=2", "sample.steps=2", "adapter=lora")  # fmt: skip
    step = Trainer.step

    def killed(self: Trainer, at: int) -> dict[str, float]:
        if at == 7:
            raise SystemError("the machine is gone")
        return step(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(SystemError):
            runs(*settings)
    run = runs(*settings)
    assert len(list((run / "tensorboard").iterdir())) == 2, "the same run, opened twice"
    with open(run / "metrics.csv") as file:
        wanted = [(int(row["step"]), float(np.float32(row["loss"]))) for row in csv.DictReader(file)]
    assert points(run) == wanted and [at for at, _ in wanted] == list(range(1, 9))
    assert [image.step for image in read(run).Images("samples")] == [0, 2, 4, 6, 8]
    assert text(run, "plan")[0][1].strip().startswith("flowrun sft_split on emoji_tiny")
    assert "status" not in text(run, "result")[0][1] and "loss_mean" in text(run, "result")[0][1]
