"""Every caption trains with its own picture, however rows are shuffled, batched and stored.   pytest tests/stages/test_pairing.py"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor
from torch import Tensor

from flowrun import cli
from flowrun.algorithms.sft import Sft
from flowrun.pipelines import Pipeline
from flowrun.pipelines._minilm import MiniLM, folder
from tests.conftest import SMALL, Runs

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "purple")
SETTINGS = (*(text for text in SMALL if not text.startswith("data.")), "task.caption_dropout=0", "train.steps=8")


def add(path: Path, colour: str, wide: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (48, 32) if wide else (32, 32), colour).save(path)
    path.with_suffix(".txt").write_text(colour)


@pytest.fixture(scope="module")
def embeddings() -> dict[str, Tensor]:
    """Colour -> the encoder's states of its name, the first two tokens."""
    encoder = MiniLM(folder()).eval()
    with torch.no_grad():
        return {colour: encoder(colour)[:2] for colour in COLOURS}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, embeddings: dict[str, Tensor]) -> list[tuple[str, str]]:
    """(colour of the picture, colour in the caption) of every row that the loss gets from now on."""
    found, loss = [], Sft.loss

    def looked_at(self: Sft, pipeline: Pipeline, batch: dict[str, Tensor], generator: torch.Generator) -> object:
        pixels = (pipeline.decode(batch["target_latents"]).mean((2, 3)) + 1) * 127.5  # [B, 3]
        for colour, text in zip(pixels, batch["prompt_embeds"], strict=True):
            shown = min(COLOURS, key=lambda c: sum((colour[i] - ImageColor.getrgb(c)[i]) ** 2 for i in range(3)))
            said = min(COLOURS, key=lambda c: (text[:2] - embeddings[c]).norm())
            found.append((shown, said))
        return loss(self, pipeline, batch, generator)

    monkeypatch.setattr(Sft, "loss", looked_at)
    return found


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        ("folder", ["train.batch_size=1"]),
        ("folder", ["train.batch_size=3", "seed=1"]),
        ("folder", ["train.batch_size=16", "train.repeat=3", "train.accumulate=2"]),
        ("folder", ["train.batch_size=2", "cache.batch=3", "cache.flush_mb=0.01"]),
        ("folder", ["train.batch_size=2", "model.pipeline=tests.plugins:FrozenJitter"]),
        ("folder", ["train.batch_size=2", "model.pipeline=tests.plugins:Jittered"]),
        ("folder", ["train.batch_size=2", "task=sft", "task.caption_dropout=0"]),
        ("table", ["train.batch_size=2", "seed=2"]),
    ],
)
def test_every_row_has_its_own_caption_and_picture(
    runs: Runs, seen: list[tuple[str, str]], source: str, overrides: list[str]
) -> None:
    """Two shapes, so that rows of neighbouring numbers lie in different batches."""
    for i, colour in enumerate(COLOURS):
        add(runs.folder / "pictures" / f"{'x' if i % 3 else 'y'}/{i % 4}{i}.png", colour, wide=i % 2 == 0)
    data = ["data=folder", "data.path=pictures"] if source == "folder" else table(runs.folder / "pictures")
    shape = ["data.geometry.mode=keep", "data.geometry.size=null"]
    assert cli.main([*SETTINGS, *data, *shape, *overrides]) == 0
    assert {shown for shown, _ in seen} == set(COLOURS), "each was seen"
    assert all(shown == said for shown, said in seen)


def table(pictures: Path) -> list[str]:
    """Lines in no order."""
    rows = [(path.relative_to(pictures).as_posix(), path.with_suffix(".txt").read_text()) for path in sorted(pictures.rglob("*.png"))]
    random.Random(0).shuffle(rows)
    with open(pictures / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), *rows])
    return ["data=table", "data.path=pictures/t.csv"]


def test_rows_that_are_added_between_two_runs_do_not_shift_the_others(runs: Runs, seen: list[tuple[str, str]]) -> None:
    for number, colours in enumerate((COLOURS[3:], COLOURS[:3])):  # the new ones come first by name
        for i, colour in enumerate(colours):
            add(runs.folder / "pictures" / f"{1 - number}{i}.png", colour, wide=False)
        seen.clear()
        assert cli.main([*SETTINGS, "data=folder", "data.path=pictures"]) == 0
        assert all(shown == said for shown, said in seen)
    assert {shown for shown, _ in seen} == set(COLOURS)
