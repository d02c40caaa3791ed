"""The families of videos against diffusers' own pipelines.   pytest tests/pipelines/test_video_families.py"""

from __future__ import annotations

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from flowrun.adapters import Config, Kind, attach
from flowrun.config import ConfigError
from flowrun.graph import Draws, Executor, State
from flowrun.sampling import denoise
from tests.pipelines.families import each, make, normal, run_unit
from tests.pipelines.video_oracles import (
    FAMILIES,
    FROM_IMAGE,
    PROMPTS,
    SHAPE,
    TWO_EXPERTS,
    WANS,
    anew,
    clip,
    encoded,
    first_frame,
    loaded,
    oracle,
    tone,
)

ALIKE = ("wan", "wan2_2", "wan2_2_5b", "wan2_2_5b_i2v", "wan_i2v", "ltx2", "ltx2_i2v")  # to save time
every, wan = each(FAMILIES, ALIKE), each(WANS, ALIKE)
from_image = pytest.mark.parametrize("family", FROM_IMAGE)
two_experts = pytest.mark.parametrize("family", TWO_EXPERTS)
CLIPS = [clip(seed) for seed in range(3)]
NONE = Config(kind=Kind.none, variant=None, lora_base_model=[], targets="auto", rank=None, alpha=None, dropout=None, init_from=None,
              merge_first=[], export=[])  # fmt: skip


@every
def test_captions_encoded_one_by_one_are_those_of_a_padded_batch(family: str) -> None:
    with torch.no_grad():
        truth = oracle(family).embeddings(PROMPTS)
    ours = encoded(loaded(family), PROMPTS, CLIPS)["prompt_embeds"]
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert not torch.equal(truth[0], truth[1])
    assert truth[0, -1].any() == (family not in WANS), "Wan's captions are filled up with zeros, LTX-2's with what was learned"


@every
@pytest.mark.parametrize(("guidance", "shape"), [(1.0, (5, 32, 32)), (4.0, (9, 32, 64))])
def test_sampling_gives_the_videos_of_diffusers(family: str, guidance: float, shape: tuple[int, int, int]) -> None:
    pipeline, videos = loaded(family), [clip(seed, shape) for seed in range(2)]
    noise = normal(2, *pipeline.latent_shape(shape))
    conditions, negative = encoded(pipeline, PROMPTS[:2], videos), encoded(pipeline, ["", ""], videos)
    latents = denoise(pipeline, conditions, negative, noise, pipeline.schedule(5, shape), guidance)
    ours = (pipeline.decode(latents) + 1) / 2
    truth = oracle(family).sampled(noise, PROMPTS[:2], videos, 5, guidance)
    frames, height, width = shape
    assert ours.shape == truth.shape == (2, frames, 3, height, width)
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=0)
    assert truth.std() > 0.01 and (truth[0] - truth[1]).abs().max() > 1e-3


@wan
def test_noise_levels_are_those_of_eulers_scheduler_with_the_same_shift(family: str) -> None:
    pipeline = loaded(family)
    scheduler = oracle(family).whole.scheduler
    scheduler.set_timesteps(6)
    levels = pipeline.schedule(6, SHAPE)
    assert torch.equal(levels, scheduler.sigmas) and levels[0] == 1 and levels[-1] == 0 and levels.shape == (7,)
    assert not torch.equal(levels, make(family, "model.components.scheduler.flow_shift=5.0").schedule(6, SHAPE))


@wan
def test_a_drawn_target_is_the_vaes_sample_in_the_networks_units(family: str) -> None:
    pipeline, draws = loaded(family), Draws(3, "row", 5)
    moments = run_unit(pipeline, "target_moments", draws, video=CLIPS[0])
    given = {name: moments[name] for name in ("target_mean", "target_std")}
    found = run_unit(pipeline, "target_latents", draws, **given)["target_latents"]
    (unit,) = [unit for unit in pipeline.units() if unit.name == "target_latents"]
    with torch.no_grad():
        says = oracle(family).posterior(CLIPS[0])
        truth, mode = (oracle(family).latents(raw) for raw in (says.sample(draws.generator(unit)), says.mode()))
    free = slice(1 if family == "wan2_2_5b_i2v" else 0, None)  # a frame that is given is not drawn
    torch.testing.assert_close(found[:, free], truth[:, free], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, : free.start], mode[:, : free.start], atol=1e-5, rtol=1e-5)
    assert found.shape == pipeline.latent_shape(SHAPE) and not torch.allclose(truth, mode, atol=1e-3)


