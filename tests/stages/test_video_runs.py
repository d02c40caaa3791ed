"""Whole runs of the families of videos at their smallest.   pytest tests/stages/test_video_runs.py"""

from __future__ import annotations

import csv
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import flowrun.library
from flowrun import adapters, cli
from flowrun.adapters.config import Variant
from flowrun.pipelines._random import RandomWeights
from flowrun.sampling import denoise
from tests.conftest import Runs, losses
from tests.data.films import film
from tests.pipelines.families import each, normal
from tests.pipelines.video_oracles import (
    FAMILIES,
    ORACLES,
    SHAPE,
    TWO_EXPERTS,
    WITH_SOUND,
    anew,
    clip,
    encoded,
    loaded,
    oracle,
    tone,
)
from tests.ranks import launch
from tests.stages.test_resume import stop_at
from tests.stages.test_split_equals_whole import NoStore

pytestmark = pytest.mark.slow

ALIKE = ("wan", "wan2_2", "wan2_2_5b", "wan2_2_5b_i2v", "wan_i2v", "ltx2")  # to save time
with_sound = pytest.mark.parametrize("family", WITH_SOUND)
every = each(FAMILIES, ALIKE)
STEPS = 5
CAPTIONS = ["a red apple", "a green apple", "a pear", "a lemon on a small plate"]
FAST = (
    "data=video", "data.path=videos", "data.frames.most=5", "tracker=[csv]", "sample.prompts=[]", "train.log_every=1",
    "train.batch_size=2", f"train.steps={STEPS}", "task.caption_dropout=0.3",
)  # fmt: skip
FILMS = ("data.path=films", "data.fps=24")  # for families that hear
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=12", "optimizer.lr=0.02")


@pytest.fixture
def videos(runs: Runs) -> Path:
    """Four videos of five frames, each a folder of numbered pictures with its caption beside it; and as films with sound."""
    folder = runs.folder / "videos"
    for number, caption in enumerate(CAPTIONS):
        (folder / str(number)).mkdir(parents=True)
        for frame, pixels in enumerate(clip(number)):
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number}/{frame:03d}.png")
        (folder / f"{number}.txt").write_text(caption)
        film(runs.folder / f"films/{number}.mkv", clip(number), tone(number)).with_suffix(".txt").write_text(caption)
    return folder


def train(runs: Runs, family: str, *overrides: str) -> Path:
    assert cli.main([f"model={family}_tiny", *FAST, *(FILMS if family in WITH_SOUND else ()), *overrides]) == 0
    return runs.newest("train")


