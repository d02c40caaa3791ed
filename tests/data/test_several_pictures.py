"""Edits with conditions and preference pairs, from tables and folders.   pytest tests/data/test_several_pictures.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_folder import FIXED, KEEP, by_content
from test_folder import make as folder
from test_table import make as table

from flowrun import cli
from flowrun.config import ConfigError, DataError
from flowrun.contact import contact_sheet
from flowrun.data import Source
from flowrun.variants import Variants
from tests.conftest import SMALL, Runs, losses

EDIT = {"id": None, "caption": "text", "pictures": {"image": "after", "condition_images": "before"}}
PAIR = {"id": None, "caption": "text", "pictures": {"chosen": "good", "rejected": "bad"}}
REDS = [(250, 0, 0), (200, 0, 10), (150, 0, 20)]
GREEN, BLUE = (0, 250, 0), (0, 0, 250)


def flat(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], colour).save(path)
    return path.name


def noisy(path: Path, seed: int, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """A picture of noise at `path`; returns its pixels [3, H, W]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def shown(source: Source) -> set[tuple[int, ...]]:
    sheet = contact_sheet(Variants(source), source.rows())
    return {tuple(pixel) for pixel in np.asarray(sheet).reshape(-1, 3).tolist()}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_cell_may_list_the_condition_pictures(as_text: bool, tmp_path: Path) -> None:
    target, before = noisy(tmp_path / "a.png", 0), [noisy(tmp_path / f"b{n}.png", n + 1) for n in range(3)]
    names = [f"b{n}.png" for n in range(3)]
    path = lines(tmp_path / "t.jsonl", [{"after": "a.png", "before": json.dumps(names) if as_text else names, "text": "x"},
                                        {"after": "b0.png", "before": "a.png", "text": "y"}])  # fmt: skip
    source = table(path, columns=EDIT, geometry=KEEP)
    first, second = source.rows()
    loaded = source.load(first)
    assert torch.equal(loaded["image"], target)
    assert len(loaded["condition_images"]) == 3 and all(map(torch.equal, loaded["condition_images"], before))
    assert torch.equal(source.load(second)["condition_images"], target), "one path gives one picture"


def test_the_order_and_the_bytes_of_listed_pictures_are_in_their_key(tmp_path: Path) -> None:
    for n, colour in enumerate((GREEN, BLUE, REDS[0])):
        flat(tmp_path / f"{n}.png", colour)
    keys = []
    for listed in (["1.png", "2.png"], ["2.png", "1.png"], ["1.png"], "1.png"):
        source = table(lines(tmp_path / "t.jsonl", [{"after": "0.png", "before": listed, "text": "x"}]), columns=EDIT)
        keys.append(source.fingerprints(source.rows()[0], by_content))
    flat(tmp_path / "1.png", REDS[1])
    keys.append(source.fingerprints(source.rows()[0], by_content))
    assert len({key["condition_images"] for key in keys}) == 5 and len({key["image"] for key in keys}) == 1


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([], "line 1: before is [] where paths are needed"),
        (["b.png", None], "line 1: before is None where a path is needed"),
        (["b.png", ""], "line 1: before is empty"),
        (["b.png", "bb.png"], "bb.png does not exist, but there is b.png"),
        ("[b.png", "[b.png does not exist"),
    ],
)
def test_faults_in_a_list_are_named(before: Any, message: str, tmp_path: Path) -> None:
    flat(tmp_path / "a.png", GREEN), flat(tmp_path / "b.png", BLUE)
    with pytest.raises(DataError) as caught:
        table(lines(tmp_path / "t.jsonl", [{"after": "a.png", "before": before, "text": "x"}]), columns=EDIT).rows()
    assert message in str(caught.value)