@wan
def test_the_mode_is_the_mean_and_can_be_cached(family: str) -> None:
    pipeline, draws = make(family, "model.target=mode"), Draws(0, "row", 0)
    pipeline.models = loaded(family).models
    mean = run_unit(pipeline, "target_moments", draws, video=CLIPS[1])["target_mean"]
    found = run_unit(pipeline, "target_latents", draws, target_mean=mean)["target_latents"]
    with torch.no_grad():
        torch.testing.assert_close(found, oracle(family).latents(oracle(family).posterior(CLIPS[1]).mode()), atol=1e-5, rtol=1e-5)
    assert {unit.random for unit in pipeline.units()} == {"none"}


@every
def test_decoding_is_the_pipelines(family: str) -> None:
    latents = normal(2, *loaded(family).latent_shape(SHAPE))
    with torch.no_grad():
        truth = oracle(family).decoded(latents)
    torch.testing.assert_close(loaded(family).decode(latents), truth, atol=1e-5, rtol=1e-5)
    assert loaded(family).decode(latents.bfloat16()).dtype == torch.float32


@from_image
def test_the_first_frame_is_encoded_as_the_pipeline_encodes_it(family: str) -> None:
    pipeline = loaded(family)
    found = encoded(pipeline, PROMPTS[:1], CLIPS[:1])
    prepared = pipeline.begin(found, torch.ones(1), torch.zeros(1, *pipeline.latent_shape(SHAPE)))
    with torch.no_grad():
        truth = oracle(family).condition(CLIPS[0])
        torch.testing.assert_close(prepared["image_condition_latents"][0], truth, atol=1e-5, rtol=1e-5)
        if "image_embeds" in found:
            embeds = oracle(family).whole.encode_image(first_frame(CLIPS[0]))
            torch.testing.assert_close(found["image_embeds"], embeds, atol=1e-5, rtol=1e-5)
    assert ("image_embeds" in found) == (family == "wan_i2v")
    later = CLIPS[0].clone()
    later[1:] = 0
    again = encoded(pipeline, PROMPTS[:1], [later])
    assert all(torch.equal(again[name], found[name]) for name in found), "the other frames are not looked at"


@from_image
def test_every_condition_of_the_first_frame_matters(family: str) -> None:
    pipeline, x, sigma = loaded(family), normal(1, *loaded(family).latent_shape(SHAPE)), torch.tensor([0.7])
    own, other = encoded(pipeline, PROMPTS[:1], CLIPS[:1]), encoded(pipeline, PROMPTS[:1], CLIPS[1:2])

    def last_frame(conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        return pipeline.velocity(pipeline.begin(conditions, sigma, x), x, sigma)[:, :, -1]

    with torch.no_grad():
        for name in {"image_condition_latents", "image_embeds"} & set(pipeline.conditions):
            assert (last_frame(own) - last_frame({**own, name: other[name]})).abs().max() > 1e-4, name


@every
def test_rows_of_a_batch_do_not_see_one_another(family: str) -> None:
    """Their noise levels lie on both sides of the experts' boundary."""
    pipeline, sigma = loaded(family), torch.tensor([0.2, 0.95, 0.5])
    x, conditions = normal(3, *pipeline.latent_shape(SHAPE)), encoded(pipeline, PROMPTS, CLIPS)
    with torch.no_grad():
        batch = pipeline.velocity(pipeline.begin(conditions, sigma, x), x, sigma)
        for row in range(3):
            own = slice(row, row + 1)
            one = encoded(pipeline, PROMPTS[own], CLIPS[own])
            alone = pipeline.velocity(pipeline.begin(one, sigma[own], x[own]), x[own], sigma[own])
            torch.testing.assert_close(batch[own], alone, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(batch, pipeline.velocity(pipeline.begin(conditions, sigma, x), x, sigma.flip(0)), atol=1e-4)
    assert batch.shape == x.shape and batch.dtype == torch.float32


@every
def test_half_precision_weights_give_nearly_the_same_velocity_in_fp32(family: str) -> None:
    half = make(family)
    half.load(half.denoisers, torch.device("cpu"), torch.bfloat16)
    x = normal(2, *half.latent_shape(SHAPE))
    sigma, c = torch.tensor([0.25, 0.95]), encoded(loaded(family), PROMPTS[:2], CLIPS[:2])
    with torch.no_grad():
        rough = half.velocity(half.begin(c, sigma, x), x, sigma)
        exact = loaded(family).velocity(loaded(family).begin(c, sigma, x), x, sigma)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).square().mean().sqrt() < 0.05 * exact.std()


@every
def test_gradients_reach_what_is_trained_and_nothing_else(family: str) -> None:
    pipeline = anew(family)
    for name in set(pipeline.models) - set(pipeline.decode_only):
        touched = touched_by(pipeline, [name], torch.tensor([0.2, 0.95]))
        assert touched == {name}


@two_experts
def test_only_the_expert_of_a_noise_level_gets_gradients(family: str) -> None:
    pipeline = anew(family)
    for levels, experts in (([0.3, 0.5], {"transformer_2"}), ([0.95, 1.0], {"transformer"}), ([0.5, 0.95], set(pipeline.denoisers))):
        assert touched_by(pipeline, pipeline.denoisers, torch.tensor(levels)) == experts


def touched_by(pipeline: object, trained: list[str], sigma: torch.Tensor) -> set[str]:
    """Networks that the loss of two rows at these noise levels gives gradients to."""
    attach(pipeline.models, list(trained), NONE, pipeline.lora_targets, seed=0)
    executor = Executor(pipeline.units(), pipeline.models, trained=list(trained))
    rows = [{"prompt": p, "video": v, "audio": tone(frames=len(v))} for p, v in zip(PROMPTS[:2], CLIPS, strict=False)]
    states = [executor.run(State(shared=row), Draws(0, row["prompt"], 0)) for row in rows]
    batch = {name: torch.stack([state.shared[name] for state in states]) for name in (*pipeline.conditions, pipeline.target)}
    clean = batch[pipeline.target]
    noise = normal(*clean.shape)
    velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), (clean + noise) / 2, sigma)
    (velocity - (noise - clean)).square().mean().backward()
    touched = {n for n, model in pipeline.models.items() for p in model.parameters() if p.grad is not None and p.grad.any()}
    for model in pipeline.models.values():
        model.zero_grad()
    return touched


