"""A dry run of many rows opens each file once and decodes no more than it shows.   pytest tests/data/test_large_data.py"""

from __future__ import annotations

import builtins
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from flowrun import cli
from flowrun.contact import SHOWN
from flowrun.data._picture import check
from tests.conftest import SMALL, Runs

pytestmark = pytest.mark.slow

ROWS = 80


def png(number: int, end: bytes = b"") -> bytes:
    """A picture of about 30 kB, of which the header is a small part."""
    pixels = np.random.default_rng(number).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue() + end


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many")
    (root / "folder").mkdir()
    with tarfile.open(root / "all.tar", "w") as tar, open(root / "all.jsonl", "w") as table:
        for number in range(ROWS):
            (root / "folder" / f"{number}.png").write_bytes(png(number))
            (root / "folder" / f"{number}.txt").write_text(f"caption {number}")
            table.write(json.dumps({"file_name": f"folder/{number}.png", "text": f"caption {number}"}) + "\n")
            tar.add(root / "folder" / f"{number}.png", f"{number}.png")
            tar.add(root / "folder" / f"{number}.txt", f"{number}.txt")
    return root


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """How often each picture is opened, and how many are decoded."""
    seen: Counter = Counter()
    opened, loaded = builtins.open, ImageFile.ImageFile.load

    def opening(file: object, *args: object, **settings: object) -> object:
        if str(file).endswith((".png", ".tar")):
            seen[os.path.basename(str(file))] += 1
        return opened(file, *args, **settings)

    def loading(picture: ImageFile.ImageFile) -> object:
        seen["decoded"] += bool(picture.tile)
        return loaded(picture)

    monkeypatch.setattr(builtins, "open", opening)
    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr(ImageFile.ImageFile, "load", loading)
    yield seen


@pytest.mark.parametrize("source", ["folder", "table", "tar"])
def test_a_dry_run_opens_a_file_once_and_decodes_what_it_shows(source: str, data: Path, runs: Runs, counted: Counter) -> None:
    path = {"folder": "folder", "table": "all.jsonl", "tar": "all.tar"}[source]
    words = [word for word in SMALL if not word.startswith("data.")]
    assert cli.main([*words, f"data={source}", f"data.path={data / path}", "dry_run=true"]) == 0
    assert counted.pop("decoded") == SHOWN
    sheet = next((runs.folder / "outputs" / "plans").iterdir()).name
    opened = {name: count for name, count in counted.items() if name != sheet and not name.startswith(".")}
    if source == "tar":  # its list of members; each picture's header; those that are shown
        assert opened.pop("all.tar") <= 2 + 2 * ROWS + SHOWN and not opened
    else:
        assert len(opened) == ROWS and sorted(Counter(opened.values()).items()) == [(1, ROWS - SHOWN), (2, SHOWN)]


@pytest.mark.slow
def test_a_dry_run_says_how_many_files_it_has_not_read_and_a_run_then_knows_them(
    data: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*(word for word in SMALL if not word.startswith("data.")), "data=folder", f"data.path={data / 'folder'}"]
    assert cli.main([*words, "dry_run=true"]) == 0
    assert f"{ROWS + 6} files not read yet, which a dry run leaves so (cache.verify=full reads all)" in capsys.readouterr().out
    assert cli.main([*words, "stage=cache"]) == 0
    capsys.readouterr()
    assert cli.main([*words, "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    assert "not read" not in plan and "0 to make, from 0 rows" in plan


def test_only_the_heads_of_a_png_are_read_for_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no EXIF tag comes before its pixels: one may come behind them."""
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read, original = [], io.BufferedReader.read

    class Counting(io.BufferedReader):
        def read(self, size: int = -1) -> bytes:
            got = original(self, size)
            read.append(len(got))
            return got

    monkeypatch.setattr("flowrun.data._picture.open_file", lambda file: Counting(io.FileIO(file)))
    assert check(tmp_path / "a.png", 10_000_000, full=False) == (1000, 1000)
    assert sum(read) < (tmp_path / "a.png").stat().st_size / 50
