"""Tar archives as webdataset lays them out, read in place.   pytest tests/data/test_tar.py"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_folder import FIXED, KEEP, PLAIN, WHOLE, by_content
from test_folder import make as folder

from flowrun.config import ConfigError, DataError
from flowrun.data.tar import Tar
from flowrun.registry import SOURCES


def make(path: Path | None, **changes: Any) -> Tar:
    node = {"source": "tar", "path": None if path is None else str(path), "on_error": "stop", "check": "full",
            "max_pixels": 10_000_000, "ground": [255, 255, 255], "geometry": FIXED, "caption": WHOLE, "augment": PLAIN,
            **changes}  # fmt: skip
    return Tar(SOURCES.build("data", Tar, node))


def picture(ending: str = "png", colour: str = "red", size: tuple[int, int] = (40, 48), **save: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size[::-1], colour).save(file, format={"jpg": "JPEG"}.get(ending, ending), **save)
    return file.getvalue()


def pack(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def faults(source: Tar) -> list[str]:
    with pytest.raises(DataError) as caught:
        source.rows()
    return str(caught.value).splitlines()


def test_members_of_one_name_are_a_row_and_equal_the_same_files_in_a_folder(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    members = {"cats/tom.jpg": picture("jpg", "blue", (24, 40), exif=exif), "cats/tom.txt": "Tom, a café".encode(),
               "cats/tom.cls": b"3", "a.PNG": picture(), "a.txt": b"\xef\xbb\xbfone\r\ntwo", "only.txt": b"no picture",
               ".hidden.png": picture()}  # fmt: skip
    for name, data in members.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(data)
    source, plain = make(pack(tmp_path / "x.tar", members), geometry=KEEP), folder(tmp_path / "folder", geometry=KEEP)
    found = {row.id: row for row in source.rows()}
    same = {row.id: row for row in plain.rows()}
    assert list(found) == ["x.tar/cats/tom", "x.tar/a"] and set(same) == {"cats/tom.jpg", "a.PNG"}
    for name, other in (("x.tar/cats/tom", "cats/tom.jpg"), ("x.tar/a", "a.PNG")):
        one, two = source.load(found[name]), plain.load(same[other])
        assert one["prompt"] == two["prompt"] and torch.equal(one["image"], two["image"])
        assert found[name].size == same[other].size
    assert found["x.tar/cats/tom"].size == (40, 24), "it is turned upright"
    assert source.ignored == 2, "tom.cls, only.txt"


def test_all_archives_of_a_folder_are_read_and_equal_names_in_them_are_different_rows(tmp_path: Path) -> None:
    for name, colour in (("1.tar", "red"), ("0.tar", "blue")):
        pack(tmp_path / name, {"x.png": picture(colour=colour), "x.txt": colour.encode()})
    source = make(tmp_path)
    assert [(row.id, row.prompt) for row in source.rows()] == [("0.tar/x", "blue"), ("1.tar/x", "red")]
    first, second = (source.fingerprints(row, by_content)["image"] for row in source.rows())
    assert first != second


def test_captions_may_be_json_and_many(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.tar", {"a.png": picture(), "a.json": b'{"caption": ["one", "two"]}'})
    source = make(archive, caption={"file": "json", "field": "caption", "lines": "whole"})
    assert [row.prompt for row in source.rows()] == ["one", "two"]


def test_what_is_wrong_is_named_with_archive_and_member(tmp_path: Path) -> None:
    whole = picture("jpg", size=(200, 200))
    archive = pack(tmp_path / "x.tar", {"good.png": picture(), "good.txt": b"fine", "none.png": picture(), "none.cls": b"1",
                                        "half.jpg": whole[: len(whole) * 2 // 3], "half.txt": b"x", "zero.png": b"", "zero.txt": b"x",
                                        "two.png": picture(), "two.jpg": picture("jpg"), "two.txt": b"x",
                                        "latin.png": picture(), "latin.txt": b"\xe9"})  # fmt: skip
    found = faults(make(archive))
    for name, what in (("none", "has no caption .txt, only .png, .cls"), ("half", "half.jpg"), ("zero", "0 bytes"),
                       ("two", "has several pictures: .png, .jpg"), ("latin", "its caption file .txt is not UTF-8: byte 0xe9")):
        (line,) = [line for line in found if line.startswith(f"{archive}/{name}: ")]
        assert what in line or (name == "half" and "cannot be read" in line)
    assert "5 of 6 rows cannot be used" in found[-1]
    assert [row.id for row in make(archive, on_error="skip").rows()] == ["x.tar/good"]


def test_a_picture_in_a_format_that_is_not_read_is_a_fault_when_it_has_a_caption(tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.tar", {"a.png": picture(), "a.txt": b"read", "b.tiff": picture("tiff"), "b.txt": b"not read",
                                        "c.gif": picture("gif"), "notes.txt": b"about the data"})  # fmt: skip
    assert f"{archive}/b: pictures that end in .tiff are not read: save it as one that ends in .png" in faults(make(archive))[0]
    source = make(archive, on_error="skip")
    assert [row.id for row in source.rows()] == ["x.tar/a"] and [name for name, _ in source.skipped] == ["x.tar/b"]
    assert source.ignored == 2  # c.gif, notes.txt


def test_archives_that_cannot_be_read_in_place_are_named(tmp_path: Path) -> None:
    members = {"a.png": picture(), "a.txt": b"x"}
    for mode, kind in (("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")):
        with pytest.raises(ConfigError, match=f"is compressed with {kind}; unpack it once"):
            make(pack(tmp_path / f"{kind}.tar", members, mode)).rows()
    cut = pack(tmp_path / "cut.tar", members)
    cut.write_bytes(cut.read_bytes()[:600])
    with pytest.raises(DataError, match=r"cut.tar cannot be read: .*data.path: get the archive again|cut.tar cannot be read"):
        make(cut).rows()
    (tmp_path / "text.tar").write_text("no archive at all" * 100)
    with pytest.raises(DataError, match=r"text.tar cannot be read"):
        make(tmp_path / "text.tar").rows()


def test_a_path_without_archives_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pack(tmp_path / "texts.tar", {"a.txt": b"x"})
    for path, message in (
        (None, "data.path: names no archive"),
        (tmp_path / "none", "data.path: .*none does not exist"),
        (tmp_path / "empty", "data.path: .*empty holds no .tar files"),
        (tmp_path / "texts.tar", "data.path: .*texts.tar holds no pictures"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(path).rows()


def test_what_the_library_would_take_for_the_end_of_an_archive_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = pack(tmp_path / "one.tar", {"a.png": picture(), "a.txt": b"a", "b.png": picture(), "b.txt": b"b"}).read_bytes()
    second = one.index(b"b.png")  # where its header begins
    damaged = bytearray(one)
    damaged[second + 148] ^= 1  # of its checksum
    zeroed = one[:second] + bytes(512) + one[second + 512 :]
    for wrong in (bytes(damaged), zeroed, one + one):
        (tmp_path / "one.tar").write_bytes(wrong)
        (told, _) = faults(make(tmp_path / "one.tar"))
        assert "what follows byte" in told and "one.tar" in told
    (tmp_path / "one.tar").write_bytes(one[:second])
    assert [row.id for row in make(tmp_path / "one.tar").rows()] == ["one.tar/a"]
    assert "has no end mark" in caplog.text


def test_a_name_that_stands_twice_is_a_fault_and_a_link_is_the_picture_it_names(tmp_path: Path) -> None:
    path = pack(tmp_path / "one.tar", {"a.png": picture(), "a.txt": b"a", "a.PNG": picture(), "b.png": picture(), "b.txt": b"b"})
    with tarfile.open(path, "a") as tar:
        for name, kind in (("c", tarfile.LNKTYPE), ("d", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(f"{name}.png")
            link.type, link.linkname = kind, "b.png"
            tar.addfile(link)
            text = tarfile.TarInfo(f"{name}.txt")
            text.size = 1
            tar.addfile(text, io.BytesIO(name.encode()))
    assert faults(make(path))[0] == f"{path}/a: a.png stands twice in the archive"
    skipping = make(path, on_error="skip")
    rows = skipping.rows()
    assert [(row.id, row.prompt) for row in rows] == [(f"one.tar/{name}", name) for name in "bcd"]
    assert torch.equal(skipping.load(rows[0])["image"], skipping.load(rows[2])["image"])
