"""Tables of pictures and captions in five formats, and all that can be wrong with them.   pytest tests/data/test_table.py"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from test_folder import FIXED, KEEP, PLAIN, by_content

from flowrun.config import ConfigError, DataError
from flowrun.data.table import Table
from flowrun.registry import SOURCES

COLUMNS = {"id": None, "caption": "text", "pictures": {"image": "file_name"}}
ODD = ["a, b", 'a "quoted" word', "line one\nline two", "りんご 🍎", "001", "NaN", "null", "007.50", "=1+1", " padded "]


def make(path: Path | None, **changes: Any) -> Table:
    node = {"source": "table", "path": None if path is None else str(path), "root": None, "on_error": "stop",
            "check": "full", "max_pixels": 10_000_000, "ground": [255, 255, 255], "geometry": FIXED,
            "columns": COLUMNS, "lines": "whole", "augment": PLAIN, **changes}  # fmt: skip
    return Table(SOURCES.build("data", Table, node))


def picture(path: Path, size: tuple[int, int] = (40, 48), colour: str = "red") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], colour).save(path)
    return path.name


def as_csv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def as_json(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def as_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")


def as_parquet(path: Path, rows: Sequence[dict[str, str]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


FORMATS = {".csv": as_csv, ".tsv": as_csv, ".json": as_json, ".jsonl": as_lines, ".parquet": as_parquet}


@pytest.fixture(params=FORMATS, ids=[ending[1:] for ending in FORMATS])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Sequence[dict[str, str]]], Path]:
    def write(rows: Sequence[dict[str, str]]) -> Path:
        path = tmp_path / f"data{request.param}"
        FORMATS[request.param](path, rows)
        return path

    return write


def faults(source: Table) -> list[str]:
    with pytest.raises(DataError) as caught:
        source.rows()
    return str(caught.value).splitlines()


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_every_format_gives_the_same_rows_and_all_of_them_as_text(table: Any, tmp_path: Path) -> None:
    rows = [{"file_name": picture(tmp_path / f"{n:03}.png"), "text": caption} for n, caption in enumerate(ODD)]
    found = make(table(rows)).rows()
    assert [(row.id, row.prompt) for row in found] == [(f"{n:03}.png", caption.strip()) for n, caption in enumerate(ODD)]
    assert all(row.size == (32, 32) and row.source == tmp_path / row.id for row in found)


def test_a_column_may_name_the_rows(table: Any, tmp_path: Path) -> None:
    picture(tmp_path / "x.png")
    columns = {**COLUMNS, "id": "key", "caption": "beschreibung"}
    path = table([{"key": "001", "file_name": "x.png", "beschreibung": "ein Apfel"}])
    assert [(row.id, row.prompt) for row in make(path, columns=columns).rows()] == [("001", "ein Apfel")]


def test_rows_may_have_several_pictures_all_cut_to_the_first(table: Any, tmp_path: Path) -> None:
    """Edit rows (target and condition) and pairs (chosen and rejected) alike."""
    picture(tmp_path / "before.png", (50, 90), "blue")
    picture(tmp_path / "after.png", (48, 40), "red")
    columns = {"id": None, "caption": "text", "pictures": {"image": "after", "condition_image": "before"}}
    source = make(table([{"after": "after.png", "before": "before.png", "text": "make it red"}]), columns=columns, geometry=KEEP)
    assert source.names == ("image", "condition_image", "prompt")
    (row,) = source.rows()
    loaded = source.load(row)
    assert loaded["image"].shape == loaded["condition_image"].shape == (3, 48, 40)
    assert loaded["image"][:, 9, 9].tolist() == [255, 0, 0] and loaded["condition_image"][:, 9, 9].tolist() == [0, 0, 255]
    assert loaded["prompt"] == "make it red" and set(source.load(row, ["condition_image"])) == {"condition_image"}
    assert torch.equal(source.load(row, ["condition_image"])["condition_image"], loaded["condition_image"])


def test_each_picture_has_a_key_of_its_own(tmp_path: Path) -> None:
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png", colour="blue")
    columns = {"id": None, "caption": "text", "pictures": {"image": "a", "condition_image": "b"}}
    path = tmp_path / "t.csv"
    as_csv(path, [{"a": "a.png", "b": "b.png", "text": "x"}])
    (row,) = make(path, columns=columns).rows()
    before = make(path, columns=columns).fingerprints(row, by_content)
    picture(tmp_path / "b.png", colour="green")
    after = make(path, columns=columns).fingerprints(row, by_content)
    assert {name for name in before if before[name] != after[name]} == {"condition_image"}


def test_lines_about_one_picture_are_its_captions(table: Any, tmp_path: Path) -> None:
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    said = [("a.png", "one"), ("b.png", "three"), ("a.png", "two")]
    path = table([{"file_name": name, "text": caption} for name, caption in said])
    rows = make(path).rows()
    assert [row.prompt for row in rows] == ["one", "two", "three"]
    assert rows[0].id.startswith("a.png#") and rows[0].id != rows[1].id and rows[2].id == "b.png"
    reordered = table([{"file_name": name, "text": caption} for name, caption in reversed(said)])
    assert {row.id: row.prompt for row in make(reordered).rows()} == {row.id: row.prompt for row in rows}


def test_one_target_with_several_conditions_is_several_rows(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    path = tmp_path / "t.csv"
    as_csv(path, [{"a": "a.png", "b": f"{name}.png", "text": "x"} for name in "bc"])
    columns = {"id": None, "caption": "text", "pictures": {"image": "a", "condition_image": "b"}}
    first, second = make(path, columns=columns).rows()
    assert first.id != second.id and [row.files["condition_image"].name for row in (first, second)] == ["b.png", "c.png"]


def test_an_object_of_names_and_captions_is_a_table_too(tmp_path: Path) -> None:
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    path = text(tmp_path / "t.json", json.dumps({"a.png": {"text": "one"}, "b.png": "two"}))
    assert [(row.id, row.prompt) for row in make(path).rows()] == [("a.png", "one"), ("b.png", "two")]


def test_a_caption_may_be_a_list_of_texts(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    path = text(tmp_path / "t.jsonl", '{"file_name": "a.png", "text": ["one", "two", "one"]}')
    assert [row.prompt for row in make(path).rows()] == ["one", "two"]


@pytest.mark.parametrize(("lines", "prompts"), [("whole", ["one\ntwo"]), ("first", ["one"]), ("each", ["one", "two"])])
def test_what_a_line_break_means_is_a_setting(tmp_path: Path, lines: str, prompts: list[str]) -> None:
    picture(tmp_path / "a.png")
    as_csv(tmp_path / "t.csv", [{"file_name": "a.png", "text": "one\ntwo\n"}])
    assert [row.prompt for row in make(tmp_path / "t.csv", lines=lines).rows()] == prompts


def test_paths_start_from_the_table_or_from_a_given_root(tmp_path: Path) -> None:
    picture(tmp_path / "pictures/x/1.png"), picture(tmp_path / "pictures/y/1.png")
    (tmp_path / "tables").mkdir()
    as_csv(tmp_path / "tables/t.csv", [{"file_name": f"{folder}/1.png", "text": folder} for folder in "xy"])
    rows = make(tmp_path / "tables/t.csv", root=str(tmp_path / "pictures")).rows()
    assert [(row.id, row.prompt) for row in rows] == [("x/1.png", "x"), ("y/1.png", "y")]
    assert "does not exist" in faults(make(tmp_path / "tables/t.csv"))[0]


def test_byte_order_mark_and_line_ends_of_any_system_are_read(tmp_path: Path) -> None:
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    path = text(tmp_path / "t.csv", b"\xef\xbb\xbffile_name,text\r\n\r\na.png,one\r\n,\r\nb.png,two")
    assert [row.prompt for row in make(path).rows()] == ["one", "two"]


CSV = "file_name,text\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", CSV + "a.png,red, round\n", "t.csv, line 2: has 3 fields, the first line has 2 (is there a comma"),
        ("t.csv", CSV + 'a.png,"x\ny"\na.png\n', "t.csv, line 4: has 1 fields, the first line has 2"),
        ("t.csv", CSV + 'a.png,"open\n', "t.csv, line 2: cannot be read (unexpected end of data); nothing after it is"),
        ("t.csv", CSV + "a.pgn,x\n", "t.csv, line 2: DIR/a.pgn does not exist, but there is a.png"),
        ("t.csv", CSV + ",x\n", "t.csv, line 2: file_name is empty"),
        ("t.csv", CSV + "a.png,\n", "t.csv, line 2: text is empty"),
        ("t.csv", CSV + "https://x.org/a.png,x\n", "is a web address, https://x.org/a.png: download the pictures first"),
        ("t.csv", CSV + "a.png,x\na.png,x\n", "t.csv, line 2: its caption 'x' stands once more in line 3"),
        ("t.csv", CSV + "zero.png,x\n", "t.csv, line 2: the file is empty (0 bytes)"),
        ("t.csv", b"file_name,text\na.png,caf\xe9\n", "t.csv is not UTF-8: byte 0xe9 at position 24 (it may be Windows"),
        ("t.csv", "text,text\n", "t.csv, line 1: the column 'text' stands twice"),
        ("t.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name"', "t.jsonl, line 2: is no valid JSON: Expecting ':'"),
        ("t.jsonl", '{"file_name": "a.png", "text": "x"}\n[1]', "t.jsonl, line 2: is no JSON object"),
        ("t.jsonl", '{"file_name": "a.png", "text": null}', "t.jsonl, line 1: text holds None where a text is needed"),
        ("t.jsonl", '{"file_name": ["a.png"], "text": "x"}', "line 1: file_name is ['a.png'] where a path is needed"),
        ("t.json", '[{"file_name": "a.png",\n "text": }]', "t.json is no valid JSON: Expecting value in line 2, column 10"),
        ("t.json", '[{"file_name": "a.png", "text": "x"}, 3]', "t.json, entry 2: is no JSON object"),
        ("t.json", "3", "t.json, entry 1: is no JSON object"),
        ("t.jsonl", '{"file_name": "a.png", "text": "bad \\ud800 x"}', "text is no text: 'bad \\ud800 x' holds half of"),
        ("t.jsonl", '{"file_name": {"bytes": "' + "x" * 9999 + '"}, "text": "x"}', "line 1: file_name is {'bytes': 'xxxx"),
        ("t.csv", CSV + "x" * 300 + ".png,x\n", "cannot be read: File name too long"),
        ("t.csv", CSV + "a.png/b.png,x\n", "a.png/b.png does not exist"),
        ("t.parquet", "no parquet", "t.parquet cannot be read"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "zero.png").touch()
    found = faults(make(text(tmp_path / name, content)))
    assert message.replace("DIR", str(tmp_path)) in found[0] and str(tmp_path / name) in found[0]
    assert len(found[0]) < 1000


def test_all_faults_are_listed_at_once_or_skipped_each_with_its_reason(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    path = text(tmp_path / "t.csv", CSV + "a.png,fine\nb.png,gone\na,b,c\n,empty\n")
    found = faults(make(path))
    assert [line.partition(": ")[0].rpartition(" ")[2] for line in found[:-1]] == ["3", "4", "5"]
    assert found[-1].startswith("data.path: 3 of 4 rows cannot be used; repair them, or leave them out")
    source = make(path, on_error="skip")
    assert [row.id for row in source.rows()] == ["a.png"]
    assert [name for name, _ in source.skipped] == ["b.png", "line 4", "line 5"]


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_damaged_partner_of_a_picture_is_found_before_the_run_and_its_row_can_be_skipped(
    tmp_path: Path, spoilt: int
) -> None:
    pairs = [(f"{n}.jpg", f"{n}-before.jpg") for n in range(3)]
    for name in (name for pair in pairs for name in pair):
        picture(tmp_path / name, (64, 64))
    half = tmp_path / pairs[1][spoilt]
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    path = tmp_path / "t.csv"
    as_csv(path, [{"after": after, "before": before, "text": "x"} for after, before in pairs])
    columns = {"id": None, "caption": "text", "pictures": {"image": "after", "condition_image": "before"}}
    found = faults(make(path, columns=columns))
    assert f"line 3: {('image', 'condition_image')[spoilt]} {half.name} cannot be read" in found[0] and "1 of 3 rows" in found[1]
    source = make(path, columns=columns, on_error="skip")
    assert [row.id for row in source.rows()] == ["0.jpg", "2.jpg"] and source.skipped[0][0] == "1.jpg"


def test_one_name_for_different_pictures_is_a_fault(tmp_path: Path) -> None:
    picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    path = text(tmp_path / "t.csv", "key,file_name,text\n1,a.png,x\n1,b.png,y\n,a.png,z\n")
    found = faults(make(path, columns={**COLUMNS, "id": "key"}))
    assert "line 2: key '1' stands in lines with other pictures too" in found[0]
    assert "line 3: key '1' stands" in found[1] and "line 4: key is '' where a text is needed" in found[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caption": "txt"}, "data.columns.caption: t.csv has no column 'txt', only file_name, text; did you mean text?"),
        ({"id": "key"}, "data.columns.id: t.csv has no column 'key'"),
        ({"pictures": {"image": "file"}}, "data.columns.pictures.image: t.csv has no column 'file'"),
        ({"pictures": {}}, "data.columns.pictures: is empty"),
        ({"pictures": {"prompt": "text"}}, "data.columns.pictures.prompt: is the caption's name"),
    ],
)
def test_columns_that_are_not_there_are_settings_to_change(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = text(tmp_path / "t.csv", CSV + "a.png,x\n")
    with pytest.raises(ConfigError) as caught:
        make(path, columns={**COLUMNS, **changes}).rows()
    assert message in str(caught.value)


def test_a_path_that_is_no_table_is_named(tmp_path: Path) -> None:
    text(tmp_path / "train.csv", CSV)
    text(tmp_path / "notes.txt", "")
    for path, message in (
        (None, "data.path: names no table"),
        (tmp_path / "tarin.csv", "data.path: .*tarin.csv does not exist; did you mean train.csv?"),
        (tmp_path, "data.path: .* is a folder; give a table in it, or read its pictures with data=folder"),
        (tmp_path / "notes.txt", "data.path: notes.txt is no table; tables end in .csv, .tsv"),
        (tmp_path / "train.csv", "data.path: .*train.csv has no rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(path).rows()


def test_numbers_of_a_parquet_file_are_taken_as_text(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    as_parquet(tmp_path / "t.parquet", [{"id": 7, "file_name": "a.png", "text": 12}])
    (row,) = make(tmp_path / "t.parquet", columns={**COLUMNS, "id": "id"}).rows()
    assert (row.id, row.prompt) == ("7", "12")


def test_faults_stand_in_the_order_of_the_lines(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", CSV + "".join(f"{n}.png,x\n" for n in range(12)))
    assert [int(line.partition(": ")[0].rpartition(" ")[2]) for line in faults(make(path))[:-1]] == list(range(2, 14))


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.data._tables.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="data.path: t.parquet needs the package pyarrow; pip install"):
        make(text(tmp_path / "t.parquet", "")).rows()


def test_a_name_that_stands_twice_in_a_json_object_is_a_fault(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    lines = faults(make(text(tmp_path / "t.jsonl", '{"file_name": "a.png", "text": "one", "text": "two"}\n')))
    assert lines[0].endswith("t.jsonl, line 1: has the name 'text' twice in one object")
    assert "t.json has the name 'a.png' twice" in faults(make(text(tmp_path / "t.json", '{"a.png": "one", "a.png": "two"}')))[0]
