"""An update is what was asked for: so many, each over so many rows, each row counting alike.   pytest tests/stages/test_updates.py"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrun.algorithms import StepOut
from flowrun.algorithms.sft import Sft
from flowrun.dist import Dist
from flowrun.pipelines import Pipeline
from tests.conftest import Runs

CAPTIONS = "data.captions=[red apple,green apple,pear,lemon,tangerine,strawberry,banana,cherries,grapes,watermelon]"


def column(run: Path, name: str) -> list[float]:
    with open(run / "metrics.csv", encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 5), (16, 3)])
def test_so_many_updates_are_done_as_are_asked_for_whatever_is_accumulated(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, accumulate: int, steps: int
) -> None:
    losses, updates, loss, step = [], [], Sft.loss, Dist.step
    monkeypatch.setattr(Sft, "loss", lambda self, *given: losses.append(1) or loss(self, *given))
    monkeypatch.setattr(Dist, "step", lambda self, optimizer: updates.append(len(losses)) or step(self, optimizer))
    run = runs(f"train.accumulate={accumulate}", f"train.steps={steps}", "train.batch_size=1")
    assert updates == [accumulate * (n + 1) for n in range(steps)]
    assert column(run, "step") == list(range(1, steps + 1))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps:06d}"]


def of_brightness(self: Sft, pipeline: Pipeline, batch: dict[str, Tensor], generator: torch.Generator) -> StepOut:
    """A loss without draws: its value and gradient depend on the row alone, so means over any rows are known."""
    weight = next(pipeline.models["transformer"].parameters())
    brightness = batch["target_latents"].flatten(1).mean(1)  # [B]
    per_row = brightness * (1 + weight.sum() - weight.sum().detach())
    return StepOut(per_row.mean(), per_row.detach())


@pytest.mark.slow
def test_each_row_of_an_epoch_counts_alike_however_it_is_cut_into_batches(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 rows: the last batch of an epoch is short in three of the cases."""
    monkeypatch.setattr(Sft, "loss", of_brightness)
    shared = ("task.caption_dropout=0", "train.steps=null", "train.epochs=2", "optimizer=sgd", "optimizer.lr=1e-12",
              "optimizer.clip=1e9")  # fmt: skip
    cuts = [(10, 1), (4, 3), (3, 4), (6, 2), (1, 10)]
    found = [runs(CAPTIONS, *shared, f"train.batch_size={b}", f"train.accumulate={a}") for b, a in cuts]
    for name in ("loss", "grad_norm"):
        whole = column(found[0], name)
        assert len(whole) == 2 and whole[0] > 0
        assert all(column(run, name) == pytest.approx(whole, rel=1e-5) for run in found), name