def both_ways(runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str, *overrides: str) -> Path:
    """Train in two stages and in one: the losses are equal bit for bit. Returns the two-stage run."""
    run = train(runs, family, "task=sft_split", *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(flowrun.library, "Store", NoStore)
        whole = train(runs, family, "task=sft", *overrides)
    assert losses(run) == losses(whole) and len(set(losses(run))) == STEPS
    return run


@every
def test_an_adapter_in_two_stages_as_in_one_and_in_diffusers(
    runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bases = ["transformer", "transformer_2"] if family in TWO_EXPERTS else ["transformer"]
    settings = [*LORA, f"adapter.lora_base_model=[{','.join(bases)}]"]
    run = both_ways(runs, monkeypatch, family, *settings)
    fresh, ours, noise = ORACLES[family](anew(family)), anew(family), normal(1, *oracle(family).ours.latent_shape(SHAPE))
    prompts, shown = CAPTIONS[:1], [clip(0)]
    before = fresh.sampled(noise, prompts, shown, 3, 3.5)
    fresh.whole.load_lora_weights(run / "model")
    if family in TWO_EXPERTS:
        fresh.whole.load_lora_weights(run / "model" / "transformer_2", load_into_transformer_2=True)
    assert {next(iter(getattr(fresh.whole, name).peft_config.values())).lora_alpha for name in bases} == {12}
    theirs = fresh.sampled(noise, prompts, shown, 3, 3.5)
    config = adapters.Config(kind=adapters.Kind.lora, variant=Variant.lora, lora_base_model=bases, targets="auto", rank=4,
                             alpha=12.0, dropout=0.0, init_from=str(run / "model"), merge_first=[], export=[])  # fmt: skip
    adapters.attach(ours.models, [], config, ours.lora_targets, seed=0)
    conditions, negative = encoded(ours, prompts, shown), encoded(ours, [""], shown)
    latents = denoise(ours, conditions, negative, noise, ours.schedule(3, SHAPE), 3.5)
    torch.testing.assert_close((ours.decode(latents) + 1) / 2, theirs, atol=2e-5, rtol=0)
    assert (theirs - before).abs().max() > 1e-3
    if family in WITH_SOUND:
        told = (noise, prompts[0], shown[0], 3, 3.5, 3.5)
        torch.testing.assert_close(ours.sounds(latents)[0].samples, fresh.row(*told)[1][0], atol=2e-5, rtol=0)
        for learned, start in zip(fresh.row(*told, output="latent"), oracle(family).row(*told, output="latent"), strict=True):
            assert (learned - start).abs().max() > 1e-2
    for place in ("", "transformer_2")[: len(bases)]:
        with safe_open(run / "model" / place / "pytorch_lora_weights.safetensors", "pt") as file:
            assert all(re.fullmatch(r"transformer\.[\w.]+\.lora_[AB]\.weight", key) for key in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_one_expert_is_trained_in_its_range_and_loaded_alone(
    runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, expert: str
) -> None:
    read: list[str] = []
    real = RandomWeights.load
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: read.append(name) or real(self, name))
    run = train(runs, "wan2_2", "task=sft_split", *LORA, f"adapter.lora_base_model=[{expert}]", "adapter.targets=all-linear")
    assert sorted(read) == ["text_encoder", expert, "vae"]
    with open(run / "metrics.csv", encoding="utf-8") as file:
        sigmas = [float(row["sigma"]) for row in csv.DictReader(file)]
    assert len(sigmas) == STEPS and all((sigma >= 0.875) == (expert == "transformer") for sigma in sigmas)
    fresh = ORACLES["wan2_2"](anew("wan2_2")).whole
    own = {"load_into_transformer_2": True} if expert == "transformer_2" else {}
    fresh.load_lora_weights(run / "model" / ("transformer_2" if own else ""), **own)
    assert [hasattr(getattr(fresh, name), "peft_config") for name in ("transformer", "transformer_2")] == [not own, bool(own)]


def test_samples_of_a_run_are_videos_that_play(runs: Runs, videos: Path) -> None:
    run = train(runs, "wan2_2", "task=sft_split", *LORA, "sample.prompts=[a pear,a lemon]", "sample.every=5", "sample.steps=2")
    for step in (0, STEPS):
        folder = run / "samples" / f"step-{step:06d}"
        assert sorted(path.name for path in folder.iterdir()) == ["000.webp", "001.webp", "samples.csv"]
        with Image.open(folder / "000.webp") as video:
            assert (video.n_frames, video.size) == (5, (32, 32))
        with Image.open(folder.with_suffix(".png")) as grid:
            assert grid.width > 2 * 3 * 32  # two film strips of three frames


@with_sound
def test_a_run_tells_the_errors_of_both_streams_and_draws_them_side_by_side(runs: Runs, videos: Path, family: str) -> None:
    asked = "sample.rows=2" if family == "ltx2_i2v" else "sample.prompts=[a pear,a lemon]"
    run = train(runs, family, "task=sft_split", *LORA, asked, "sample.every=5", "sample.steps=2", "model.audio_weight=2")
    with open(run / "metrics.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert float(row["mse"]) == pytest.approx(float(row["mse_video"]) + 2 * float(row["mse_audio"]), rel=1e-5)
    folder = run / "samples" / f"step-{STEPS:06d}"
    assert sorted(path.name for path in folder.iterdir()) == ["000.wav", "000.webp", "001.wav", "001.webp", "samples.csv"]
    heard = set()
    for name in ("000.wav", "001.wav"):
        with wave.open(str(folder / name)) as sound:
            assert sound.getparams()[:4] == (2, 2, 400, 4 * 17)  # of 5 latents of sound
            heard.add(sound.readframes(68))
    assert len(heard) == 2


@with_sound
def test_a_trained_connector_is_live_and_comes_back(runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    run = both_ways(runs, monkeypatch, family, "task.trainable_models=[connectors,audio_vae.encoder]", "optimizer.lr=0.01")
    plan, units = [line.split() for line in (run / "plan.txt").read_text().splitlines()], {unit.name for unit in loaded(family).units()}
    live = {words[0] for words in plan if words and words[0] in units and not {"cache", "loaded"} & set(words)}
    assert live == {"connectors", "audio_moments", "target_latents"}
    for name in ("connectors", "audio_vae"):
        first = loaded(family).models[name]
        saved = dict(type(first).from_pretrained(run / "model" / name).named_parameters())
        assert any(not torch.equal(saved[key], value) for key, value in first.named_parameters())


@with_sound
def test_a_saved_pipeline_trains_with_the_options_own_settings(
    runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Half precision and gradient checkpointing are on: the two ways are still equal."""
    oracle(family).whole.save_pretrained(runs.folder / "saved")
    settings = [f"model={family}", "model.weights=saved", "model.max_sequence_length=64", *FAST, *FILMS, *LORA, "sample.rows=1",
                "sample.steps=2", "sample.every=5"]  # fmt: skip
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main([*settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == STEPS
    assert "bf16" in (runs.newest("train") / "plan.txt").read_text()
    fresh = ORACLES[family](anew(family)).whole
    fresh.load_lora_weights(runs.newest("train") / "model")
    assert next(iter(fresh.transformer.peft_config.values())).lora_alpha == 12


@with_sound
def test_each_stage_loads_only_what_it_calls(runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    read: list[str] = []
    real = RandomWeights.load
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: read.append(name) or real(self, name))
    for settings, wanted in (
        (("stage=cache", "sample.rows=0"), ["audio_vae", "connectors", "text_encoder", "vae"]),
        (("stage=train", "sample.rows=0"), ["transformer"]),
        (("stage=train", "sample.rows=1", "sample.guidance=1", "resume=none"), ["audio_vae", "transformer", "vae", "vocoder"]),
    ):
        read.clear()
        train(runs, family, *settings, *LORA)
        assert sorted(read) == wanted


@with_sound
def test_a_stopped_run_goes_on_bit_for_bit(runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    whole = train(runs, family, *LORA, "run_id=whole")
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        assert cli.main([f"model={family}_tiny", *FAST, *FILMS, *LORA, "run_id=broken", "resume=none"]) == 130
    resumed = train(runs, family, *LORA)
    assert resumed.name == "broken" and losses(resumed) == losses(whole)


@pytest.mark.parametrize("family", ["wan2_2_5b_i2v", "ltx2_i2v"])
def test_rows_are_drawn_from_their_own_first_frames(runs: Runs, videos: Path, family: str) -> None:
    train(runs, family, "task=sft_split", *LORA, "sample.rows=2", "sample.every=5", "sample.steps=3", "train.steps=1")
    folder = runs.newest("train") / "samples" / "step-000001"
    given, drawn = clip(0)[0].float(), []
    for name in ("000.webp", "001.webp"):
        with Image.open(folder / name) as video:
            assert (video.n_frames, video.size) == (5, (32, 32))
            drawn.append(torch.from_numpy(np.array(video.convert("RGB"))).permute(2, 0, 1).float())
    assert not torch.equal(*drawn)
    with Image.open(folder.with_suffix(".png")) as grid:
        left = torch.from_numpy(np.array(grid))[4:36, 4:36].permute(2, 0, 1).float()
    assert torch.equal(left, given), "what it was made from stands on its left"


def test_all_weights_of_both_experts_come_back_in_diffusers(runs: Runs, videos: Path) -> None:
    run = train(runs, "wan2_2", "task=sft_split", "task.trainable_models=[transformer,transformer_2]", "task.shift=5")
    start = oracle("wan2_2").whole
    for name in ("transformer", "transformer_2"):
        first = getattr(start, name)
        saved = dict(type(first).from_pretrained(run / "model" / name).named_parameters())
        assert sum(not torch.equal(saved[key], value) for key, value in first.named_parameters()) > len(saved) / 2


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("wan", ["data.frames.most=4", "data.frames.multiple=1", "data.frames.plus=0", "data.frames.least=1"],
         "data: a video of 4 frames does not divide into its first and 4 at a time; choose 1 + 4 n frames, such as 1 or 5"),
        ("wan", ["data.geometry.size=[32,40]"], "data: a picture of 32x40 pixels does not divide into tiles of 16x16"),
        ("wan", ["data=emoji", "~data.path", "~data.frames"], "data.source: the data give image, prompt, and not video"),
        ("flux", [], "data.source: the data give video, prompt, and not image"),
        ("wan_i2v", ["sample.prompts=[a pear]"], "sample.prompts: gives captions alone, but the model also sees video of each row; set"),
        ("ltx2", ["data.path=films", "data.fps=null"],
         "data.fps: is null, but the model's sound goes by 24 frames a second; give data.fps=24, or another model.fps"),
        ("ltx2", ["data=emoji"], "data.source: the data give image, prompt, and not audio, video"),
        ("ltx2", [*FILMS, "task.trainable_models=[vocoder]"], "task.trainable_models: vocoder is called by nothing that the loss needs"),
        ("wan", ["task.mask=true"], "data.source: the data give video, prompt, and not mask"),
        ("wan", ["adapter=lora", "adapter.lora_base_model=[transformer_2]"], "transformer_2 is no component of the pipeline"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_before_weights_are_loaded(
    runs: Runs, videos: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str,
    settings: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: pytest.fail(f"{name} was loaded"))
    fast = [word for word in FAST if not (settings[:1] == ["data=emoji"] and word.startswith("data"))]
    assert cli.main([f"model={family}_tiny", *fast, *[s for s in settings if not s.startswith("~")]]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert message in line
    assert not (runs.folder / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "trained"), [("wan2_2", "transformer,transformer_2"), ("wan2_2", "transformer_2"), ("ltx2_i2v", "transformer")]
)
def test_two_ranks_train_as_one_process_with_twice_the_accumulation(runs: Runs, videos: Path, family: str, trained: str) -> None:
    """Where both experts are trained, the ranks may ask another one each in the same step."""
    data = [f"data.path={videos.with_name('films')}", "data.fps=24"] if family in WITH_SOUND else [f"data.path={videos}"]
    words = [f"model={family}_tiny", *FAST, *LORA, f"adapter.lora_base_model=[{trained}]", "train.batch_size=1", "optimizer=sgd",
             "optimizer.lr=1.0", "resume=none", "task.shift=5", *data]  # fmt: skip
    assert cli.main([*words, "train.accumulate=2", "run_id=alone"]) == 0
    said = launch(runs.folder, [{"name": "pair", "words": [*words, "run_id=pair"]}])["pair"]
    assert said.codes == [0, 0] and said.lines() == []
    for place in {"" if name == "transformer" else name for name in trained.split(",")}:
        alone, pair = (
            load_file(next((runs.folder / "outputs/runs/train").glob(f"*/{name}")) / "model" / place / "pytorch_lora_weights.safetensors")
            for name in ("alone", "pair")
        )
        assert alone.keys() == pair.keys() and any(value.any() for name, value in pair.items() if "lora_B" in name)
        for name, value in alone.items():
            torch.testing.assert_close(pair[name], value, atol=1e-5, rtol=1e-3)
