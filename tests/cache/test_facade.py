"""pytest tests/cache/test_facade.py: Cache(path) and python -m flowrun.cache."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import fill, flip, key_of, same, shard_files, value_at, value_of

from flowrun.cache import Cache
from flowrun.cache.__main__ import main
from flowrun.cache.layout import Layout, this_host
from flowrun.cache.manifest import Kept, ManifestRow, Part, Parts, newest_manifest, write_manifest
from flowrun.cache.store import Store
from flowrun.config import ConfigError, Failure
from flowrun.files import new_writer

PARTS = Parts("emoji", "emoji", {}, {})
KEPT = Kept(0, "unit", "shared", "latents")
DEAD = f"{this_host()}-999999999-0123456789ab"


def manifest(root: Path, numbers: range, parts: Parts = PARTS, begun: bool = False) -> Path:
    """Row n needs value n."""
    return write_manifest(
        root,
        parts,
        [ManifestRow(f"row {n}", f"caption {n}", (8, 8), bytes(16), "", {KEPT: key_of(n)}) for n in numbers],
        begun,
    )


def holding(root: Path, number: int) -> Path:
    (path,) = [path for path in shard_files(root) if value_of(number).numpy().tobytes() in path.read_bytes()]
    return path


def intact(root: Path, numbers: range) -> bool:
    store = Store(root)
    return store.missing([key_of(n) for n in numbers]) == [] and all(
        same(store.get(key_of(n)), value_of(n)) for n in numbers
    )


def test_a_sound_cache_has_no_faults(root: Path) -> None:
    fill(root, range(9), per_shard=4).merge()
    manifest(root, range(9))
    assert Cache(root).verify() == [] and Cache(str(root)).verify() == []


def test_every_row_that_a_damaged_value_concerns_is_listed(root: Path) -> None:
    fill(root, range(6), per_shard=3)
    shared = [ManifestRow(f"image {n}", "", (8, 8), bytes(16), "", {KEPT: key_of(n % 3)}) for n in range(6)]
    write_manifest(root, PARTS, shared)
    path = holding(root, 1)
    flip(path, value_at(path, 1))
    (finding,) = Cache(root).verify()
    assert (finding.where, finding.key, finding.rows) == (path.name, key_of(1).hex(), ("image 1", "image 4"))
    assert "checksum" in finding.what and "image 4" in str(finding)
    (gap,) = Cache(root).verify()  # now known to be missing, until it is made again
    assert gap.key == key_of(1).hex() and gap.rows == ("image 1", "image 4")
    fill(root, range(6), per_shard=3)
    assert Cache(root).verify() == []


def test_damage_to_a_value_that_no_manifest_needs_names_the_row_it_was_stored_for(root: Path) -> None:
    fill(root, range(2), per_shard=2)
    path = holding(root, 1)
    flip(path, value_at(path, 1))
    assert [finding.rows for finding in Cache(root).verify()] == [("row 1",)]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_that_cannot_be_read_is_listed_with_the_rows_that_need_it(root: Path, indexed: bool) -> None:
    store = fill(root, range(6), per_shard=3)
    if indexed:
        store.catalog.save_index()
    manifest(root, range(6))
    path = holding(root, 1)
    flip(path, path.read_bytes().index(key_of(1)))
    shard, gap = Cache(root).verify()
    assert shard.where == path.name and not shard.rows
    assert gap.rows == ("row 0", "row 1", "row 2") and "3 of its values" in gap.what


def test_a_damaged_manifest_is_listed(root: Path) -> None:
    path = manifest(root, range(3))
    flip(path, path.read_bytes().index(key_of(1)))
    assert [finding.where for finding in Cache(root).verify()] == [path.name]


def test_stats_count_what_is_there(root: Path) -> None:
    fill(root, range(10), per_shard=5)
    manifest(root, range(4))
    manifest(root, range(2, 6), replace(PARTS, data="other"))
    (root / "shards" / "notes.txt").write_text("mine")
    (root / "shards" / f".x.safetensors.{DEAD}.part").write_text("partial")
    path = holding(root, 9)
    flip(path, value_at(path, 9))
    Cache(root).verify()
    stats = Cache(root).stats()
    size = value_of(0).nbytes + len('{"tensor": 0}')
    assert (stats.manifests, stats.rows, stats.values, stats.shards) == (2, 6, 9, 2)
    assert (stats.orphans, stats.set_aside, stats.temporary_files, stats.unknown_files) == (3, 1, 1, 1)
    assert stats.shard_bytes == sum(path.stat().st_size for path in shard_files(root))
    assert (stats.orphan_bytes, stats.value_bytes) == (3 * size, 10 * size)


def test_rows_are_those_of_the_manifests_newest_first(root: Path) -> None:
    manifest(root, range(2))
    manifest(root, range(5, 6), replace(PARTS, data="other"))
    assert [(m.parts.data, row.id, row.size) for m, row in Cache(root).rows()] == [
        ("other", "row 5", (8, 8)), ("emoji", "row 0", (8, 8)), ("emoji", "row 1", (8, 8))]  # fmt: skip


def test_prune_removes_what_no_manifest_needs_and_nothing_else(root: Path) -> None:
    fill(root, range(12), per_shard=4)
    manifest(root, range(2, 6))
    notes = [root / "notes.txt", root / "shards" / "notes.txt", root / "manifests" / "mine.safetensors"]
    for note in notes:
        note.write_text("mine")
    before = sum(path.stat().st_size for path in shard_files(root))
    pruned = Cache(root).prune()
    after = sum(path.stat().st_size for path in shard_files(root))
    assert pruned.values == 8 and pruned.bytes == before - after > 0 and len(Store(root)) == 4
    assert intact(root, range(2, 6)) and all(note.read_text() == "mine" for note in notes)
    assert Cache(root).prune().values == 0 and Cache(root).verify() == []


def test_prune_takes_damaged_values_and_shards_away(root: Path) -> None:
    fill(root, range(9), per_shard=3)
    manifest(root, range(9))
    one, whole = holding(root, 0), holding(root, 3)
    flip(one, value_at(one, 0))
    whole.write_bytes(whole.read_bytes()[:-9])
    Cache(root).verify()
    Cache(root).prune()
    assert not list((root / "quarantine").iterdir()) and whole not in shard_files(root) and one not in shard_files(root)
    fill(root, range(9), per_shard=9)
    assert intact(root, range(9)) and Cache(root).verify() == []


def test_superseded_manifests_go_on_request_with_what_only_they_need(root: Path) -> None:
    fill(root, range(6), per_shard=6)
    old = manifest(root, range(3))
    new = manifest(root, range(2, 5), replace(PARTS, made_of={"data.size": Part("128", "128")}))
    assert Cache(root).prune().values == 1 and old.exists()  # value 5
    pruned = Cache(root).prune(superseded=True)
    assert (pruned.manifests, pruned.values) == (1, 2) and not old.exists() and new.exists()
    assert intact(root, range(2, 5))


def test_what_a_run_has_made_that_did_not_come_to_its_end_is_needed_and_what_it_lacks_is_no_fault(root: Path) -> None:
    fill(root, range(6), per_shard=2)
    manifest(root, range(2))
    begun = manifest(root, range(2, 9), replace(PARTS, made_of={"data.size": Part("128", "128")}), begun=True)
    assert Cache(root).prune(superseded=True).values == 0 and begun.exists() and Cache(root).verify() == []
    whole = newest_manifest(root, "emoji", "emoji", "")
    assert whole is not None and whole.ids.all() == ["row 0", "row 1"], "only that of a run that has ended tells what there is"
    ended = manifest(root, range(2, 6), replace(PARTS, made_of={"data.size": Part("128", "128")}))
    assert ended.exists() and not begun.exists()


def test_of_several_runs_that_did_not_come_to_their_end_the_last_one_s_stays(root: Path) -> None:
    sizes = [replace(PARTS, made_of={"data.size": Part(str(size), "")}) for size in range(4)]
    older, first, second = (manifest(root, range(n), sizes[n], begun) for n, begun in enumerate((False, True, True)))
    Cache(root).prune(superseded=True)
    assert [path.exists() for path in (older, first, second)] == [True, False, True]
    last = manifest(root, range(3), sizes[3])
    Cache(root).prune(superseded=True)
    assert [path.exists() for path in (older, second, last)] == [False, False, True]


def test_prune_refuses_while_a_run_writes_and_after_its_death_cleans_up(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    with Store(root).writer(64, 30), pytest.raises(Failure, match="is in use .*; prune it when that has ended"):
        Cache(root).prune()
    assert intact(root, range(3))
    (root / "writers" / DEAD).touch()
    assert Cache(root).prune().values == 3 and not list((root / "writers").iterdir())


def test_what_a_living_process_is_writing_is_not_pruned(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    living, dead = (root / "manifests" / f".x.safetensors.{writer}.part" for writer in (new_writer(), DEAD))
    living.touch(), dead.touch()
    assert Cache(root).prune().temporary_files == 1
    assert living.exists() and not dead.exists()


def test_a_writer_on_another_machine_counts_as_alive_for_a_day(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    mark = root / "writers" / "elsewhere-1-0123456789ab"
    mark.touch()
    with pytest.raises(Failure, match="in use"):
        Cache(root).prune()
    os.utime(mark, (0, 0))
    assert Cache(root).prune().values == 3 and not mark.exists()


def test_prune_refuses_when_it_cannot_know_what_is_needed(root: Path) -> None:
    fill(root, range(3), per_shard=3)
    path = manifest(root, range(3))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Failure, match=path.name):
        Cache(root).prune()
    assert intact(root, range(3))


def test_a_reader_goes_on_while_orphans_are_pruned(root: Path) -> None:
    fill(root, range(6), per_shard=3)
    manifest(root, range(0, 6, 2))
    reader = Store(root)
    Cache(root).prune()
    assert all(same(reader.get(key_of(n)), value_of(n)) for n in range(0, 6, 2))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; give the folder that cache.root names"):
        Cache(tmp_path / "none")


def test_an_empty_folder_is_an_empty_cache_and_stays_empty(tmp_path: Path) -> None:
    assert Cache(tmp_path).verify() == [] and Cache(tmp_path).stats().values == 0 and list(Cache(tmp_path).rows()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_commands_and_their_exit_codes(root: Path, capsys: pytest.CaptureFixture) -> None:
    fill(root, range(4), per_shard=2)
    manifest(root, range(3))
    assert main(["verify", str(root)]) == 0 and "no fault" in capsys.readouterr().out
    assert main(["stats", str(root)]) == 0
    assert "orphans                        1" in capsys.readouterr().out
    assert main(["prune", str(root)]) == 0
    assert "values                         1" in capsys.readouterr().out
    path = holding(root, 2)
    flip(path, value_at(path, 2))
    assert main(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    assert "row 2" in out and "1 faults; run stage=cache" in out
    assert main(["stats", str(root / "none")]) == 2
    assert capsys.readouterr().err.startswith("flowrun.cache: cache: ")
    with Store(root).writer(64, 30):
        assert main(["prune", str(root)]) == 1
    assert "in use" in capsys.readouterr().err
    for wrong in ([], ["stats"], ["empty", str(root)]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, flowrun.cache.__main__ as m; m.main(['stats', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, os.getcwd()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    helped = subprocess.run(
        [sys.executable, "-m", "flowrun.cache", "--help"], capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0 and "stats|verify|prune" in helped.stdout


def test_the_layout_touches_nothing_by_itself(root: Path) -> None:
    assert not root.exists() and Layout(root).shards == root / "shards" and not root.exists()
