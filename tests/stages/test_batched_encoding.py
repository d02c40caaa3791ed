"""Encoding several rows at once: close to row by row, known as something else, and content with little memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flowrun import cli
from flowrun.cache.store import Store
from flowrun.pipelines._minilm import MiniLM
from flowrun.run import assemble
from tests.conftest import SMALL, Runs, losses, result

REAL = ["data=emoji", "data.size=64", "data.captions=[red apple,pear,lemon]", "tracker=[csv]", "sample.prompts=[]",
        "train.batch_size=2", "train.steps=3", "train.log_every=1"]  # fmt: skip


def values(*overrides: str) -> dict[tuple[str, str], torch.Tensor]:
    """(row, name) -> what is cached of it."""
    library = assemble(list(overrides)).library
    store, found = Store(library.root), {}
    for place in library.rows.places():
        for (_, param), key in library.rows.keys(place).items():
            found[library.rows.rows[place].id, param[1]] = store.get(key)
    return found


@pytest.mark.parametrize("model", ["sd3_tiny", "flux_tiny"])
@pytest.mark.slow
def test_values_are_those_of_row_by_row_encoding_up_to_rounding(runs: Runs, model: str) -> None:
    command = [f"model={model}", *REAL, "task.caption_dropout=0", "stage=cache"]
    assert cli.main(command) == 0
    assert cli.main([*command, "cache.batch=2"]) == 0
    alone, together = values(*command), values(*command, "cache.batch=2")
    assert alone.keys() == together.keys() and len(alone) == 3 * 4
    for place, value in alone.items():
        assert torch.allclose(value.float(), together[place].float(), atol=1e-4, rtol=1e-4), place
    log = (runs.newest("cache") / "flowrun.log").read_text()
    assert re.search(r"encoding 2 rows at once changes a row's values by at most: prompt_embeds \d\.\de[-+]\d\d", log)
    assert "so losses may differ in their last bits" in capture(runs, [*command, "cache.batch=2", "dry_run=true"])


@pytest.mark.parametrize("model", ["sd3_tiny", "emoji_tiny"])
def test_each_row_is_stored_alone_and_not_with_the_rows_it_was_encoded_with(runs: Runs, model: str) -> None:
    size = {}
    for batch in (1, 3):
        root = runs.folder / f"cache{batch}"
        command = [f"model={model}", *REAL, "task.caption_dropout=0", "stage=cache", f"cache.batch={batch}", f"cache.root={root}"]
        assert cli.main(command) == 0
        size[batch] = result(runs.newest("cache"))["bytes"], sum(file.stat().st_size for file in (root / "shards").iterdir())
        assert size[batch][1] < size[batch][0] * 1.2 + 20_000, "the shards hold little more than the values"
    assert size[1][0] == size[3][0] > 50_000
    assert abs(size[1][1] - size[3][1]) < 200


def capture(runs: Runs, command: list[str]) -> str:
    return "\n".join(assemble(command).warnings)


@pytest.mark.slow
def test_they_are_other_values_than_those_made_row_by_row(runs: Runs) -> None:
    runs("stage=cache")
    plain, batched = (assemble([*SMALL, f"cache.batch={n}"]).library for n in (1, 4))
    assert not plain.missing()
    texts = {unit.name for i in batched.rows.split.needed if (unit := batched.rows.split.units[i]).process_rows is None}
    assert texts == {"target_latents"}
    assert len(batched.missing()) == 10, "two of each caption and of the empty one; the pictures' values are shared"
    run = runs("cache.batch=4", "train.steps=3")
    assert len(losses(run)) == 3


def test_captions_of_other_lengths_do_not_reach_each_other(runs: Runs) -> None:
    from flowrun.pipelines._minilm import folder

    network, texts = MiniLM(folder()).eval(), ["a", "a much longer caption of many words", "two words"]
    with torch.no_grad():
        for text, row in zip(texts, network.rows(texts), strict=True):
            assert row.shape == network(text).shape and torch.allclose(row, network(text), atol=1e-5)


def limited(monkeypatch: pytest.MonkeyPatch, most: int, bad: str | None = None) -> list[int]:
    """The encoder runs out of memory beyond `most` prompts, and always for `bad`. Returns the sizes that were tried."""
    tried, rows = [], MiniLM.rows

    def short(self: MiniLM, prompts: list[str]) -> list[torch.Tensor]:
        tried.append(len(prompts))
        if len(prompts) > most or bad in prompts:
            raise torch.OutOfMemoryError("out of memory")
        return rows(self, prompts)

    monkeypatch.setattr(MiniLM, "rows", short)
    return tried


def test_when_memory_does_not_suffice_it_goes_on_with_halves(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = limited(monkeypatch, most=1)
    run = runs("cache.batch=4", "train.steps=2")
    assert tried[:3] == [4, 2, 1] and len(losses(run)) == 2
    assert "memory does not suffice for 4 rows at once" in (runs.newest("cache") / "flowrun.log").read_text()


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_row_that_is_too_large_alone_ends_the_stage_and_training_does_not_start(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], batch: int
) -> None:
    with monkeypatch.context() as short:
        limited(short, most=1, bad="pear")
        runs(f"cache.batch={batch}", code=1)
    assert "memory does not suffice to encode row 1F350 alone" in capsys.readouterr().err
    assert runs.newest("train") is None
    runs(f"cache.batch={batch}", "stage=train", code=2)
    assert "stage=cache" in capsys.readouterr().err
    there = len(Store(Path("outputs/cache")))
    assert there >= 3, "what was made before is stored"
    assert len(losses(runs(f"cache.batch={batch}", "train.steps=2"))) == 2


def test_a_batch_that_no_unit_can_use_is_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("task.trainable_models=[transformer,text_encoder]", "cache.batch=4", code=2)
    assert "cache.batch: is 4, but no cached unit can encode several rows at once; give 1" in capsys.readouterr().err
