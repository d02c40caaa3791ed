"""pytest tests/cache/test_manifest.py: what was cached for which rows, and what differs from what is asked for now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import flip, key_of

from flowrun.cache.manifest import Kept, Manifest, ManifestRow, Part, Parts, manifests, newest_manifest, write_manifest
from flowrun.cache.tensorfile import Damaged

EMBEDS, EMPTY = Kept(0, "text", "shared", "embeds"), Kept(1, "text", "shared", "embeds")
PARTS = Parts(
    model="emoji", data="emoji",
    made_of={"text_encoder": Part("aaaa", "MiniLM, frozen"), "data.size": Part("64", "64")},
    environment={"torch": "2.13", "device": "cpu"},
)  # fmt: skip


def rows(count: int) -> list[ManifestRow]:
    keys = [{EMBEDS: key_of(n), EMPTY: key_of(0)} for n in range(count)]
    return [ManifestRow(f"red/é{n}.png", f"caption {n}", (64, n), key_of(99 + n), "", keys[n]) for n in range(count)]


def with_part(name: str, part: Part | None) -> Parts:
    made_of = {**PARTS.made_of, name: part}
    return replace(PARTS, made_of={name: part for name, part in made_of.items() if part is not None})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = [*rows(3), ManifestRow("bad.png", "", (0, 0), bytes(16), "its second half is missing", {})]
    manifest = Manifest(write_manifest(tmp_path, PARTS, written))
    assert list(manifest.rows()) == written and len(manifest) == 4 and manifest.parts == PARTS
    assert manifest.kept == [EMBEDS, EMPTY]
    assert {key.tobytes() for key in manifest.used_keys()} == {key_of(0), key_of(1), key_of(2)}


def test_a_manifest_of_no_rows(tmp_path: Path) -> None:
    manifest = Manifest(write_manifest(tmp_path, PARTS, []))
    assert list(manifest.rows()) == [] and len(manifest.used_keys()) == 0


def test_differences_name_the_part_with_its_old_and_new_description() -> None:
    assert PARTS.differences(PARTS) == []
    encoder = with_part("text_encoder", Part("bbbb", "T5, 17 M"))
    assert PARTS.differences(encoder) == ["text_encoder: cached with MiniLM, frozen, configured T5, 17 M"]
    assert encoder.differences(PARTS) == ["text_encoder: cached with T5, 17 M, configured MiniLM, frozen"]
    same_words = with_part("text_encoder", Part("bbbb", "MiniLM, frozen"))
    assert PARTS.differences(same_words) == [
        "text_encoder: cached with MiniLM, frozen [aaaa], configured MiniLM, frozen [bbbb]"
    ]
    other = with_part("text_encoder", Part("aaaa", "the same, described otherwise"))
    assert PARTS.differences(other) == []


def test_parts_that_only_one_side_has_are_named() -> None:
    more = with_part("vae", Part("v", "the new VAE"))
    assert PARTS.differences(more) == ["vae: nothing was cached with it, configured the new VAE"]
    assert more.differences(PARTS) == ["vae: cached with the new VAE, no longer configured"]


def test_the_environment_makes_warnings_and_no_difference() -> None:
    elsewhere = replace(PARTS, environment={"torch": "2.14", "device": "cpu"})
    assert PARTS.differences(elsewhere) == [] and PARTS.id == elsewhere.id
    assert PARTS.warnings(elsewhere) == ["torch: cached with 2.13, now 2.14"] and PARTS.warnings(PARTS) == []


def test_each_set_of_parts_has_a_manifest_and_the_newest_of_its_names_is_found(tmp_path: Path) -> None:
    newer, other_data = with_part("data.size", Part("128", "128")), replace(PARTS, data="folder")
    first, second, third = (
        write_manifest(tmp_path, parts, rows(n)) for n, parts in enumerate((PARTS, newer, other_data))
    )
    assert len({first, second, third}) == 3
    assert newest_manifest(tmp_path, "emoji", "emoji", "").path == second
    assert write_manifest(tmp_path, PARTS, rows(5)) == first  # the same parts: replaced
    assert newest_manifest(tmp_path, "emoji", "emoji", "").path == first and len(Manifest(first)) == 5
    assert newest_manifest(tmp_path, "emoji", "folder", "").path == third
    assert (
        newest_manifest(tmp_path, "sdxl", "emoji", "") is None
        and newest_manifest(tmp_path / "nowhere", "emoji", "emoji", "") is None
    )
    assert [m.path for m in manifests(tmp_path)[0]] == [first, third, second]


def test_data_in_two_places_have_a_manifest_each(tmp_path: Path) -> None:
    here, there = (replace(PARTS, place=place) for place in ("/here", "/there"))
    first, second = write_manifest(tmp_path, here, rows(1)), write_manifest(tmp_path, there, rows(2))
    assert newest_manifest(tmp_path, "emoji", "emoji", "/here").path == first != second
    assert newest_manifest(tmp_path, "emoji", "emoji", "/elsewhere") is None and here.id == there.id


def test_names_that_are_no_file_names_are_kept_in_the_manifest(tmp_path: Path) -> None:
    parts = replace(PARTS, model="my.module:Class", data="../photos & co")
    path = write_manifest(tmp_path, parts, rows(1))
    assert (
        path.parent == tmp_path / "manifests"
        and newest_manifest(tmp_path, "my.module:Class", "../photos & co", "").path == path
    )


def test_a_damaged_manifest_is_reported_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = write_manifest(tmp_path, PARTS, rows(2))
    bad = write_manifest(tmp_path, with_part("data.size", Part("128", "128")), rows(2))
    flip(bad, bad.read_bytes().index(key_of(1)))
    with pytest.raises(Damaged):
        Manifest(bad)
    assert newest_manifest(tmp_path, "emoji", "emoji", "").path == good and bad.name in caplog.text


def test_files_of_other_names_are_passed_over(tmp_path: Path) -> None:
    write_manifest(tmp_path, PARTS, rows(1))
    (tmp_path / "manifests" / "notes.safetensors").write_text("mine")
    found, faults = manifests(tmp_path)
    assert len(found) == 1 and faults == []
