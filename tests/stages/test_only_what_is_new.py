"""After any change of the data, what is encoded is what is new, and nothing else.   pytest tests/stages/test_only_what_is_new.py"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from flowrun import cli
from flowrun.cache import Cache
from flowrun.run import assemble
from flowrun.shelf import Job
from flowrun.stages.cache import _Filler
from tests.conftest import SMALL, Runs, losses

COLOURS = ("red", "green", "blue", "white", "black", "orange", "purple", "pink", "gray", "brown")
PLAIN = tuple(text for text in SMALL if not text.startswith("data."))
FOLDER = (*PLAIN, "data=folder", "data.path=pictures")
PICTURE, TEXT = "target_latents", "text"  # the units that encode them


def add(folder: Path, name: str, colour: str, caption: str | None = None) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 50), colour).save(path)
    path.with_suffix(".txt").write_text(caption or f"{colour} card", encoding="utf-8")
    return path


def command(*overrides: str) -> int:
    return cli.main([*FOLDER, *overrides])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(row, unit) of every value that is made from now on."""
    made, put = [], _Filler._put

    def counted(self: _Filler, job: Job, records: dict) -> None:
        made.extend((job.row.id, job.shelf.split.units[i].name) for i in records)
        put(self, job, records)

    monkeypatch.setattr(_Filler, "_put", counted)
    return made


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `pictures` and the `cache` of them."""
    folder = tmp_path_factory.mktemp("cached")
    for i, colour in enumerate(COLOURS[:5]):
        add(folder / "pictures", f"{i}.png", colour)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main([*FOLDER, "cache.root=cache", "stage=cache"]) == 0
    return folder


def rename(folder: Path) -> None:
    for ending in (".png", ".txt"):
        (folder / f"1{ending}").rename(folder / f"zz{ending}")


def remove(folder: Path) -> None:
    (folder / "2.png").unlink(), (folder / "2.txt").unlink()


def say(folder: Path, caption: str) -> None:
    (folder / "3.txt").write_text(caption, encoding="utf-8")


CHANGES: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "nothing": (lambda folder: None, []),
    "a row before the others": (lambda f: add(f, "00.png", "pink"), [("00.png", TEXT), ("00.png", PICTURE)]),
    "a row with a known caption": (lambda f: add(f, "9.png", "pink", "red card"), [("9.png", PICTURE)]),
    "a row with a known picture": (lambda f: add(f, "9.png", "red", "a new card"), [("9.png", TEXT)]),
    "an edited caption": (lambda f: say(f, "a card as white as snow"), [("3.png", TEXT)]),
    "white space around a caption": (lambda f: say(f, "  white card\n\n"), []),
    "another picture of the name": (lambda f: add(f, "1.png", "pink", "green card"), [("1.png", PICTURE)]),
    "pictures that change places": (lambda f: (add(f, "0.png", "green"), add(f, "1.png", "red")), []),
    "a row less": (remove, []),
    "a renamed row": (rename, []),
    "a new time of change": (lambda f: os.utime(f / "1.png", (1, 1)), []),
}


def to_make(folder: Path, *overrides: str) -> list[tuple[str, str]]:
    """(row, unit) of what the cache stage would run."""
    work = assemble([*FOLDER, f"data.path={folder}", *overrides]).library.work()
    return [(job.row.id, job.shelf.split.units[i].name) for job in work for i in job.units]


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_is_new_is_to_be_made(tmp_path: Path, cached: Path, change: str) -> None:
    act, new = CHANGES[change]
    act(shutil.copytree(cached / "pictures", tmp_path / "pictures"))
    assert to_make(tmp_path / "pictures", f"cache.root={cached / 'cache'}") == new


TRAINING_ONLY = (
    "adapter=lora", "adapter.lora_base_model=[transformer]", "adapter.rank=4", "optimizer.lr=0.5", "optimizer.ema=0",
    "train.batch_size=3", "train.steps=7", "train.accumulate=2", "train.repeat=3", "seed=5", "processes=2",
    "task.density=uniform", "task.shift=3", "task.splitter=ordered", "model.components.transformer.num_layers=2",
    "cache.flush_mb=1", "data.check=full", "data.on_error=skip",
)  # fmt: skip


def test_what_reaches_no_cached_value_asks_for_nothing(cached: Path) -> None:
    root = f"cache.root={cached / 'cache'}"
    assert to_make(cached / "pictures", root, *TRAINING_ONLY) == []
    assert to_make(cached / "pictures", root, "data.geometry.size=[40,40]") == [(f"{i}.png", PICTURE) for i in range(5)]


def test_added_and_edited_rows_are_encoded_and_the_others_are_not(runs: Runs, encoded: list[tuple[str, str]]) -> None:
    folder = runs.folder / "pictures"
    for i, colour in enumerate(COLOURS[:3]):
        add(folder, f"{i}.png", colour)
    assert command("stage=cache") == 0
    assert Counter(encoded) == Counter([(f"{i}.png", unit) for i in range(3) for unit in (TEXT, PICTURE)] + [("0.png", TEXT)])
    encoded.clear()
    add(folder, "00.png", "pink"), add(folder, "1.png", "green", "grass")
    assert command("stage=cache") == 0
    assert encoded == [("00.png", TEXT), ("00.png", PICTURE), ("1.png", TEXT)]
    assert Cache(runs.folder / "outputs" / "cache").verify() == []


def test_a_damaged_picture_costs_its_own_row_only_and_is_made_when_repaired(
    runs: Runs, encoded: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.folder / "pictures"
    for i, colour in enumerate(COLOURS):
        add(folder, f"{i}.png", colour)
    whole = (folder / "6.png").read_bytes()
    (folder / "6.png").write_bytes(whole[: len(whole) // 2])
    assert command() == 2
    told = capsys.readouterr().err
    assert "pictures/6.png: cannot be read" in told and "run the same command again: the others are stored" in told
    assert {row for row, unit in encoded if unit == PICTURE} == {f"{i}.png" for i in range(10) if i != 6}
    assert runs.newest("train") is None, "it does not train on the nine"
    encoded.clear()
    (folder / "6.png").write_bytes(whole)
    assert command("train.steps=2") == 0
    assert Counter(encoded) == {("6.png", PICTURE): 1}, "its caption was fine"


def test_pictures_of_one_name_in_different_folders_have_a_value_each(runs: Runs) -> None:
    """Of equal size, in pixels and in bytes, and with equal captions."""
    for folder, colour in (("x", "#ff0000"), ("y", "#0000ff"), ("y/x", "#00ff00")):
        add(runs.folder / "pictures", f"{folder}/1.bmp", colour, "a card")
    assert len({path.stat().st_size for path in runs.folder.rglob("1.bmp")}) == 1
    lines = [f'{{"file_name": "{folder}/1.bmp", "text": "a card"}}' for folder in ("x", "y", "y/x")]
    (runs.folder / "pictures" / "t.jsonl").write_text("\n".join(lines))
    for data in (["data=folder", "data.path=pictures"], ["data=table", "data.path=pictures/t.jsonl"]):
        settings = [*PLAIN, *data, "stage=cache", "task.caption_dropout=0"]
        assert cli.main(settings) == 0
        shelf = assemble(settings).library.rows
        assert [row.id for row in shelf.rows] == ["x/1.bmp", "y/1.bmp", "y/x/1.bmp"]
        ((target, _),) = [output for output in shelf.outputs if shelf.split.units[output[0]].name == PICTURE]
        values = shelf.stacked([(row, 0) for row in range(3)], (target, ("shared", PICTURE)))  # [3, ...]
        assert len({tuple(value.flatten().tolist()) for value in values}) == 3


@pytest.mark.slow
def test_two_runs_at_once_share_a_cache(runs: Runs) -> None:
    """They differ in what reaches no cached value."""
    for i, colour in enumerate(COLOURS):
        add(runs.folder / "pictures", f"{i}.png", colour)
    common = ("adapter=lora", "adapter.lora_base_model=[transformer]", "task.trainable_models=[]", "train.steps=2")
    settings = [("adapter.rank=4", "optimizer.lr=1e-3", "run_id=a"), ("adapter.rank=8", "optimizer.lr=1e-2", "run_id=b")]
    started = [forked(lambda words=words: command(*common, *words)) for words in settings]
    assert [os.waitpid(child, 0)[1] for child in started] == [0, 0]
    assert Cache(runs.folder / "outputs" / "cache").verify() == []
    assert to_make(runs.folder / "pictures", *common) == []
    curves = [losses(run) for name in "ab" for run in runs.folder.glob(f"outputs/runs/train/*/{name}")]
    assert [len(curve) for curve in curves] == [2, 2] and curves[0][0] == curves[1][0]


def forked(act: Callable[[], int]) -> int:
    """A child process that ends with what `act` returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = act()
        finally:
            os._exit(code)
    return child
