"""Gains of rewards, picture by picture: against a paired t computation by hand, and on folders of drawn pictures."""

import csv
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrun.compose import compose
from flowrun.config import ConfigError
from flowrun.raised import compared, main, raised


def test_the_error_is_that_of_paired_differences():
    before, after = torch.tensor([0.1, 0.5, 0.9, 0.3]), torch.tensor([0.2, 0.7, 0.9, 0.6])
    found = compared(before, after)
    differences = [0.1, 0.2, 0.0, 0.3]
    mean = sum(differences) / 4
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert (found.before, found.after, found.pictures) == (pytest.approx(0.45), pytest.approx(0.6), 4)
    assert found.gain == pytest.approx(0.15) and found.error == pytest.approx(spread / 2)


def test_pairs_without_a_score_are_left_out():
    found = compared(torch.tensor([0.1, math.nan, 0.3]), torch.tensor([0.2, 0.9, 0.5]))
    assert found.pictures == 2 and found.gain == pytest.approx(0.15)


def saved(folder: Path, steps: dict[int, list[tuple[int, int, int]]], prompts=("red apple", "pear"), reward="reward=[red]") -> Path:
    """A run's directory: at each step, a plain picture of a colour for each prompt."""
    from omegaconf import OmegaConf

    run = compose(["task=nft", "model=emoji_tiny", "adapter=lora", reward])
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(run)))
    for step, colours in steps.items():
        place = folder / "samples" / f"step-{step:06d}"
        place.mkdir(parents=True)
        with open(place / "samples.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("file", "prompt", "seed"))
            for i, (colour, prompt) in enumerate(zip(colours, prompts, strict=False)):
                Image.new("RGB", (32, 32), colour).save(place / f"{i:03d}.png")
                table.writerow((f"{i:03d}.png", prompt, 0))
    return folder


def test_the_first_and_the_last_samples_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = saved(tmp_path / "run", {0: [(0, 0, 0), (255, 255, 255)], 2: [(9, 9, 9)] * 2, 10: [(255, 0, 0), (255, 0, 0)]})
    found = raised(run)["red"]
    assert (found.before, found.after, found.pictures) == (pytest.approx(0.0), pytest.approx(1.0), 2)
    assert main([str(run)]) == 0
    assert "+1.0000 +- 0.0000" in capsys.readouterr().out and (run / "raised.json").is_file()


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 steps of samples"):
        raised(saved(tmp_path / "one", {0: [(0, 0, 0)]}))
    other = saved(tmp_path / "other", {0: [(0, 0, 0), (1, 1, 1)], 2: [(0, 0, 0)]})
    with pytest.raises(ConfigError, match="other prompts"):
        raised(other)
    with pytest.raises(ConfigError, match="no rewards"):
        raised(saved(tmp_path / "none", {0: [(0, 0, 0)], 1: [(0, 0, 0)]}, reward="reward=[]"))


def test_curves_hold_every_epoch_at_which_samples_were_scored(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = [saved(tmp_path / name, {0: [(0, 0, 0)] * 2, 8: [(255, 0, 0)] * 2}) for name in ("a", "b")]
    for run, end in zip(runs, (0.5, 0.75), strict=True):
        (run / "metrics.csv").write_text(f"step,epoch,reward/red,samples/red\n0,,,0.25\n4,1.0,0.3,\n8,2.0,0.4,{end}\n")
    assert main([*map(str, runs), "--curves", str(tmp_path / "new" / "curves.csv")]) == 0
    lines = [f"nft,0,{epoch},red,{mean}" for end in (0.5, 0.75) for epoch, mean in ((0.0, 0.25), (2.0, end))]
    assert (tmp_path / "new" / "curves.csv").read_text().splitlines() == ["task,seed,epoch,reward,mean", *lines]
    (runs[1] / "metrics.csv").write_text("step,epoch,reward/red\n4,1.0,0.3\n")
    assert main([*map(str, runs), "--curves", str(tmp_path / "other.csv")]) == 2
    assert "drew no samples" in capsys.readouterr().err and not (tmp_path / "other.csv").exists()
    (runs[1] / "metrics.csv").unlink()
    assert main([*map(str, runs), "--curves", str(tmp_path / "other.csv")]) == 2 and "no metrics.csv" in capsys.readouterr().err
