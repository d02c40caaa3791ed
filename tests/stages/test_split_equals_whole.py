"""Two-stage training gives the losses of one-stage training, bit for bit; and the comparison would notice a difference."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer

import flowrun.library
from flowrun import cli
from flowrun.pipelines._minilm import configuration, folder
from tests.conftest import SMALL, Runs, losses

STEPS = 20
COMMON = ("task.caption_dropout=0.3", f"train.steps={STEPS}", "model.pipeline=tests.plugins:Jittered")


class NoStore:
    """Stands in for the cache where none may be used."""

    def __init__(self, *arguments: object) -> None:
        raise AssertionError("unsplit training opened the cache")


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_losses_are_equal_bit_for_bit(runs: Runs, monkeypatch: pytest.MonkeyPatch, adapter: str, batch: int) -> None:
    settings = (*COMMON, f"adapter={adapter}", f"train.batch_size={batch}")
    split = losses(runs("task=sft_split", *settings))
    monkeypatch.setattr(flowrun.library, "Store", NoStore)
    whole = losses(runs("task=sft", *settings))
    assert len(split) == STEPS
    assert split == whole
    assert len(set(split)) == STEPS


def test_losses_are_equal_when_no_unit_is_live(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches then come straight from the store, as in the main job."""
    settings = ("task.caption_dropout=0.3", f"train.steps={STEPS}", "train.batch_size=3")
    split = losses(runs("task=sft_split", *settings))
    monkeypatch.setattr(flowrun.library, "Store", NoStore)
    assert losses(runs("task=sft", *settings)) == split
    assert len(set(split)) == STEPS


@pytest.mark.slow
def test_losses_under_a_mask_are_equal_bit_for_bit_and_data_without_one_are_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["file_name,mask,text"]
    for number in range(4):
        Image.effect_noise((32, 32), 80).convert("RGB").save(runs.folder / f"{number}.png")
        half = Image.new("RGB", (32, 32), "black")
        half.paste("white", (0, 0, 32, 8 * (number + 1)))
        half.save(runs.folder / f"mask{number}.png")
        lines.append(f"{number}.png,mask{number}.png,picture {number}")
    (runs.folder / "t.csv").write_text("\n".join(lines))
    small = [text for text in SMALL if not text.startswith("data.")]
    settings = [*small, "data=table", "data.path=t.csv", "train.steps=5", "task.mask=true"]
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main([*settings, "+data.columns.pictures.mask=mask", f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == 5
    assert cli.main([*settings, "+data.columns.pictures.mask=mask", "task.mask=false"]) == 0
    assert losses(runs.newest("train")) != curves[0]
    capsys.readouterr()
    assert cli.main(settings) == 2
    assert "data.source: the data give image, prompt, and not mask" in capsys.readouterr().err


@pytest.mark.slow
def test_losses_of_each_variant_of_the_adapter_are_equal_bit_for_bit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    split, whole = {}, {}
    common = ("adapter=lora", "adapter.alpha=8", "train.steps=5", "adapter.targets=all-linear")
    variants = {name: (*common, f"adapter.variant={name}", *(["adapter.dropout=0.1"] if name[0] != "l" or name == "lora" else []))
                for name in ("lora", "rslora", "dora", "lokr", "loha")}  # fmt: skip
    for variant, settings in variants.items():
        split[variant] = losses(runs("task=sft_split", *COMMON, *settings))
    monkeypatch.setattr(flowrun.library, "Store", NoStore)
    for variant, settings in variants.items():
        whole[variant] = losses(runs("task=sft", *COMMON, *settings))
    assert split == whole
    assert all(len(set(found)) == 5 for found in split.values())
    assert len({tuple(found) for found in split.values()}) == len(variants)


def test_a_flipped_bit_of_a_cached_value_is_noticed(runs: Runs) -> None:
    settings = (*COMMON, "task=sft_split", "cache.verify=never")
    before = losses(runs(*settings))
    flip_a_bit(runs.folder / "outputs" / "cache", "target_latents")
    after = losses(runs(*settings, "resume=none"))
    assert after != before


@pytest.mark.slow
def test_a_frozen_draw_instead_of_one_per_epoch_is_noticed(runs: Runs) -> None:
    fresh = losses(runs("task=sft_split", *COMMON))
    frozen = losses(runs("task=sft_split", *COMMON, "model.pipeline=tests.plugins:FrozenJitter"))
    assert frozen[:1] != fresh[:1]


@pytest.mark.parametrize(("pipeline", "stage"), [("Undeclared", "cache"), ("UndeclaredLive", "train")])
@pytest.mark.slow
def test_a_unit_without_declared_effects_sees_all_data_in_either_stage(runs: Runs, pipeline: str, stage: str) -> None:
    settings = (f"model.pipeline=tests.plugins:{pipeline}", "train.steps=5")
    split = runs("task=sft_split", *settings)
    (line,) = [line for line in (split / "plan.txt").read_text().splitlines() if line.lstrip().startswith("undeclared ")]
    assert stage in line.split()
    plain = losses(runs("task=sft_split", "train.steps=5"))
    assert losses(split) == losses(runs("task=sft", *settings)) != plain


@pytest.mark.slow
def test_a_trained_text_encoder_is_live_and_its_dropout_is_the_same_in_both(runs: Runs) -> None:
    settings = ("task.trainable_models=[transformer,text_encoder]", "train.steps=5")
    split = runs("task=sft_split", *settings)
    (line,) = [line for line in (split / "plan.txt").read_text().splitlines() if line.lstrip().startswith("text ")]
    assert "train" in line.split()
    whole = losses(runs("task=sft", *settings))
    assert losses(split) == whole != losses(runs("task=sft_split", "train.steps=5"))
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    assert all(configuration(folder())[name] > 0 for name in rates), "without dropout this shows nothing"
    saved, original = (AutoModel.from_pretrained(place) for place in (split / "model" / "text_encoder", folder()))
    pairs = zip(saved.parameters(), original.parameters(), strict=True)
    assert any(not torch.equal(new, old) for new, old in pairs)
    tokens = [AutoTokenizer.from_pretrained(place)("pear")["input_ids"] for place in (split / "model" / "text_encoder", folder())]
    assert tokens[0] == tokens[1]


def test_the_train_stage_loads_no_encoder(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrun.pipelines import _minilm

    runs("task=sft_split", "stage=cache")

    def refuse(*arguments: object) -> None:
        raise AssertionError("the train stage loaded the text encoder")

    monkeypatch.setattr(_minilm, "MiniLM", refuse)
    assert len(losses(runs("task=sft_split", "stage=train", "train.steps=3"))) == 3


def flip_a_bit(cache: Path, field: str) -> None:
    """Flip one mantissa bit in the middle of the first column of `field`, in every shard."""
    found = 0
    for shard in (cache / "shards").glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if field in name and entry["dtype"] == "F32":
                start, end = entry["data_offsets"]
                place = 8 + size + (start + end) // 8 * 4 + 2
                data[place] ^= 0x40
                found += 1
        shard.write_bytes(data)
    assert found
