"""A user's folder of pictures and captions, and all that can be wrong with it.   pytest tests/data/test_folder.py"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrun.config import ConfigError, DataError
from flowrun.data.folder import Folder
from flowrun.registry import SOURCES

UNUSED = dict.fromkeys(("size", "max_area", "area", "max_aspect", "upscale"))
FIXED = {**UNUSED, "mode": "fixed", "size": [32, 32], "multiple_of": 8}
KEEP = {**UNUSED, "mode": "keep", "multiple_of": 8}
BUCKETS = {**UNUSED, "mode": "buckets", "multiple_of": 8, "area": 32 * 32, "max_aspect": 3, "upscale": True}
TAGS = {"several": "rows", "shuffle": False, "drop": 0.0, "keep": 1, "separator": ","}
PLAIN = {"variants": 1, "flip": 0.0, "crop": False, "caption": TAGS}
WHOLE = {"file": "txt", "field": "caption", "lines": "whole"}


def make(path: Path | str | None, **changes: Any) -> Folder:
    node = {"source": "folder", "path": None if path is None else str(path), "on_error": "stop", "pictures": {}, "check": "full",
            "max_pixels": 10_000_000, "ground": [255, 255, 255], "geometry": FIXED, "caption": WHOLE, "augment": PLAIN,
            **changes}  # fmt: skip
    return Folder(SOURCES.build("data", Folder, node))


def add(
    path: Path, caption: str | bytes | None = "a thing", size: tuple[int, int] = (40, 48), colour: str = "red"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], colour).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_bytes(caption if isinstance(caption, bytes) else caption.encode())
    return path


def faults(source: Folder) -> str:
    with pytest.raises(DataError) as caught:
        source.rows()
    return str(caught.value)


def by_content(path: Path) -> bytes:
    return path.read_bytes()


def test_rows_are_the_pictures_below_the_folder_by_relative_path(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "x/1.png", "y/1.png", "y/deep/z.webp", "c.bmp", "d.jpeg"):
        add(tmp_path / name, f"caption of {name}")
    rows = make(tmp_path).rows()
    assert [row.id for row in rows] == ["a.jpg", "b.PNG", "c.bmp", "d.jpeg", "x/1.png", "y/1.png", "y/deep/z.webp"]
    assert all(
        row.prompt == f"caption of {row.id}" and row.size == (32, 32) and row.source == tmp_path / row.id
        for row in rows
    )


def test_ids_survive_a_move_of_the_folder(tmp_path: Path) -> None:
    add(tmp_path / "here/a/1.png")
    before = make(tmp_path / "here").rows()
    os.rename(tmp_path / "here", tmp_path / "there")
    after = make(tmp_path / "there").rows()
    assert [row.id for row in before] == [row.id for row in after] == ["a/1.png"]
    assert make(tmp_path / "there").fingerprints(after[0], by_content)


def test_pictures_are_loaded_at_the_size_of_their_row(tmp_path: Path) -> None:
    sizes = {"a.png": (21, 34), "b.png": (64, 40), "c.png": (8, 8)}
    for name, size in sizes.items():
        add(tmp_path / name, size=size, colour="#0a141e")
    source = make(tmp_path, geometry=KEEP)
    assert [row.size for row in source.rows()] == [(16, 32), (64, 40), (8, 8)]
    for row in source.rows():
        loaded = source.load(row)
        assert loaded["image"].shape == (3, *row.size) and loaded["prompt"] == "a thing"
        assert torch.equal(loaded["image"][:, 0, 0], torch.tensor([10, 20, 30], dtype=torch.uint8))
        assert source.load(row, ("prompt",)) == {"prompt": "a thing"}


def test_a_photo_taken_sideways_becomes_a_portrait(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    add(tmp_path / "photo.jpg")
    Image.new("RGB", (40, 24)).save(tmp_path / "photo.jpg", exif=exif)
    source = make(tmp_path, geometry=KEEP)
    (row,) = source.rows()
    assert row.size == (40, 24)
    assert source.load(row)["image"].shape == (3, 40, 24)


def test_hidden_files_are_ignored_and_other_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(tmp_path / "a.png")
    add(tmp_path / "._a.png")
    add(tmp_path / ".thumbs/a.png")
    (tmp_path / "metadata.jsonl").write_text("{}")
    with caplog.at_level(logging.INFO):
        source = make(tmp_path)
        assert [row.id for row in source.rows()] == ["a.png"]
    assert source.ignored == 3  # ._a.png, ._a.txt, metadata.jsonl
    assert "metadata.jsonl" in caplog.text


@pytest.mark.parametrize("ending", [".tiff", ".TIF", ".gif", ".heic"])
def test_a_picture_in_a_format_that_is_not_read_is_a_fault_when_it_has_a_caption(tmp_path: Path, ending: str) -> None:
    add(tmp_path / "a.png")
    (tmp_path / "more").mkdir()
    (tmp_path / f"more/b{ending}").write_bytes(b"whatever it holds")
    assert [row.id for row in make(tmp_path).rows()] == ["a.png"], "without a caption it is any other file"
    (tmp_path / "more/b.txt").write_text("a caption")
    assert f"{tmp_path}/more/b{ending}: pictures that end in {ending} are not read: save it as one" in faults(make(tmp_path))
    source = make(tmp_path, on_error="skip")
    assert [row.id for row in source.rows()] == ["a.png"] and [name for name, _ in source.skipped] == [f"more/b{ending}"]
    add(tmp_path / "more/b.png", "a caption")
    assert [row.id for row in make(tmp_path).rows()] == ["a.png", "more/b.png"], "the caption is that of the picture which is read"


def test_what_runs_left_below_the_data_is_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOWRUN_OUTPUTS", str(tmp_path / "data/made here"))
    add(tmp_path / "data/a.png")
    add(tmp_path / "data/made here/plans/sheet.png")
    run = tmp_path / "data/elsewhere/runs/train/sft-emoji/1"
    add(run / "samples/step-000004.png")
    for name in ("config.yaml", "identity"):
        (run / name).write_text("a run's")
    with caplog.at_level(logging.INFO):
        assert [row.id for row in make(tmp_path / "data").rows()] == ["a.png"]
    assert f"{tmp_path / 'data/made here'} holds results of runs" in caplog.text and f"{run} holds results" in caplog.text
    add(run / "samples/step-000004.png", "drawn by a run")
    assert [row.id for row in make(run / "samples").rows()] == ["step-000004.png"], "who names them wants them"


def test_linked_folders_are_searched_once(tmp_path: Path) -> None:
    add(tmp_path / "data/a.png")
    add(tmp_path / "elsewhere/b.png")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    assert [row.id for row in make(tmp_path / "data").rows()] == ["a.png", "link/b.png"]


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"\xef\xbb\xbfa caf\xc3\xa9\n", "a café"),
        ("りんご 🍎".encode(), "りんご 🍎"),
        (b"  first line\nsecond line\r\n\n", "first line\nsecond line"),
        (b"001, 7", "001, 7"),
    ],
)
def test_a_caption_is_the_whole_text_without_its_ends(tmp_path: Path, data: bytes, prompt: str) -> None:
    add(tmp_path / "a.png", data)
    assert make(tmp_path).rows()[0].prompt == prompt


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "a café".encode("cp1252"),
            "a.png: its caption file a.txt is not UTF-8: byte 0xe9 at position 5 .*Windows-1252",
        ),
        (b"\xef\xbb\xbfcaf\xe9", "byte 0xe9 at position 6"),
        ("a".encode("utf-16"), "position 0 .*UTF-16"),
        (b"\x81\x8d", "not UTF-8: byte 0x81 at position 0 .save it as UTF-8"),
        (b" \n", "a.png: its caption file a.txt is empty"),
        (None, "a.png: has no caption file a.txt"),
    ],
)
def test_a_caption_that_cannot_be_used_is_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    add(tmp_path / "a.png", data)
    with pytest.raises(DataError, match=message):
        make(tmp_path).rows()


@pytest.mark.parametrize("found", ["cat.caption", "cat.TXT", "Cat.txt", "cat.png.txt", "cat.txt.bak", "cats.txt"])
def test_a_near_miss_of_a_caption_file_is_mentioned(tmp_path: Path, found: str) -> None:
    add(tmp_path / "cat.png", None)
    add(tmp_path / "dog.png")
    (tmp_path / found).write_text("a cat")
    assert f"cat.png: has no caption file cat.txt, but there is {found}" in faults(make(tmp_path))


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.json1", "metadata.csv", "captions.json", "train/captions.txt"])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_pictures_without_captions_are_an_error_that_names_the_file_which_nothing_reads(
    tmp_path: Path, name: str, on_error: str
) -> None:
    for picture in ("a", "b"):
        add(tmp_path / f"train/{picture}.png", None)
    (tmp_path / name).write_text('{"file_name": "train/a.png", "text": "a thing"}')
    text = faults(make(tmp_path, on_error=on_error))
    assert "2 of 2 rows cannot be used" in text and f"(not read: {Path(name).name})" in text


def test_a_line_break_means_what_the_setting_says(tmp_path: Path) -> None:
    add(tmp_path / "a.png", "one\r\n\r\n two \none\n")
    for lines, prompts in (("whole", ["one\n\n two \none"]), ("first", ["one"]), ("each", ["one", "two"])):
        rows = make(tmp_path, caption={**WHOLE, "lines": lines}).rows()
        assert [row.prompt for row in rows] == prompts
    assert all(row.id.startswith("a.png#") for row in rows) and len({row.id for row in rows}) == 2
    first, second = (make(tmp_path).fingerprints(row, by_content) for row in rows)
    assert first["image"] == second["image"] and first["prompt"] != second["prompt"]


JSON = {"file": "json", "field": "caption", "lines": "whole"}


def test_captions_may_be_a_field_of_a_json_file(tmp_path: Path) -> None:
    add(tmp_path / "a.png", None).with_suffix(".json").write_text('{"id": 1, "caption": "007"}')
    add(tmp_path / "b.png", "not this one").with_suffix(".json").write_text('{"caption": ["one", "two"]}')
    source = make(tmp_path, caption=JSON)
    assert [row.prompt for row in source.rows()] == ["007", "one", "two"]
    assert source.ignored == 1, "b.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.png: has no caption file a.json, but there is a.txt"),
        ("{", "its caption file a.json is no valid JSON: Expecting property name .* in line 1, column 2"),
        ('{"text": "x"}', "a.json has no field 'caption': its fields are text; data.caption.field names it"),
        ("[]", "a.json has no field 'caption': it is no object"),
        ('{"caption": {"a": 1}}', "a.json holds {'a': '1'} where a text is needed"),
        ('{"caption": []}', "a.json is empty"),
    ],
)
def test_a_json_caption_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    add(tmp_path / "a.png", "text")
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        make(tmp_path, caption=JSON).rows()


def spoil(folder: Path) -> None:
    """One good row and five bad ones, the last bad in two ways."""
    add(folder / "good.png")
    add(folder / "none.png", None)
    add(folder / "latin.png", b"\xff\xff")
    half = add(folder / "half.jpg")
    half.write_bytes(half.read_bytes()[:400])
    add(folder / "zero.png").write_bytes(b"")
    add(folder / "two.png", None).write_text("text")


def test_all_faults_are_listed_at_once_with_file_and_remedy(tmp_path: Path) -> None:
    spoil(tmp_path)
    text = faults(make(tmp_path))
    for name in ("none.png", "latin.png", "half.jpg", "zero.png", "two.png"):
        assert f"{tmp_path / name}: " in text
    (line,) = [line for line in text.splitlines() if "two.png: " in line]
    assert "is no PNG" in line and "no caption file" in line
    assert "good.png" not in text
    assert "5 of 6 rows cannot be used" in text and "data.on_error=skip" in text


def test_skipping_leaves_the_bad_rows_out_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoil(tmp_path)
    source = make(tmp_path, on_error="skip")
    assert [row.id for row in source.rows()] == ["good.png"]
    assert [name for name, _ in source.skipped] == ["half.jpg", "latin.png", "none.png", "two.png", "zero.png"]
    reasons = dict(source.skipped)
    assert "0 bytes" in reasons["zero.png"] and "cannot be read" in reasons["half.jpg"]
    source.rows()
    assert len(source.skipped) == 5  # not doubled


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    add(tmp_path / "a.png", None)
    text = faults(make(tmp_path, on_error="skip"))
    assert "1 of 1 rows cannot be used" in text and "on_error" not in text


def test_with_header_checks_damage_is_named_when_the_picture_is_loaded(tmp_path: Path) -> None:
    half = add(tmp_path / "half.jpg", size=(200, 200))
    half.write_bytes(half.read_bytes()[: half.stat().st_size * 2 // 3])
    source = make(tmp_path, check="headers")
    (row,) = source.rows()
    with pytest.raises(DataError, match="half.jpg: cannot be read.*\n.*data.check=full"):
        source.load(row)


def test_damage_is_looked_for_at_once_unless_a_cache_stage_reads_everything_first(tmp_path: Path) -> None:
    add(tmp_path / "good.png")
    half = add(tmp_path / "half.jpg", size=(200, 200))
    half.write_bytes(half.read_bytes()[: half.stat().st_size * 2 // 3])
    assert "half.jpg: cannot be read" in faults(make(tmp_path, check="auto"))
    later = make(tmp_path, check="auto")
    later.read_before_training = True
    assert [row.id for row in later.rows()] == ["good.png", "half.jpg"]
    skipping = make(tmp_path, check="auto", on_error="skip")
    skipping.read_before_training = True
    assert [row.id for row in skipping.rows()] == ["good.png"]


def test_pictures_smaller_than_the_grid_are_faults(tmp_path: Path) -> None:
    add(tmp_path / "small.png", size=(6, 90))
    assert "small.png: is 6x90, smaller than data.geometry.multiple_of = 8" in faults(make(tmp_path, geometry=KEEP))


def test_a_path_that_is_no_readable_folder_of_pictures_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").touch()
    for path, message in (
        (None, "data.path: names no folder"),
        (tmp_path / "absent", "data.path: .*absent does not exist"),
        (tmp_path / "file", "data.path: .*file is a file"),
        (tmp_path / "empty", "data.path: .*empty holds no pictures .no files"),
        (tmp_path / "texts", "data.path: .*texts holds no pictures .1 other files.; .* data=video reads videos$"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(path).rows()

    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match="data.path: .* cannot be read: Permission denied"):
        make(tmp_path).rows()


def test_an_unreadable_sub_folder_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path / "a.png")
    add(tmp_path / "locked/b.png")
    real = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"{tmp_path / 'locked'}: the folder cannot be read: Permission denied" in faults(make(tmp_path))


def test_a_file_name_that_is_not_utf_8_is_a_fault(tmp_path: Path) -> None:
    add(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", os.fsencode(tmp_path) + b"/caf\xe9.png")
    assert "the file's name is not valid UTF-8" in faults(make(tmp_path))


def test_keys_change_with_bytes_rules_and_caption_each_for_itself(tmp_path: Path) -> None:
    path = add(tmp_path / "a.png", "one")
    (row,) = make(tmp_path).rows()
    key = make(tmp_path).fingerprints(row, by_content)
    for changes in ({"ground": [0, 0, 0]}, {"geometry": KEEP}, {"geometry": {**FIXED, "size": [32, 40]}}):
        other = make(tmp_path, **changes).fingerprints(row, by_content)
        assert other["image"] != key["image"] and other["prompt"] == key["prompt"]
    path.with_suffix(".txt").write_text("two")
    (row,) = make(tmp_path).rows()
    edited = make(tmp_path).fingerprints(row, by_content)
    assert edited["image"] == key["image"] and edited["prompt"] != key["prompt"]
    add(path, "two", colour="blue")
    assert make(tmp_path).fingerprints(row, by_content)["image"] != key["image"]
    assert make(tmp_path, check="headers", on_error="skip").fingerprints(row, by_content) == make(
        tmp_path
    ).fingerprints(row, by_content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ground": [255, 255]}, "data.ground"),
        ({"ground": [255, 255, 256]}, "data.ground"),
        ({"max_pixels": 0}, "data.max_pixels: is 0"),
        ({"max_pixels": 10**9}, "data.max_pixels: .*Pillow's limit"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **changes)
