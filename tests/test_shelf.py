"""pytest tests/test_shelf.py: every row has in every variant the keys that its inputs alone give, however many are made at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrun import shelf
from flowrun.cache.key import digest
from flowrun.cache.keyplan import KeyPlan
from flowrun.cache.store import Store
from flowrun.data import Row, Source
from flowrun.files import HashFile
from flowrun.graph import Unit
from flowrun.shelf import Shelf
from flowrun.splitters import split
from flowrun.variants import Variants


class Listed(Source):
    """Rows of which some have a mask too. Two variants: the second one has its own picture."""

    names, variants = ("image", "mask", "prompt"), 2

    def rows(self) -> list[Row]:
        return [Row(id=f"r{n}", prompt=f"caption {n % 2}", size=(8, 8), extra={"seen": 0}) for n in range(7)]

    def variant(self, row: Row, number: int) -> Row:
        return replace(row, extra={"seen": number})

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        masked = {"mask": hash_file(Path(f"{row.id}.mask"))} if row.id in ("r2", "r5") else {}
        return {"prompt": digest(row.prompt), "image": hash_file(Path(f"{row.id}.{row.extra['seen']}")), **masked}


def process(ctx: Any, **inputs: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_rows_whose_keys_are_made_together_have_those_of_each_alone(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "AT_ONCE", at_once)
    units = [
        Unit(name="text", input_params=("prompt",), output_params=("embeds",), process=process),
        Unit(name="latents", input_params=("image", "mask"), output_params=("moments",), process=process),
        Unit(name="draw", input_params=("moments",), output_params=("noise",), random="frozen", process=process),
    ]
    part, source = split("replay", units, {"transformer"}, ("embeds", "moments", "noise")), Listed(None)
    rows, changes = source.rows(), [{}, {"prompt": ""}]
    plan = KeyPlan(part, {}, b"", 0)
    kept = Shelf(part, source, rows, Variants(source, changes), plan, _name, Store(tmp_path))

    def alone(row: Row, change: Mapping[str, str]) -> dict:
        given = {**source.fingerprints(row, _name), **{name: digest(name, value) for name, value in change.items()}}
        return plan.keys({("shared", name): key for name, key in given.items()}, row.id)

    expected = [alone(source.variant(row, n), change) for row in rows for n in (0, 1) for change in changes]
    assert [kept.keys(place) for place in kept.places()] == expected
    assert [kept.stamp(n) for n in range(len(rows))] == [
        digest(*(source.fingerprints(source.variant(row, n), _name) for n in (0, 1))) for row in rows
    ]


def _name(path: Path) -> bytes:
    """Stands for a file's content."""
    return digest(str(path))
