"""Data sets as the `datasets` library saves them, pictures read in place.   pytest tests/data/test_arrow.py"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import ipc
from test_folder import FIXED, PLAIN, by_content

from flowrun.config import ConfigError, DataError
from flowrun.data.arrow import Arrow
from flowrun.registry import SOURCES

PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
COLUMNS = {"id": None, "caption": "text", "pictures": {"image": "image"}}


def make(path: Path | None, **changes: Any) -> Arrow:
    node = {"source": "arrow", "path": None if path is None else str(path), "on_error": "stop", "check": "full",
            "max_pixels": 10_000_000, "ground": [255, 255, 255], "geometry": FIXED, "augment": PLAIN, "columns": COLUMNS,
            "lines": "whole", **changes}  # fmt: skip
    return Arrow(SOURCES.build("data", Arrow, node))


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (48, 40), colour).save(file, format="PNG")
    return file.getvalue()


def save(root: Path, shards: Sequence[dict[str, list[Any]]], picture: pyarrow.DataType = PICTURE) -> Path:
    """The layout of save_to_disk: shards as Arrow streams, named in order in state.json."""
    root.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    for name, columns in zip(names, shards, strict=True):
        typed = {k: pyarrow.array(v, picture) if k in ("image", "before") else pyarrow.array(v) for k, v in columns.items()}
        table = pyarrow.table(typed)
        with ipc.new_stream(root / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return root


def cell(colour: str, path: str | None = None) -> dict[str, Any]:
    return {"bytes": png(colour), "path": path}


def colours(source: Arrow) -> list[list[int]]:
    return [source.load(row)["image"][:, 9, 9].tolist() for row in source.rows()]


RED, LIME, BLUE = [255, 0, 0], [0, 255, 0], [0, 0, 255]


def test_rows_of_all_shards_in_order_with_their_own_pictures(tmp_path: Path) -> None:
    root = save(tmp_path / "d", [{"image": [cell("red"), cell("lime"), cell("blue")], "text": ["r", "g", "b"]},
                                 {"image": [cell("lime")], "text": ["001"]}])  # fmt: skip
    source = make(root)
    assert [(row.id, row.prompt, row.size) for row in source.rows()] == [
        ("0", "r", (32, 32)), ("1", "g", (32, 32)), ("2", "b", (32, 32)), ("3", "001", (32, 32))]  # fmt: skip
    assert colours(source) == [RED, LIME, BLUE, LIME]


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary()])
def test_pictures_may_be_plain_bytes(tmp_path: Path, kind: pyarrow.DataType) -> None:
    root = save(tmp_path / "d", [{"image": [png("red"), png("blue"), png("lime")], "text": ["r", "b", "g"]}], kind)
    assert colours(make(root)) == [RED, BLUE, LIME]


def test_a_row_is_named_by_a_column_or_by_its_file(tmp_path: Path) -> None:
    root = save(tmp_path / "d", [{"image": [cell("red", "a.png"), cell("blue", "b.png")], "text": ["r", "b"], "key": [7, 8]}])
    assert [row.id for row in make(root).rows()] == ["a.png", "b.png"]
    assert [row.id for row in make(root, columns={**COLUMNS, "id": "key"}).rows()] == ["7", "8"]
    twins = save(tmp_path / "t", [{"image": [cell("red", "a.png"), cell("blue", "a.png")], "text": ["r", "b"]}])
    with pytest.raises(DataError, match=r"row 1: has the name 'a.png', as row 0\ndata.columns.id: name a column"):
        make(twins).rows()


def test_a_picture_that_lies_elsewhere_is_read_there(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(png("blue"))
    root = save(tmp_path / "d", [{"image": [{"bytes": None, "path": str(tmp_path / "out.png")}], "text": ["b"]}])
    assert colours(make(root)) == [BLUE]


def test_several_pictures_and_captions_of_a_row(tmp_path: Path) -> None:
    root = save(tmp_path / "d", [{"image": [cell("red", "a")], "before": [cell("blue", "b")], "text": [["one", "two"]]}])
    source = make(root, columns={**COLUMNS, "pictures": {"image": "image", "condition_image": "before"}})
    rows = source.rows()
    assert [row.prompt for row in rows] == ["one", "two"]
    loaded = source.load(rows[0])
    assert loaded["image"][:, 9, 9].tolist() == RED and loaded["condition_image"][:, 9, 9].tolist() == BLUE
    keys = source.fingerprints(rows[0], by_content)
    assert keys["image"] != keys["condition_image"]


def test_what_is_wrong_is_named_with_its_row(tmp_path: Path) -> None:
    broken = {"bytes": png("red")[:60], "path": None}
    rows = {"image": [cell("red"), None, broken, cell("blue"), {"bytes": None, "path": None}], "text": ["r", "x", "y", None, "z"]}
    root = save(tmp_path / "d", [rows])
    with pytest.raises(DataError) as caught:
        make(root).rows()
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[2][:20] for line in lines[:4]] == [
        "image is empty", "cannot be read: ", "text holds None wher", "image is empty"] or "cannot be read" in lines[1]  # fmt: skip
    assert [line.partition(": ")[0].rpartition(" ")[2] for line in lines[:4]] == ["1", "2", "3", "4"]
    assert "4 of 5 rows cannot be used" in lines[4]
    assert [row.id for row in make(root, on_error="skip").rows()] == ["0"]


def test_a_column_of_another_type_or_name_is_told(tmp_path: Path) -> None:
    root = save(tmp_path / "d", [{"image": [cell("red")], "text": ["r"], "number": [1]}])
    with pytest.raises(DataError, match="number is of type int64 where pictures are needed"):
        make(root, columns={**COLUMNS, "pictures": {"image": "number"}}).rows()
    with pytest.raises(ConfigError, match="data.columns.caption: .* has no column 'txt', only image, text, number"):
        make(root, columns={**COLUMNS, "caption": "txt"}).rows()


def test_a_path_that_is_no_data_set_is_named(tmp_path: Path) -> None:
    save(tmp_path / "both" / "train", [{"image": [cell("red")], "text": ["r"]}])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "state.json").write_text("{")
    for path, message in (
        (None, "data.path: names no folder"),
        (tmp_path, "data.path: .* holds no state.json; give a folder that the datasets library's save_to_disk made"),
        (tmp_path / "both", "data.path: .*both holds several data sets; give one of them: .*both/train"),
        (tmp_path / "odd", "state.json cannot be read"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            make(path).rows()
    shard = tmp_path / "both" / "train" / "data-00000-of-00001.arrow"
    shard.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"00001.arrow cannot be read: "):
        make(tmp_path / "both" / "train").rows()