def test_a_given_first_frame_adds_nothing_to_the_loss_and_ends_as_it_was_given() -> None:
    pipeline, draws = loaded("wan2_2_5b_i2v"), Draws(0, "row", 0)
    executor = Executor(pipeline.units(), pipeline.models)
    state = executor.run(State(shared={"prompt": PROMPTS[0], "video": CLIPS[0]}), draws).shared
    batch = {name: state[name][None] for name in (*pipeline.conditions, pipeline.target)}
    clean, sigma = batch[pipeline.target], torch.tensor([0.3])
    noise = normal(*clean.shape)
    x = 0.7 * clean + 0.3 * noise
    with torch.no_grad():
        error = pipeline.velocity(pipeline.begin(batch, sigma, noise), x, sigma) - (noise - clean)
        end = denoise(pipeline, batch, None, noise, pipeline.schedule(4, SHAPE), 1.0)
    assert error[:, :, 0].abs().max() < 1e-4 < error[:, :, 1:].abs().max()
    torch.testing.assert_close(end[:, :, :1], batch["image_condition_latents"], atol=1e-5, rtol=0)


@two_experts
def test_the_boundary_is_diffusers_to_the_last_bit(family: str) -> None:
    """At the boundary the first expert is asked, at the next number below it the second."""
    pipeline = make(family)  # the test changes it
    for name, trained in (("transformer", ("transformer.blocks.0",)), ("transformer_2", ("transformer_2",))):
        pipeline.trained = trained
        least, greatest = pipeline.trained_range
        assert pipeline.called(least, greatest) == (name,)
        assert [pipeline.is_high(torch.tensor(level)).item() for level in (least, greatest)] == [name == "transformer"] * 2
    boundary = oracle(family).settings["boundary_ratio"] * 1000
    low, high = greatest, torch.tensor(greatest).nextafter(torch.tensor(1.0)).item()
    times = torch.tensor([low, high]) * 1000  # as the scheduler gives them
    assert (times >= boundary).tolist() == [False, True]
    for trained in (pipeline.denoisers, ("transformer", "vae"), ("text_encoder",)):
        pipeline.trained = trained
        assert pipeline.trained_range == (0.0, 1.0) and pipeline.called(0.0, 1.0) == pipeline.denoisers


@two_experts
def test_the_second_expert_has_a_guidance_of_its_own(family: str) -> None:
    levels, whole = torch.tensor([0.95, 0.5]), make(family, "model.guidance_2=null")
    assert [loaded(family).guidance_at(level, 4.0) for level in levels] == [4.0, 3.0]
    assert [whole.guidance_at(level, 4.0) for level in levels] == [4.0, 4.0]


