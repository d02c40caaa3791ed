"""Saved pipelines of videos under the options of the published ones.   pytest tests/pipelines/test_saved_video_pipelines.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowrun.config import ConfigError
from flowrun.pipelines._diffusers import DiffusersPipeline
from tests.pipelines.families import CPU, assembled, normal
from tests.pipelines.video_oracles import FAMILIES, ORACLES, PROMPTS, SHAPE, clip, encoded, loaded

pytestmark = pytest.mark.slow

OPTIONS = {
    "wan": "wan2_1_t2v_1_3b", "wan_i2v": "wan2_1_i2v_14b_480p", "wan2_2": "wan2_2_t2v_a14b", "wan2_2_i2v": "wan2_2_i2v_a14b",
    "wan2_2_5b": "wan2_2_ti2v_5b", "wan2_2_5b_i2v": "wan2_2_ti2v_5b",
    "ltx2": "ltx2", "ltx2_i2v": "ltx2_i2v",
}  # fmt: skip
MORE = {"wan2_2_5b_i2v": ["model.pipeline=wan2_2_5b_i2v"]}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> a folder by diffusers' save_pretrained, with the solver that the published ones have. Not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    for family in FAMILIES:
        whole = ORACLES[family](loaded(family)).whole
        whole.register_modules(scheduler=loaded(family).weights.part("scheduler"))
        whole.save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def opened(family: str, folder: Path, *overrides: str) -> DiffusersPipeline:
    tokens = loaded(family).config.max_sequence_length
    settings = [f"model.weights={folder}", f"model.max_sequence_length={tokens}", *MORE.get(family, []), *overrides]
    return assembled(OPTIONS[family], *settings, seed=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_pipeline_computes_what_it_did(family: str, saved: dict[str, Path]) -> None:
    again, ours, videos = opened(family, saved[family]), loaded(family), [clip(0), clip(1)]
    assert again.components().keys() == ours.components().keys()
    again.load(again.components(), CPU, torch.float32)
    first, second = encoded(ours, PROMPTS[:2], videos), encoded(again, PROMPTS[:2], videos)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    x, sigma = normal(2, *ours.latent_shape(SHAPE)), torch.tensor([0.2, 0.95])
    with torch.no_grad():
        velocities = [p.velocity(p.begin(first, sigma, x), x, sigma) for p in (ours, again)]
    assert torch.equal(*velocities) and torch.equal(ours.decode(x), again.decode(x))
    assert torch.equal(ours.schedule(4, SHAPE), again.schedule(4, SHAPE))


@pytest.mark.parametrize("family", ["wan_i2v", "wan2_2_5b"])
def test_half_precision_holds_the_same_weights_in_fp32_as_diffusers(family: str, saved: dict[str, Path]) -> None:
    half, x = opened(family, saved[family]), normal(1, *loaded(family).latent_shape(SHAPE))
    half.load(["transformer"], CPU, torch.bfloat16)
    network = type(half.models["transformer"]).from_pretrained(saved[family] / "transformer", torch_dtype=torch.bfloat16)
    found, truth = ({n: p.dtype for n, p in model.named_parameters()} for model in (half.models["transformer"], network))
    assert found == truth and set(truth.values()) == {torch.float32, torch.bfloat16}
    conditions, sigma = encoded(loaded(family), PROMPTS[:1], [clip(0)]), torch.tensor([0.751])
    with torch.no_grad():
        ours = half.velocity(half.begin(conditions, sigma, x), x, sigma)
        half.models["transformer"] = network
        assert torch.equal(ours, half.velocity(half.begin(conditions, sigma, x), x, sigma))


def test_an_image_encoder_is_known_by_its_image_processor_too(saved: dict[str, Path], tmp_path: Path) -> None:
    pipeline = opened("wan_i2v", saved["wan_i2v"])

    def identity() -> bytes:
        return pipeline.components()["image_encoder"].identity(lambda file: file.read_bytes())

    before, file = identity(), saved["wan_i2v"] / "image_processor" / "preprocessor_config.json"
    text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), "image_mean": [0.5, 0.5, 0.5]}))
    changed = identity()
    file.write_text(text)
    assert identity() == before != changed


def test_the_boundary_is_the_saved_one(saved: dict[str, Path]) -> None:
    assert opened("wan2_2_i2v", saved["wan2_2_i2v"]).boundary == 0.9
    assert opened("wan2_2_i2v", saved["wan2_2_i2v"], "model.boundary_ratio=0.9").boundary == 0.9
    with pytest.raises(ConfigError, match=r"^model.boundary_ratio: is 0.5, but .* was made with 0.9; set it to null"):
        opened("wan2_2_i2v", saved["wan2_2_i2v"], "model.boundary_ratio=0.5")


@pytest.mark.parametrize(
    ("family", "folder", "message"),
    [
        ("wan", "wan2_2", "is a Wan with two experts; choose the model option of that family"),
        ("wan", "wan2_2_5b", "is a Wan with one time per token; choose the model option of that family"),
        ("wan2_2_5b", "wan", "is a Wan with one transformer and one time per video; choose the model option"),
        ("wan2_2", "wan", "a WanPipeline, has no transformer_2; it must have a WanTransformer3DModel there"),
        ("wan", "wan_i2v", "in_channels: is 36; must be 16, as vae.z_dim"),
        ("wan_i2v", "wan", "a WanPipeline, has no image_encoder"),
        ("ltx2", "wan", "has a UMT5EncoderModel as text_encoder, this model a Gemma3ForConditionalGeneration; choose"),
    ],
)
def test_another_wan_than_the_options_is_refused(family: str, folder: str, message: str, saved: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(family, saved[folder])
