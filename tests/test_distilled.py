"""From a trained run to pairs, from pairs to a student, and the comparison of both: the whole way on a tiny network."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowrun import cli, distilled, teacher
from flowrun.grids import to_image
from flowrun.run import assemble
from tests.conftest import SMALL, Runs, losses

pytestmark = pytest.mark.slow

PROMPTS = ("red apple", "green apple", "pear", "lemon")


@pytest.fixture
def trained(runs: Runs) -> Path:
    """A run of two updates that has drawn one picture with guidance."""
    return runs("train.steps=2", "sample.prompts=[pear]", "sample.seeds=[5]", "sample.steps=3", "sample.guidance=1.5")


def pairs_of(run: Path, *words: str) -> Path:
    folder = run.parents[3] / "pairs"
    assert teacher.main([str(run), str(folder), *words]) == 0
    return folder


def distil(runs: Runs, *words: str, code: int = 0) -> Path | None:
    """Run on a teacher's pairs. The pairs choose the captions, so those of SMALL are left out."""
    assert cli.main([*(word for word in SMALL if not word.startswith("data.")), "data=teacher", *words]) == code
    return runs.newest("train")


def student(runs: Runs, run: Path, folder: Path, *words: str) -> Path:
    return distil(runs, "task=distill_split", f"data.path={folder}", f"model.weights={run}", "train.steps=3", *words)


def test_a_pair_is_the_noise_and_the_end_of_the_walk_that_the_run_itself_took(trained: Path) -> None:
    folder = pairs_of(trained, "--seeds", "5")
    with open(folder / "rows.csv", newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["prompt"], row["seed"]) for row in rows] == [(prompt, "5") for prompt in PROMPTS]
    pair = load_file(folder / f"{rows[2]['id']}.safetensors")
    pipeline = assemble(SMALL).pipeline
    drawn = np.array(to_image(pipeline.decode(pair["latents"][None])[0]))
    (sample,) = (trained / "samples" / "step-000002").glob("*.png")
    assert np.array_equal(drawn, np.array(Image.open(sample)))
    assert pair["noise"].dtype == torch.float32 and 0.8 < float(pair["noise"].std()) < 1.2


def test_pairs_that_are_there_are_kept_and_others_are_not_mixed_in(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pairs_of(trained, "--seeds", "0")
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    pairs_of(trained, "--seeds", "0", "1")
    after = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(before) == 4 and len(after) == 8 and before.items() <= after.items()
    capsys.readouterr()
    assert teacher.main([str(trained), str(folder), "--steps", "2"]) == 2
    assert "was made otherwise (steps: 3, now 2)" in capsys.readouterr().err


def test_two_stages_distil_as_one_does(runs: Runs, trained: Path) -> None:
    folder, curves = pairs_of(trained), []
    for guidance in ("task.guidance=1.0", "task.guidance=3.0"):
        split = losses(student(runs, trained, folder, guidance))
        assert split == losses(student(runs, trained, folder, guidance, "task.splitter=none")) and len(set(split)) == 3
        curves.append(split)
    assert curves[0] != curves[1]


@pytest.mark.parametrize("noise", ["frozen", "per_epoch"])
def test_noise_without_a_teacher_is_drawn_by_a_unit_alike_in_both(runs: Runs, noise: str) -> None:
    settings = (f"task.noise={noise}", "train.steps=3")
    split, whole = (losses(runs(f"task={task}", *settings)) for task in ("distill_split", "distill"))
    assert split == whole


@pytest.mark.parametrize("guidance", ["1.0", "1.5"])
def test_a_student_with_its_teachers_steps_and_weights_starts_without_loss(runs: Runs, trained: Path, guidance: str) -> None:
    folder = pairs_of(trained, "--guidance", guidance)
    run = student(runs, trained, folder, "task.steps=3", "train.batch_size=4", f"task.guidance={guidance}")
    assert float(losses(run)[0]) < 1e-10


def test_data_without_pairs_are_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("task=distill_split", code=2)
    distil(runs, "task=distill_split", code=2)
    pictures, nothing = capsys.readouterr().err.strip().splitlines()
    assert "data.source: the data give image, prompt, and not teacher_latents, teacher_noise" in pictures
    assert "data.path: names no folder" in nothing and "python -m flowrun.teacher" in nothing


def test_damaged_and_incomplete_pairs_are_named(
    runs: Runs, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, said = pairs_of(trained), []
    table = folder / "rows.csv"
    (folder / "000001.safetensors").rename(folder / "gone")
    for change in (lambda: None, lambda: table.write_text(table.read_text().replace("seed", "sed", 1))):
        change()
        capsys.readouterr()
        distil(runs, "task=distill_split", f"data.path={folder}", code=2)
        said.append(capsys.readouterr().err)
    assert "row 000001: there is no" in said[0] and "has no column seed" in said[1]


def test_the_comparison_is_printed_and_saved(
    runs: Runs, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = student(runs, trained, pairs_of(trained))
    capsys.readouterr()
    assert distilled.main([str(run), str(trained), "--seeds", "7", "8"]) == 0
    told, saved = capsys.readouterr().out, json.loads((run / "distilled.json").read_text())
    assert saved["pictures"] == 8 and saved["reference_steps"] == 3 and saved["seeds"] == [7, 8]
    assert f"{saved['gain']['mean']:.4f} +- {saved['gain']['error']:.4f}" in told
    assert distilled.main([str(trained), str(trained)]) == 2


def test_the_gain_is_the_paired_difference_with_its_standard_error() -> None:
    reference = torch.zeros(4, 3, 2, 2)
    ours, theirs = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, 5.0, 5.0])  # squared errors
    wide = [errors.sqrt()[:, None, None, None].expand(4, 3, 2, 2) for errors in (ours, theirs)]
    found = distilled.gain(*wide, reference)
    assert (found.student, found.teacher, found.mean) == pytest.approx((2.5, 3.5, 1.0))
    assert found.error == pytest.approx((2 / 3) ** 0.5 / 2)  # differences 1, 0, 2, 1: variance 2/3
