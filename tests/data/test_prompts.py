"""Prompts without pictures: text files and tables, names that last, and tasks that need no picture.   pytest tests/data/test_prompts.py"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from flowrun import cli
from flowrun.config import ConfigError, DataError
from flowrun.data.prompts import Prompts
from flowrun.registry import SOURCES
from tests.conftest import SMALL, Runs, losses

WORDS = (*(word for word in SMALL if not word.startswith("data.")), "data=prompts")
SAID = ["a cat, asleep", "りんご 🍎", "001", "NaN", '"quoted"', "=1+1"]


def make(path: Path, **changes: Any) -> Prompts:
    columns = {"id": None, "caption": "prompt", "height": None, "width": None, **changes.pop("columns", {})}
    node = {"source": "prompts", "path": str(path), "columns": columns, "size": [32, 48], "on_error": "stop", **changes}
    return Prompts(SOURCES.build("data", Prompts, node))


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def faults(source: Prompts) -> list[str]:
    with pytest.raises(DataError) as caught:
        source.rows()
    return str(caught.value).splitlines()


def written(path: Path) -> Path:
    """SAID in the format of the ending, by other means than ours."""
    rows = [{"prompt": prompt} for prompt in SAID]
    quoted = ["prompt", *('"' + prompt.replace('"', '""') + '"' for prompt in SAID)]
    match path.suffix:
        case ".txt":
            text(path, "\ufeff" + "\r\n\r\n".join(SAID))
        case ".csv" | ".tsv":
            text(path, "\n".join(quoted))
        case ".json":
            text(path, json.dumps(rows))
        case ".jsonl":
            text(path, "\n".join(map(json.dumps, rows)))
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", ["txt", "csv", "tsv", "json", "jsonl", "parquet"])
def test_every_format_gives_the_same_rows(ending: str, tmp_path: Path) -> None:
    source = make(written(tmp_path / f"p.{ending}"))
    rows = source.rows()
    assert [row.prompt for row in rows] == SAID
    assert {row.size for row in rows} == {(32, 48)} and source.names == ("prompt",)
    assert source.load(rows[0]) == {"prompt": SAID[0]} and source.load(rows[0], ["image"]) == {}
    assert [row.id for row in rows] == [row.id for row in make(written(tmp_path / "other.txt")).rows()]


def test_a_prompt_keeps_its_name_wherever_it_stands(tmp_path: Path) -> None:
    before = {row.id: row.prompt for row in make(text(tmp_path / "p.txt", "\n".join(SAID))).rows()}
    shuffled = random.Random(1).sample(SAID, len(SAID))
    after = {row.id: row.prompt for row in make(text(tmp_path / "p.txt", "\n".join(["new", *shuffled]))).rows()}
    assert len(before) == len(SAID) and before.items() <= after.items()


def test_columns_may_give_names_and_sizes(tmp_path: Path) -> None:
    path = text(tmp_path / "p.csv", "key,say,h,w\n007,a cat,64,32\n8,a dog,32,96\n")
    rows = make(path, columns={"id": "key", "caption": "say", "height": "h", "width": "w"}).rows()
    assert [(row.id, row.prompt, row.size) for row in rows] == [("007", "a cat", (64, 32)), ("8", "a dog", (32, 96))]


def test_empty_lines_are_passed_over_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert [row.prompt for row in make(text(tmp_path / "p.txt", "one\n\n  \ntwo\n")).rows()] == ["one", "two"]
    assert "2 empty lines passed over" in caplog.text


def test_a_prompt_that_stands_twice_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    path = text(tmp_path / "p.txt", "a cat\na dog\n a cat \n")
    assert faults(make(path)) == [
        f"{path}, line 3: its prompt stands in line 1 already",
        "data.path: 1 of 3 rows cannot be used; repair them, or leave them out with data.on_error=skip",
    ]
    source = make(path, on_error="skip")
    assert [row.prompt for row in source.rows()] == ["a cat", "a dog"]
    assert source.skipped == [("line 3", "its prompt stands in line 1 already")]


def test_what_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    path = text(tmp_path / "p.csv", "key,prompt,h,w\n1,a,32,32\n,b,32,32\n3,,32,32\n4,d,big,32\n1,e,32,32\n")
    source = make(path, columns={"id": "key", "height": "h", "width": "w"})
    assert faults(source)[:4] == [
        f"{path}, line 3: key is '' where a text is needed",
        f"{path}, line 4: prompt is empty",
        f"{path}, line 5: h and w are 'big' and '32' where pixels are needed",
        f"{path}, line 6: its name '1' stands in line 2 already",
    ]
    assert "line 1" not in faults(make(text(tmp_path / "x.jsonl", '{"prompt": 3.5}\n[]\n')))[0].replace("x.jsonl, line 1", "")


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, "data.path: .* has no prompts; give a file with some"),
        ("\n\n", {}, "data.path: .* has no prompts"),
        ("a\n", {"size": [32]}, r"data.size: is \[32\]; give \[height, width\] in pixels"),
        ("a\n", {"columns": {"height": "h"}}, "data.columns.width: is null while the other side has a column"),
    ],
)
def test_wrong_settings_are_refused(content: str, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(text(tmp_path / "p.txt", content), **changes).rows()


def test_bad_encoding_and_a_missing_column_are_named(tmp_path: Path) -> None:
    assert "p.txt is not UTF-8: byte 0xe9 at position 3" in faults(make(text(tmp_path / "p.txt", "caf\u00e9".encode("cp1252"))))[0]
    with pytest.raises(ConfigError, match=r"data.columns.caption: p.csv has no column 'prompt', only promt; did you mean promt\?"):
        make(text(tmp_path / "p.csv", "promt\na\n")).rows()


def test_a_task_that_needs_pictures_refuses_them_in_one_line(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = text(tmp_path / "p.txt", "a cat\n")
    assert cli.main([*WORDS, f"data.path={path}"]) == 2
    assert not (runs.folder / "outputs").exists()
    assert capsys.readouterr().err.splitlines() == [
        "flowrun: data.source: the data give prompt, and not image; use data that have it, "
        "e.g. data=folder data.path=DIR, or a task or model that does without"
    ]


def test_a_task_that_needs_none_trains_on_them_and_the_same_from_the_cache(runs: Runs, tmp_path: Path) -> None:
    path = text(tmp_path / "p.txt", "a cat\na dog\na cow\n")
    words = (*WORDS, f"data.path={path}", "train.steps=6", "task.algorithm=tests.plugins:NoPicture", "resume=none")

    def trained(*more: str) -> list[str]:
        assert cli.main([*words, *more]) == 0
        return losses(runs.newest("train"))

    live = trained("task.splitter=none", "run_id=a")
    assert runs.newest("cache") is None and len(live) == 6
    assert trained("run_id=b") == live
    assert runs.newest("cache") is not None
    path.unlink()
    assert trained("run_id=c") == live, "the cache remembers the rows"