def test_the_sheet_shows_every_picture_of_a_row(tmp_path: Path) -> None:
    for n, red in enumerate(REDS):
        flat(tmp_path / f"r{n}.png", red)
    flat(tmp_path / "g.png", GREEN)
    path = lines(tmp_path / "t.jsonl", [{"after": "g.png", "before": ["r0.png", "r1.png", "r2.png"], "text": "x"}])
    assert {GREEN, *REDS} <= shown(table(path, columns=EDIT))
    pair = lines(tmp_path / "p.jsonl", [{"good": "g.png", "bad": "r0.png", "text": "x"}])
    assert {GREEN, REDS[0]} <= shown(table(pair, columns=PAIR))


def test_a_second_folder_gives_each_row_its_condition(tmp_path: Path) -> None:
    targets = [noisy(tmp_path / "in" / "x" / f"{n}.png", n) for n in range(2)]
    conditions = [noisy(tmp_path / "before" / "x" / f"{n}.bmp", n + 9) for n in range(2)]
    noisy(tmp_path / "before" / "x" / "of nobody.png", 99)
    for n in range(2):
        (tmp_path / "in" / "x" / f"{n}.txt").write_text(f"edit {n}")
    source = folder(tmp_path / "in", pictures={"condition_image": str(tmp_path / "before")}, geometry=KEEP)
    assert source.names == ("image", "condition_image", "prompt")
    for number, row in enumerate(source.rows()):
        loaded = source.load(row)
        assert (row.id, row.prompt) == (f"x/{number}.png", f"edit {number}")
        assert torch.equal(loaded["image"], targets[number]) and torch.equal(loaded["condition_image"], conditions[number])


def test_a_condition_that_is_not_there_or_there_twice_is_named(tmp_path: Path) -> None:
    for n in range(3):
        flat(tmp_path / "in" / f"{n}.png", GREEN)
        (tmp_path / "in" / f"{n}.txt").write_text("x")
    flat(tmp_path / "before" / "0.png", BLUE), flat(tmp_path / "before" / "1.png", BLUE), flat(tmp_path / "before" / "1.jpg", BLUE)
    source = folder(tmp_path / "in", pictures={"condition_image": str(tmp_path / "before")}, geometry=FIXED, on_error="skip")
    assert [row.id for row in source.rows()] == ["0.png"]
    assert source.skipped == [
        ("1.png", f"there is several pictures, 1.jpg, 1.png, of its name in {tmp_path / 'before'} for condition_image"),
        ("2.png", f"there is no picture of its name in {tmp_path / 'before'} for condition_image"),
    ]
    with pytest.raises(ConfigError, match="data.pictures.condition_image: .* does not exist"):
        folder(tmp_path / "in", pictures={"condition_image": str(tmp_path / "gone")}).rows()
    with pytest.raises(ConfigError, match="data.pictures.image: is the name of what data.path holds"):
        folder(tmp_path / "in", pictures={"image": str(tmp_path / "before")})


@pytest.mark.slow
def test_pairs_and_edits_train_live_and_from_the_cache_alike(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(4):
        noisy(tmp_path / f"a{n}.png", n), noisy(tmp_path / f"b{n}.png", n + 9)
    path = lines(tmp_path / "t.jsonl", [{"after": f"a{n}.png", "before": [f"b{n}.png", "a0.png"], "text": "x"} for n in range(4)])
    run = (*(word for word in SMALL if not word.startswith("data.")), "data=table", f"data.path={path}", "train.steps=4", "resume=none",
           "data.columns.pictures.image=after", "+data.columns.pictures.condition_images=before",
           "model.pipeline=tests.plugins:OfEdits")  # fmt: skip
    assert cli.main([*run, "dry_run=true"]) == 0
    assert "4 rows from table" in capsys.readouterr().out
    found = []
    for splitter in ("none", "replay"):
        assert cli.main([*run, f"task.splitter={splitter}", f"run_id={splitter}"]) == 0
        found.append(losses(runs.newest("train")))
    assert found[0] == found[1] and len(found[0]) == 4
