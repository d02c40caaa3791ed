"""The nearest-picture score of a run's samples.   pytest tests/test_nearest.py"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from flowrun import grids, nearest
from flowrun.config import ConfigError
from flowrun.data.emoji import Emoji
from flowrun.registry import SOURCES
from flowrun.sampling import Picture

CAPTIONS = ["red apple", "green apple", "star", "blue circle"]


def drawn(captions: list[str] = CAPTIONS) -> dict[str, torch.Tensor]:
    """caption -> [3, 32, 32] in [-1, 1]."""
    source = Emoji(SOURCES.build("data", Emoji, {"source": "emoji", "size": 32, "captions": captions}))
    return {row.prompt: source.load(row)["image"].float() / 127.5 - 1 for row in source.rows()}


def make_run(folder: Path, samples: list[tuple[str, torch.Tensor]], step: int = 1000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(
        OmegaConf.to_yaml({"seed": 0, "data": {"source": "emoji", "size": 32, "captions": CAPTIONS}})
    )
    grids.save(folder / "samples", step, [Picture(prompt=prompt, seed=0, image=image) for prompt, image in samples])
    return folder


def test_score_of_known_distances() -> None:
    pictures = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None].expand(3, 3, 2, 2)
    samples = torch.tensor([0.1, 0.4, 0.6, 0.9])[:, None, None, None].expand(4, 3, 2, 2)
    found = nearest.score(samples, ["a", "a", "elsewhere", "c"], pictures, ["a", "b", "c"])
    assert found.counted == 3 and found.unknown == ("elsewhere",) and found.missed == (("a", "b"),)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.mse == pytest.approx((0.01 + 0.16 + 0.01) / 3)


def test_of_several_pictures_with_one_caption_the_nearest_counts() -> None:
    pictures = torch.tensor([0.0, 0.4, 1.0])[:, None, None, None].expand(3, 3, 2, 2)
    found = nearest.score(torch.full((1, 3, 2, 2), 0.9), ["a"], pictures, ["a", "b", "a"])
    assert found.accuracy == 1 and found.mse == pytest.approx(0.01)


def test_prompts_that_are_all_unknown_have_no_score() -> None:
    with pytest.raises(ValueError, match="no prompt is a caption"):
        nearest.score(torch.zeros(1, 3, 2, 2), ["x"], torch.zeros(1, 3, 2, 2), ["a"])


def test_the_datas_own_pictures_score_perfectly_and_swapped_ones_do_not(tmp_path: Path) -> None:
    images = drawn()
    perfect = nearest.of_run(make_run(tmp_path / "a", list(images.items())))
    assert perfect.accuracy == 1 and perfect.mse < 1e-5 and perfect.counted == 4
    swapped = [("red apple", images["green apple"]), ("green apple", images["red apple"]), ("star", images["star"])]
    found = nearest.of_run(make_run(tmp_path / "b", swapped))
    assert found.accuracy == pytest.approx(1 / 3)
    assert set(found.missed) == {("red apple", "green apple"), ("green apple", "red apple")}
    between = (images["red apple"] - images["green apple"]).square().mean()
    assert found.mse == pytest.approx(float(2 * between / 3), rel=1e-3)


def test_the_last_step_is_scored_and_the_result_is_saved(tmp_path: Path) -> None:
    images = drawn()
    make_run(tmp_path, [("star", images["red apple"])], step=250)
    make_run(tmp_path, [("star", images["star"]), ("purple star", images["star"])], step=1000)
    assert nearest.of_run(tmp_path).accuracy == 1
    saved = json.loads((tmp_path / "nearest.json").read_text())
    assert (
        saved["samples"] == "step-001000"
        and saved["accuracy"] == 1
        and saved["unknown"] == ["purple star"]
        and saved["counted"] == 1
    )


@pytest.mark.slow
def test_the_command_prints_accuracy_and_mse(tmp_path: Path) -> None:
    images = drawn()
    run = make_run(
        tmp_path / "run", [("star", images["star"]), ("red apple", images["star"]), ("house", images["star"])]
    )
    done = subprocess.run([sys.executable, "-m", "flowrun.nearest", str(run)], capture_output=True, text=True,
                          cwd=Path(__file__).resolve().parents[1])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accuracy 0.500  mse ") and "over 2 samples; 1 more" in done.stdout
    assert "'red apple' is nearest to 'star'" in done.stdout


def test_a_directory_without_samples_config_or_known_prompts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="RUN_DIR: .*absent is no directory"):
        nearest.of_run(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"RUN_DIR: .*empty holds no samples; train with sample.prompts"):
        nearest.of_run(tmp_path / "empty")
    strange = make_run(tmp_path / "strange", [("purple star", torch.zeros(3, 32, 32))])
    with pytest.raises(ConfigError, match="sample.prompts: none of the 1 prompts .* is a caption of the data"):
        nearest.of_run(strange)
    small = make_run(tmp_path / "small", [("star", torch.zeros(3, 16, 16))])
    with pytest.raises(ConfigError, match="data: has no picture of the samples' size 16x16"):
        nearest.of_run(small)
    (strange / "config.yaml").unlink()
    assert nearest.main([str(strange)]) == 2
    assert capsys.readouterr().err == f"flowrun: RUN_DIR: {strange} holds no config.yaml; give the directory of a run\n"
