"""Training needs the cache, not the pictures it was made from."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from flowrun import cli
from flowrun.cache import Cache
from flowrun.cache.manifest import Manifest
from flowrun.shelf import Job
from flowrun.stages.cache import _Filler
from tests.conftest import SMALL, Runs, losses

FOLDER = ("data=folder", "data.path=pictures", "train.steps=6", "task.caption_dropout=0.3")


@pytest.fixture
def pictures(runs: Runs) -> Path:
    folder = runs.folder / "pictures"
    (folder / "more").mkdir(parents=True)
    for name, colour in (("a", "red"), ("b", "green"), ("more/a", "blue")):
        Image.new("RGB", (40, 50), colour).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"{colour} card", encoding="utf-8")
    return folder


def command(*overrides: str) -> int:
    return cli.main([*(text for text in SMALL if not text.startswith("data.")), *FOLDER, *overrides])


def test_training_goes_on_from_the_manifest_with_the_same_losses(
    runs: Runs, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    before = losses(runs.newest("train"))
    shutil.rmtree(pictures)
    capsys.readouterr()
    assert command("resume=none", "run_id=without") == 0
    assert losses(runs.newest("train")) == before
    assert "the data are gone" in (runs.newest("train") / "plan.txt").read_text()


def test_other_settings_than_the_caches_are_refused_with_both_values(
    runs: Runs, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("stage=cache") == 0
    shutil.rmtree(pictures)
    assert command("data.geometry.size=[64,64]") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "[32, 32]" in line and "[64, 64]" in line


def test_another_folder_that_is_not_there_is_a_mistake_and_not_gone_data(
    runs: Runs, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    capsys.readouterr()
    assert command("data.path=pictuers", "resume=none", "run_id=typo") == 2
    assert "data.path" in capsys.readouterr().err and runs.newest("train").name != "typo"


def test_without_a_cache_the_missing_folder_is_the_error(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 2
    assert "data.path" in capsys.readouterr().err


@pytest.mark.slow
def test_pruning_keeps_everything_that_a_manifest_needs(runs: Runs, pictures: Path) -> None:
    assert command("sample.prompts=[a purple card]", "stage=cache") == 0
    Cache(runs.folder / "outputs" / "cache").prune()
    assert command("sample.prompts=[a purple card]", "stage=train", "train.steps=2") == 0


def test_what_a_stopped_run_has_made_is_not_pruned(runs: Runs, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def stop_after_two(filler: _Filler, jobs: Sequence[Job]) -> None:
        make(filler, jobs)
        made.extend(jobs)
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    make = _Filler.make
    with monkeypatch.context() as patched:
        patched.setattr(_Filler, "make", stop_after_two)
        assert command("stage=cache") == 130
    cache = Cache(runs.folder / "outputs" / "cache")
    there = cache.stats().values
    assert len(made) == 2 and there > 0
    assert cache.prune(superseded=True).values == 0 and cache.stats().values == there and cache.verify() == []
    assert command("stage=cache") == 0
    assert cache.stats().manifests == 1 and cache.stats().values > there and cache.verify() == []


def test_values_that_others_made_are_needed_by_the_run_that_found_them(runs: Runs, pictures: Path) -> None:
    assert command() == 0
    before = losses(runs.newest("train"))
    shutil.copytree(pictures, runs.folder / "copy")
    assert command("data.path=copy", "resume=none", "run_id=copy") == 0
    for file in (runs.folder / "outputs" / "cache" / "manifests").iterdir():
        if Manifest(file).parts.place == str(pictures):
            file.unlink()
    Cache(runs.folder / "outputs" / "cache").prune(superseded=True)
    shutil.rmtree(runs.folder / "copy")
    assert command("data.path=copy", "resume=none", "run_id=gone") == 0
    assert losses(runs.newest("train")) == before


def test_a_manifest_that_says_the_same_is_not_written_again(runs: Runs, pictures: Path) -> None:
    assert command() == 0
    (file,) = (runs.folder / "outputs" / "cache" / "manifests").iterdir()
    written = file.stat().st_mtime_ns
    assert command("resume=none", "run_id=again") == 0
    assert file.stat().st_mtime_ns == written
    (pictures / "a.png").unlink()
    assert command("resume=none", "run_id=fewer") == 0
    assert "a.png" not in Manifest(file).ids.all() and "b.png" in Manifest(file).ids.all()
