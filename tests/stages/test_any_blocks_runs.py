"""Whole runs of models that only their modular blocks describe.   pytest tests/stages/test_any_blocks_runs.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import flowrun.library
from flowrun import adapters, cli
from flowrun.adapters.config import Variant
from flowrun.sampling import denoise
from tests.conftest import Runs, losses
from tests.pipelines.families import CPU, encoded, make, normal
from tests.pipelines.test_any_blocks import ORACLES, SHAPE
from tests.pipelines.video_oracles import clip
from tests.ranks import launch
from tests.stages.test_resume import stop_at
from tests.stages.test_split_equals_whole import NoStore

STEPS = 5
CAPTIONS = ["a red apple", "a green apple", "a pear", "a lemon on a small plate"]
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=12", "optimizer.lr=0.02")
FAST = ("data=video", "data.path=videos", "data.frames.most=9", "data.frames.multiple=8", "data.geometry.size=[32,64]", "tracker=[csv]",
        "train.log_every=1", "train.batch_size=2", f"train.steps={STEPS}", "sample.every=5", "sample.steps=2", "sample.prompts=[a pear]",
        "task.caption_dropout=0.3")  # fmt: skip


@pytest.fixture
def videos(runs: Runs) -> Path:
    """Four videos of nine frames, each a folder of numbered pictures with its caption beside it."""
    for number, caption in enumerate(CAPTIONS):
        folder = runs.folder / "videos" / str(number)
        folder.mkdir(parents=True)
        for frame, pixels in enumerate(clip(number, SHAPE)):
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{frame:03d}.png")
        folder.with_suffix(".txt").write_text(caption)
    return runs.folder / "videos"


def train(runs: Runs, family: str, *overrides: str) -> Path:
    assert cli.main([f"model={family}_tiny", *FAST, *overrides]) == 0
    return runs.newest("train")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video1_5"])
def test_an_adapter_in_two_stages_as_in_one_and_in_diffusers(
    runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    run = train(runs, family, "task=sft_split", *LORA)
    with Image.open(run / "samples" / "step-000005" / "000.webp") as video:
        assert (video.n_frames, video.size) == (9, (64, 32))
    with monkeypatch.context() as patch:
        patch.setattr(flowrun.library, "Store", NoStore)
        whole = train(runs, family, "task=sft", *LORA)
    assert losses(run) == losses(whole) and len(set(losses(run))) == STEPS

    fresh, ours = make(family), make(family)
    for pipeline in (fresh, ours):
        pipeline.load(pipeline.components(), CPU, torch.float32)
    noise = normal(1, *ours.latent_shape(SHAPE))
    before = ORACLES[family](fresh, CAPTIONS[0], noise, 3.5, 3)
    # as pipelines of diffusers do that load adapters; HunyuanVideo 1.5's own does not
    fresh.models["transformer"].load_lora_adapter(run / "model", prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    assert next(iter(fresh.models["transformer"].peft_config.values())).lora_alpha == 12
    theirs = ORACLES[family](fresh, CAPTIONS[0], noise, 3.5, 3)
    config = adapters.Config(kind=adapters.Kind.lora, variant=Variant.lora, lora_base_model=["transformer"], targets="auto", rank=4,
                             alpha=12.0, dropout=0.0, init_from=str(run / "model"), merge_first=[], export=[])  # fmt: skip
    adapters.attach(ours.models, [], config, ours.lora_targets, seed=0)
    conditions, negative = encoded(ours, CAPTIONS[:1]), encoded(ours, [""])
    drawn = ours.decode(denoise(ours, conditions, negative, noise, ours.schedule(3, SHAPE), 3.5))
    torch.testing.assert_close((drawn + 1) / 2, theirs, atol=2e-5, rtol=0)
    assert (theirs - before).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video1_5"])
def test_two_ranks_train_all_weights_as_one_process_with_twice_the_accumulation(runs: Runs, videos: Path, family: str) -> None:
    """And diffusers loads what they leave."""
    words = [f"model={family}_tiny", *FAST, "train.batch_size=1", "optimizer=sgd", "optimizer.lr=0.01", "sample.prompts=[]", "resume=none"]
    assert cli.main([*words, "train.accumulate=2", "run_id=alone"]) == 0
    said = launch(runs.folder, [{"name": "pair", "words": [*words, "run_id=pair"]}])["pair"]
    assert said.codes == [0, 0]
    trained = make(family)
    trained.load(("transformer",), CPU, torch.float32)
    network = type(trained.models["transformer"])
    alone, pair = (
        network.from_pretrained(next((runs.folder / "outputs/runs/train").glob(f"*/{name}")) / "model" / "transformer").state_dict()
        for name in ("alone", "pair")
    )
    begun = trained.models["transformer"].state_dict()
    assert any(not torch.equal(pair[name], value) for name, value in begun.items())
    for name, value in alone.items():
        torch.testing.assert_close(pair[name], value, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ltx_video", "hunyuan_video1_5"])
def test_a_stopped_run_goes_on_bit_for_bit(runs: Runs, videos: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    whole = train(runs, family, *LORA)
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        assert cli.main([f"model={family}_tiny", *FAST, *LORA, "run_id=broken", "resume=none"]) == 130
    resumed = train(runs, family, *LORA)
    assert resumed.name == "broken" and losses(resumed) == losses(whole)