@wan
def test_the_table_of_undeclared_rewrites_is_what_the_block_does(family: str) -> None:
    pipeline = loaded(family)
    (block,) = pipeline.modular._encoding["text_encoder"]
    components = pipeline.modular._pipeline(["tokenizer"])
    components.text_encoder = pipeline.models["text_encoder"]
    given = {"prompt": ["a red apple"], "negative_prompt": None, "max_sequence_length": 64}
    assert {i.name for i in block.inputs} == set(given)
    state = PipelineState(values=dict(given))
    block(components, state)
    assert tuple(n for n, value in given.items() if state.values[n] is not value) == pipeline.rewrites["text_encoder"]


@wan
def test_units_are_cacheable_and_call_the_models_that_they_declare(family: str) -> None:
    text, *image, moments, target = loaded(family).units()
    assert text.input_params == ("prompt",) and text.onload_model_names == ("text_encoder",) and not text.may_write
    assert [unit.onload_model_names for unit in image] == [("vae",), ("image_encoder",)][: {"wan_i2v": 2}.get(family, len(image))]
    assert all(unit.input_params == ("video",) for unit in (*image, moments)) and bool(image) == (family in FROM_IMAGE)
    assert moments.onload_model_names == ("vae",) and target.onload_model_names == () and target.random == "per_epoch"


def test_long_captions_are_counted_and_named_without_weights() -> None:
    pipeline = make("wan")
    assert pipeline.long_texts(["x " * 31]) == [] and pipeline.models == {}
    (warning,) = pipeline.long_texts(["short", "x " * 200])
    assert "tokenizer takes 64 tokens and 1 of 2 texts have more" in warning


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("wan", (6, 32, 32), r"^data: a video of 6 frames .*; choose 1 \+ 4 n frames, such as 5 or 9$"),
        ("wan", (4, 32, 32), r"such as 1 or 5$"),
        ("wan", (5, 32, 40), "data: a picture of 32x40 pixels does not divide into tiles of 16x16"),
        ("wan2_2_5b", (5, 32, 48), "does not divide into tiles of 32x32"),
        ("wan", (32, 32), "data: rows are pictures, and this model takes videos"),
        ("wan", (5, 32, 528), "is larger than the transformer has places for; at most 125 frames, 512 pixels on a side"),
        ("wan2_2", (129, 32, 32), "is larger than the transformer has places for; at most 125 frames, 512 pixels on a side"),
        ("flux", (5, 64, 64), "data: rows are videos of 5 frames, and this model takes pictures"),
    ],
)
def test_shapes_that_the_model_cannot_take_are_refused(family: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        (loaded(family) if family in FAMILIES else make(family)).latent_shape(shape)


@every
@pytest.mark.parametrize("shape", [(5, 32, 32), (9, 64, 96)])
def test_a_shape_in_pixels_follows_from_that_of_its_latents(family: str, shape: tuple[int, ...]) -> None:
    assert loaded(family).pixel_shape(loaded(family).latent_shape(shape)) == shape


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        ("wan", "model.components.transformer.in_channels=8", "transformer.in_channels: is 8; must be 16, as vae.z_dim"),
        ("wan", "model.components.transformer.text_dim=8", "transformer.text_dim: is 8; must be 32, as text_encoder.d_model"),
        ("wan", "model.components.transformer.patch_size=[1,1,1]", r"patch_size: is \[1, 1, 1\]; must be \[1, 2, 2\]"),
        ("wan", "+model.components.vae.scale_factor_spatial=16", "scale_factor_spatial: is 16; must be 8, as the VAE's levels"),
        ("wan_i2v", "model.components.transformer.in_channels=16", "in_channels: is 16; must be 36, as twice vae.z_dim and a mask"),
        ("wan_i2v", "model.max_sequence_length=64", "max_sequence_length: is 64; must be 512: the transformer takes"),
        ("wan_i2v", "model.components.transformer.image_dim=16", "image_dim: is 16; must be 8, as image_encoder.hidden_size"),
        ("wan_i2v", "+model.components.image_processor.crop=16", "image_processor.crop: is no setting of CLIPImageProcessorPil"),
        ("wan2_2", "model.components.transformer_2.in_channels=8", "transformer_2.in_channels: is 8; must be 16"),
        ("wan2_2", "model.boundary_ratio=null", "model.boundary_ratio: is null and nothing was saved"),
        ("wan2_2", "model.boundary_ratio=1.5", r"model.boundary_ratio: is 1.5; a noise level .* lies in \(0, 1\)"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(family: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(family, setting).weights.part("image_processor")
