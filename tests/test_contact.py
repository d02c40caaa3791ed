"""The contact sheet shows rows as the model sees them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrun import cli
from flowrun.contact import SHOWN, contact_sheet
from flowrun.data import Row, Source
from flowrun.data.folder import Folder
from flowrun.registry import SOURCES
from flowrun.variants import Variants
from tests.conftest import SMALL, Runs

GEOMETRY = {"mode": "keep", "size": None, "multiple_of": 8, "max_area": None, "area": None, "max_aspect": None, "upscale": None}
TAGS = {"several": "rows", "shuffle": False, "drop": 0.0, "keep": 1, "separator": ","}


def folder(path: Path, geometry: dict = GEOMETRY, **augment: object) -> Folder:
    node = {"source": "folder", "path": str(path), "on_error": "stop", "pictures": {}, "check": "headers", "max_pixels": 10_000_000,
            "ground": [255, 255, 255], "geometry": geometry, "caption": {"file": "txt", "field": "x", "lines": "whole"},
            "augment": {"variants": 1, "flip": 0.0, "crop": False, "caption": TAGS, **augment}}  # fmt: skip
    return Folder(SOURCES.build("data", Folder, node))


def add(path: Path, picture: Image.Image) -> None:
    picture.save(path)
    path.with_suffix(".txt").write_text(path.stem)


def colours(sheet: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in np.asarray(sheet).reshape(-1, 3).tolist()}


@pytest.mark.slow
def test_every_row_of_a_small_data_set_is_shown_and_large_ones_are_spread(tmp_path: Path) -> None:
    wanted = [(n * 20, 255 - n * 20, 7) for n in range(10)]
    for n, colour in enumerate(wanted):
        add(tmp_path / f"{n}.png", Image.new("RGB", (16, 16) if n % 2 else (16, 24), colour))
    source = folder(tmp_path)
    assert set(wanted) <= colours(contact_sheet(Variants(source), source.rows()))
    many = contact_sheet(Variants(source), source.rows() * 50)
    assert set(wanted) <= colours(many)
    assert many.height < 2 * (SHOWN // 8) * 200


def test_large_pictures_are_made_small_and_variants_are_shown(tmp_path: Path) -> None:
    half = Image.new("RGB", (2000, 1000), "white")
    half.paste("red", (0, 0, 1000, 1000))
    for n in range(8):
        add(tmp_path / f"{n}.png", half)
    source = folder(tmp_path, variants=8, flip=0.5)
    sheet = contact_sheet(Variants(source), source.rows())
    assert sheet.width < 1200
    pixels = np.asarray(sheet)
    left = [pixels[40, 4 + n * (128 + 4) + 10].tolist() for n in range(8)]
    assert {tuple(pixel) for pixel in left} == {(255, 0, 0), (255, 255, 255)}, "some are mirrored"


def test_a_photo_taken_sideways_is_a_portrait_in_a_portraits_bucket_and_shown_upright(tmp_path: Path) -> None:
    lying, exif = Image.new("RGB", (40, 20), "red"), Image.Exif()
    lying.paste("blue", (0, 0, 20, 20))
    exif[0x0112] = 6  # its left is the top
    add(tmp_path / "a.png", lying)
    lying.save(tmp_path / "a.png", exif=exif)
    buckets = {**GEOMETRY, "mode": "buckets", "area": 40 * 20, "max_aspect": 2.0, "upscale": False, "multiple_of": 4}
    source = folder(tmp_path, geometry=buckets)
    assert [row.size for row in source.rows()] == [(40, 20)]
    pixels = np.asarray(contact_sheet(Variants(source), source.rows()))
    where = {name: np.argwhere((pixels == colour).all(-1))[:, 0] for name, colour in (("top", (0, 0, 255)), ("end", (255, 0, 0)))}
    assert where["top"].max() < where["end"].min()


def test_what_cannot_be_read_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(tmp_path / "good.png", Image.new("RGB", (32, 32), "red"))
    add(tmp_path / "half.png", Image.effect_noise((200, 200), 50))
    whole = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    source = folder(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert (255, 0, 0) in colours(contact_sheet(Variants(source), source.rows()))
    assert "half.png: cannot be read" in caplog.text


def test_data_without_pictures_have_no_sheet() -> None:
    class Texts(Source):
        def rows(self) -> list[Row]:
            return [Row(id="a", prompt="a", size=(0, 0))]

        def load(self, row: Row, names: object = None) -> dict[str, str]:
            return {"prompt": row.prompt}

        def fingerprints(self, row: Row, hash_file: object) -> dict[str, bytes]:
            return {}

    assert contact_sheet(Variants(Texts(None)), Texts(None).rows()) is None


def test_captions_of_any_script_are_drawn_without_boxes(tmp_path: Path) -> None:
    for n, caption in enumerate(("cafe", "café", "??", "りん", "🍎猫")):
        Image.new("RGB", (16, 16), "red").save(tmp_path / f"{n}.png")
        (tmp_path / f"{n}.txt").write_text(caption, encoding="utf-8")
    source = folder(tmp_path)
    pixels = np.asarray(contact_sheet(Variants(source), source.rows()))
    plain, accented, *unknown = np.split(pixels[:, 4:], range(100, pixels.shape[1] - 5, 100), axis=1)
    assert np.array_equal(plain, accented) and all(np.array_equal(unknown[0], other) for other in unknown[1:])
    assert not np.array_equal(plain, unknown[0])


@pytest.mark.parametrize(
    ("more", "consequence"),
    [
        ((), "a run stores the rest of the cache, then ends with a list of all such rows"),
        (("task.splitter=none",), "a run ends before it starts, with a list of all such rows"),
        (("task.splitter=none", "data.check=headers"), "a run ends when it comes to this row"),
    ],
)
def test_a_dry_run_that_meets_a_damaged_picture_says_what_a_run_does_about_it(
    more: tuple[str, ...], consequence: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "in"
    data.mkdir()
    add(data / "a.png", Image.effect_noise((64, 64), 50))
    add(data / "b.png", Image.effect_noise((64, 64), 50))
    (data / "b.png").write_bytes((data / "b.png").read_bytes()[:2000])
    words = [*(word for word in SMALL if not word.startswith("data.")), "data=folder", f"data.path={data}", *more]
    assert cli.main([*words, "dry_run=true"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "b.png" in line]
    assert line.startswith(f"{data / 'b.png'}: cannot be read") and line.endswith(f"; {consequence}")
    assert cli.main([*words, "train.steps=6"]) == 2, "and so it does"
    assert (runs.newest("train") is None) == ("comes to this row" not in consequence)
    assert (runs.newest("cache") is not None) == ("stores" in consequence)
