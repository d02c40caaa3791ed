"""The plan says what will happen, and agrees with what then happens."""

from __future__ import annotations

import json

import pytest

from flowrun.config import ConfigError, Stage
from flowrun.plan import columns
from flowrun.run import assemble
from tests.conftest import SMALL, Runs, result


def section(plan: str, title: str) -> list[str]:
    """Lines of one section, the title taken off."""
    lines = plan.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rest = [line for line in lines[start + 1 :]]
    end = next((i for i, line in enumerate(rest) if not line.startswith(" ")), len(rest))
    return [line[12:] for line in [lines[start], *rest[:end]]]


def test_units_are_listed_with_reads_writes_models_stage_and_reason(runs: Runs) -> None:
    plan = str(assemble([*SMALL, "model.pipeline=tests.plugins:Jittered"]).plan)
    header, text, target, jitter = (line.split("  ") for line in section(plan, "units"))
    assert [cell.strip() for cell in header if cell.strip()] == ["unit", "reads", "writes", "models", "stage", "why"]
    assert [cell.strip() for cell in text if cell.strip()][:5] == [
        "text",
        "prompt",
        "pooled_prompt_embeds, prompt_embeds",
        "text_encoder",
        "cache",
    ]
    assert "cache" in [cell.strip() for cell in target]
    assert "train" in [cell.strip() for cell in jitter]
    assert "draws anew each epoch" in "".join(jitter)


def test_models_are_listed_with_the_stages_that_load_them(runs: Runs) -> None:
    split, whole = (section(str(assemble([*SMALL, f"task={task}"]).plan), "models") for task in ("sft_split", "sft"))
    assert split[0].startswith("text_encoder") and split[0].endswith("loaded in: cache")
    assert whole[0].endswith("loaded in: train")
    assert split[1].startswith("transformer") and split[1].endswith("loaded in: train")


def test_what_is_to_be_made_is_what_is_made(runs: Runs) -> None:
    before = section(str(assemble(SMALL).plan), "cache")
    assert before[1] == "0 values there, 14 to make, from 5 rows"  # 4 rows of 3 values, one empty caption of 2 for all
    assert before[2] == "how much that is and how long it takes shows after the first rows"
    runs("stage=cache")
    assert result(runs.newest("cache"))["rows"] == 5
    assert section(str(assemble(SMALL).plan), "cache")[1] == "14 values there, 0 to make, from 0 rows"


@pytest.mark.slow
def test_how_much_is_to_be_made_and_how_long_it_takes_is_forecast_from_earlier_runs(runs: Runs) -> None:
    runs("stage=cache")
    more = "data.captions=[red apple,green apple,pear,lemon,tangerine,strawberry]"
    library = assemble([*SMALL, more]).library
    forecast = library.forecast(library.work())
    assert forecast.rows == 2 and forecast.seconds > 0
    pace = json.loads((library.root / "pace.json").read_text())
    for kind in pace:
        pace[kind] = [10, 36_000.0, 12_000_000.0]  # an hour and 1.2 MB a row
    (library.root / "pace.json").write_text(json.dumps(pace))
    assert section(str(assemble([*SMALL, more]).plan), "cache")[-1] == "about 2.4 MB and 2:00:00 (h:mm:ss), going by earlier runs"
    two = [*SMALL, more, "processes=2"]
    assert section(str(assemble(two).plan), "cache")[-1] == "about 2.4 MB and 1:00:00 (h:mm:ss), going by earlier runs"
    runs(more, "stage=cache")
    assert forecast.bytes == pytest.approx(result(runs.newest("cache"))["bytes"], rel=0.01)
    other_weights = assemble([*SMALL, "model.dtype=bf16"]).library
    assert not other_weights.forecast(other_weights.work()).rows


def test_rows_that_fill_no_batch_are_named_with_what_becomes_of_them(runs: Runs) -> None:
    plan = section(str(assemble([*SMALL, "train.batch_size=5"]).plan), "data")
    assert plan[1] == "32x32 pixels: 4 rows, less than a batch of 5, so in short batches: 1F34E, 1F34F, 1F350, ..."
    assert section(str(assemble([*SMALL, "train.batch_size=5", "train.repeat=2"]).plan), "data")[1] == (
        "32x32 pixels: 4 rows, of which 3 make a short batch in each epoch"
    )
    again = [*SMALL, "train.batch_size=5", "train.remainder=repeat"]
    assert section(str(assemble(again).plan), "data")[1] == (
        "32x32 pixels: 4 rows, less than a batch of 5, so drawn again until it is full: 1F34E, 1F34F, 1F350, ..."
    )
    again[1:] = [SMALL[1], "train.batch_size=3", "train.remainder=repeat"]
    assert section(str(assemble(again).plan), "data")[1] == "32x32 pixels: 4 rows, of which 2 are drawn again in each epoch"
    again[-1] = "train.remainder=drop"
    assert section(str(assemble(again).plan), "data")[1] == "32x32 pixels: 4 rows, of which 1 are left out, others in each epoch"


def test_dropping_what_never_fills_a_batch_is_refused_by_name(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"train.remainder: drop leaves out all rows of 32x32 pixels, too few for a batch of 5: "
                                          r"1F34E, 1F34F, 1F350, \.\.\.; use short or repeat, or smaller batches"):  # fmt: skip
        assemble([*SMALL, "train.batch_size=5", "train.remainder=drop"])


def test_rows_sizes_steps_and_places_are_told(runs: Runs) -> None:
    assembly = assemble(
        [*SMALL, "train.batch_size=3", "train.steps=null", "train.epochs=3", "run_id=x", "adapter=lora"]
    )
    plan = str(assembly.plan)
    assert section(plan, "data") == ["4 rows from emoji", "32x32 pixels: 4 rows, of which 1 make a short batch in each epoch"]
    assert "transformer: LoRA rank 16, fp32" in plan
    assert "6 steps of 3 rows" in plan
    assert section(plan, "results")[-1] == str(runs.folder / "outputs/runs/train/sft_split-emoji_tiny/x")


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [((), (Stage.cache, Stage.train)), (("stage=train",), (Stage.train,)), (("task=sft",), (Stage.train,))],
)
def test_stages_follow_from_task_and_stage(runs: Runs, overrides: tuple[str, ...], stages: tuple[Stage, ...]) -> None:
    assert assemble([*SMALL, *overrides]).stages == stages


def test_columns_are_as_wide_as_their_widest_entry() -> None:
    assert columns([("a", "bbb", "c"), ("aa", "b", "")]) == ["a   bbb  c", "aa  b"]
