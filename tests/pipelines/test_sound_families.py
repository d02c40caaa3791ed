"""What LTX-2 has beyond other families of videos: a sound, against diffusers.   pytest tests/pipelines/test_sound_families.py"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor, nn

from flowrun.config import ConfigError
from flowrun.flow.path import mix
from flowrun.graph import Draws, Executor, State
from flowrun.pipelines._ltx2 import LTX2
from flowrun.pipelines._ltx2_sound import Mel
from flowrun.pipelines._ltx2_streams import Streams
from flowrun.sampling import denoise
from flowrun.sound import Hearing
from tests.pipelines.families import CPU, assembled, each, make, normal, run_unit
from tests.pipelines.video_oracles import PROMPTS, SHAPE, WITH_SOUND, anew, clip, encoded, loaded, oracle, tone

every = each(WITH_SOUND, ("ltx2",))  # the other one has all of it
CLIPS = [clip(seed) for seed in range(2)]


def moments(pipeline: LTX2) -> dict[str, Tensor]:
    """What the VAEs say of the first clip and its sound."""
    says = run_unit(pipeline, "target_moments", Draws(0, "row", 0), video=CLIPS[0])
    heard = run_unit(pipeline, "audio_moments", Draws(0, "row", 0), audio=tone())
    return {name: value for name, value in {**says, **heard}.items() if name not in ("video", "audio")}


@every
def test_both_streams_are_told_what_diffusers_tells_them(family: str) -> None:
    with torch.no_grad():
        truth = oracle(family).texts(PROMPTS)
    ours = encoded(loaded(family), PROMPTS, [CLIPS[0]] * 3)
    for name, value in zip(("prompt_embeds", "audio_prompt_embeds", "prompt_mask"), truth, strict=True):
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours["prompt_embeds"], ours["audio_prompt_embeds"], atol=1e-2)


@every
@pytest.mark.parametrize(
    ("guidance", "audio_guidance", "cross"),
    [(1.0, None, "false"), pytest.param(4.0, None, "true", marks=pytest.mark.slow), (3.0, 7.0, "true")],
)
def test_sampling_gives_the_latents_and_the_sound_of_diffusers(
    family: str, guidance: float, audio_guidance: float | None, cross: str
) -> None:
    pipeline = make(family, f"model.audio_guidance={audio_guidance or 'null'}", f"model.cross_timestep={cross}")
    pipeline.models, shape = loaded(family).models, (9, 32, 64)
    truth = WITH_SOUND[family](pipeline)
    video, noise = clip(3, shape), normal(1, *pipeline.latent_shape(shape))
    conditions, negative = (encoded(pipeline, [prompt], [video]) for prompt in (PROMPTS[0], ""))
    latents = denoise(pipeline, conditions, negative, noise, pipeline.schedule(5, shape), guidance)
    found = pipeline.parts(latents)[1]
    told = (noise, PROMPTS[0], video, 5, guidance, audio_guidance or guidance)
    raw_video, raw_sound = truth.row(*told, output="latent")
    _, wave = truth.row(*told)
    vae = pipeline.models["audio_vae"]
    torch.testing.assert_close(found.video, truth.latents(raw_video)[None], atol=2e-5, rtol=1e-5)
    tokens = raw_sound.transpose(1, 2).flatten(2)  # [1, a, D]
    torch.testing.assert_close(found.sound, (tokens - vae.latents_mean) / vae.latents_std, atol=2e-5, rtol=1e-5)
    (ours,) = pipeline.sounds(latents)
    torch.testing.assert_close(ours.samples, wave[0], atol=2e-5, rtol=0)
    assert ours.rate == truth.whole.vocoder.config.output_sampling_rate and wave.std() > 0.01
    torch.testing.assert_close(found.rest, torch.zeros_like(found.rest), atol=1e-5, rtol=0)


@every
def test_noise_levels_are_the_pipelines_and_follow_the_number_of_the_videos_tokens(family: str) -> None:
    pipeline = loaded(family)
    oracle(family).sampled(normal(1, *pipeline.latent_shape(SHAPE)), PROMPTS[:1], CLIPS[:1], 6, 1.0)
    levels = pipeline.schedule(6, SHAPE)
    assert torch.equal(levels, oracle(family).whole.scheduler.sigmas) and levels[0] == 1 and levels[-1] == 0
    assert not torch.equal(levels, pipeline.schedule(6, (9, 64, 64)))


@every
@pytest.mark.parametrize("target", ["draw", "mode"])
def test_a_target_is_what_the_vaes_say_in_the_networks_units(family: str, target: str) -> None:
    pipeline, draws = make(family, f"model.target={target}"), Draws(3, "row", 5)
    pipeline.models = loaded(family).models
    (unit,) = [unit for unit in pipeline.units() if unit.name == "target_latents"]
    says = {name: value for name, value in moments(pipeline).items() if name in unit.input_params}
    found = run_unit(pipeline, "target_latents", draws, **says)["target_latents"]
    video, sound = oracle(family).posterior(CLIPS[0]), pipeline.models["audio_vae"].encode(spectrogram(tone())[None, :, :17]).latent_dist
    draw, pack = draws.generator(unit) if target == "draw" else None, oracle(family).whole._pack_audio_latents
    seen = video.mode() if draw is None else video.sample(draw)
    drawn = 0 if draw is None else pack(sound.std) * torch.randn(5, 4, generator=draw)
    parts, first = pipeline.parts(found[None])[1], slice(pipeline.given, None)
    torch.testing.assert_close(parts.video[0, :, first], oracle(family).latents(seen)[:, first], atol=1e-5, rtol=1e-5)
    fixed = video.mode() if pipeline.given else seen
    torch.testing.assert_close(parts.video[0, :, :1], oracle(family).latents(fixed)[:, :1], atol=1e-5, rtol=1e-5)
    vae = pipeline.models["audio_vae"]
    truth = oracle(family).whole._normalize_audio_latents(pack(sound.mode()) + drawn, vae.latents_mean, vae.latents_std)
    torch.testing.assert_close(parts.sound, truth, atol=1e-5, rtol=1e-5)
    assert found.shape == pipeline.latent_shape(SHAPE) and not parts.rest.any() and (unit.random == "none") == (target == "mode")


def spectrogram(wave: Tensor) -> Tensor:
    """[2, S] -> [2, T, 8], by PyTorch's transform and triangles after Slaney: even steps below 1000 Hz, even ratios above."""
    bins = torch.stft(wave, 1024, 160, window=torch.hann_window(1024), return_complex=True).abs()  # [2, 513, T]
    steps, ratio, per_mel = torch.linspace(0, slaney(8000.0), 10, dtype=torch.float64), 6.4, 200 / 3
    edges = torch.where(steps < 15, steps * per_mel, 1000 * ratio ** ((steps - 15) / 27))  # Hz
    at = torch.linspace(0, 8000, 513, dtype=torch.float64)[:, None]
    rising, falling = (at - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - at) / (edges[2:] - edges[1:-1])
    triangles = torch.minimum(rising, falling).clamp(min=0) * 2 / (edges[2:] - edges[:-2])  # [513, 8]
    return (bins.double().transpose(1, 2) @ triangles).clamp(min=1e-5).log().float()


def slaney(frequency: float) -> float:
    """Above 1000 Hz."""
    return 15 + 27 * math.log(frequency / 1000, 6.4)


def test_the_spectrogram_is_that_of_its_formula() -> None:
    mel = Mel(hearing=Hearing(rate=16000, channels=2, fps=24.0), hop=160, bands=8)
    wave = tone(seed=3, frames=12) + 0.1 * normal(2, 8000)
    found = mel.spectrogram(wave)
    assert found.shape == (2, 51, 8) and found.dtype == torch.float32
    torch.testing.assert_close(found, spectrogram(wave), atol=1e-4, rtol=1e-4)
    silent = mel.spectrogram(torch.zeros(1, 1600))
    torch.testing.assert_close(silent, torch.full_like(silent, 1e-5).log())


@pytest.mark.parametrize("fps", [24.0, 25.0, 50.0, 29.97])
def test_as_many_latents_of_sound_are_encoded_as_the_pipeline_makes(fps: float) -> None:
    pipeline = make("ltx2", f"model.fps={fps}")
    pipeline.models = loaded("ltx2").models
    for frames in (5, 9, 13, 121):
        heard = run_unit(pipeline, "audio_moments", Draws(0, "row", 0), audio=tone(frames=frames, fps=fps))
        count = round(frames / fps * (16000 / 160 / 4.0))  # as diffusers' pipeline says
        assert heard["audio_mean"].shape == heard["audio_std"].shape == (count, 4)
        assert pipeline.parts(torch.zeros(1, *pipeline.latent_shape((frames, 32, 32))))[1].sound.shape == (1, count, 4)


def test_streams_that_are_joined_come_apart_again() -> None:
    streams = Streams(channels=3, sound=(5, 4), places=(2, 2, 4))
    video, sound, rest = normal(2, 3, 2, 2, 4), normal(2, 5, 4, seed=1), normal(2, 12, seed=2)
    joined = streams.join(video, sound, rest)
    parts = streams.parts(joined)
    assert joined.shape == (2, *streams.shape) == (2, 5, 2, 2, 4)
    assert all(map(torch.equal, (parts.video, parts.sound, parts.rest), (video, sound, rest)))
    assert not streams.parts(streams.join(video, sound)).rest.any()
    assert Streams(channels=3, sound=(4, 4), places=(2, 2, 4)).shape == (4, 2, 2, 4), "what fits has no rest"


@every
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_the_loss_is_the_sum_of_the_streams_means(family: str, weight: float) -> None:
    pipeline = make(family, f"model.audio_weight={weight}")
    squares = normal(3, *pipeline.latent_shape((9, 32, 64))).square()
    parts = pipeline.parts(squares)[1]
    truth = parts.video[:, :, pipeline.given :].flatten(1).mean(1) + weight * parts.sound.flatten(1).mean(1)
    torch.testing.assert_close(pipeline.weigh(squares).flatten(1).mean(1), truth)


class Known(nn.Module):
    """Stands in for the transformer: returns what stands for one velocity everywhere; keeps what it was told and saw."""

    def __init__(self, network: nn.Module, video: Tensor, sound: Tensor) -> None:
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.zeros(1)), network.config
        self.answer, self.told = (video.flatten(2).transpose(1, 2), sound), []

    def forward(self, **named: Any) -> tuple[Tensor, Tensor]:
        self.told.append(named)
        return self.answer


@every
def test_a_constant_velocity_leads_from_the_noise_to_the_clean_latents(family: str) -> None:
    pipeline = anew(family)
    batch = encoded(pipeline, PROMPTS[:2], CLIPS)
    clean, noise = (normal(2, *pipeline.latent_shape(SHAPE), seed=seed) for seed in (1, 2))
    goal, start = pipeline.parts(clean)[1], pipeline.parts(noise)[1]
    network = pipeline.models["transformer"] = Known(pipeline.models["transformer"], start.video - goal.video, start.sound - goal.sound)
    sigmas = pipeline.schedule(4, SHAPE)
    end = pipeline.parts(denoise(pipeline, batch, None, noise, sigmas, 1.0))[1]
    free = slice(pipeline.given, None)
    torch.testing.assert_close(end.video[:, :, free], goal.video[:, :, free], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end.sound, goal.sound, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end.rest, torch.zeros_like(end.rest), atol=1e-5, rtol=0)
    for told, sigma in zip(network.told, sigmas[:-1], strict=True):
        assert all(torch.equal(told[name], 1000 * sigma.expand(2)) for name in ("audio_timestep", "sigma"))
        times = told["timestep"].view(2, -1).expand(2, 32).view(2, 2, 16)  # of T2V one for a row
        assert torch.equal(times[:, free], 1000 * sigma.expand(2, 2 - pipeline.given, 16)) and not times[:, : free.start].any()
    if pipeline.given:
        torch.testing.assert_close(end.video[:, :, :1], batch["image_condition_latents"], atol=1e-5, rtol=0)
        shown = network.told[0]["hidden_states"].transpose(1, 2).unflatten(2, (2, 4, 4))
        assert torch.equal(shown[:, :, :1], batch["image_condition_latents"])


def test_a_given_first_frame_adds_nothing_to_the_loss_and_no_gradient() -> None:
    pipeline = loaded("ltx2_i2v")
    state = Executor(pipeline.units(), pipeline.models).run(
        State(shared={"prompt": PROMPTS[0], "video": CLIPS[0], "audio": tone()}), Draws(0, "row", 0)
    ).shared  # fmt: skip
    batch = {name: state[name][None] for name in (*pipeline.conditions, pipeline.target)}
    clean, sigma = batch[pipeline.target], torch.tensor([0.3])
    noise = normal(*clean.shape)
    with torch.no_grad():
        error = pipeline.velocity(pipeline.begin(batch, sigma, noise), mix(clean, noise, sigma), sigma) - (noise - clean)
    video = pipeline.parts(error)[1].video
    assert video[:, :, 0].abs().max() < 1e-4 < video[:, :, 1:].abs().max()
    assert not pipeline.parts(pipeline.weigh(torch.ones_like(error)))[1].video[:, :, 0].any()


@pytest.mark.slow
@every
def test_one_video_with_one_noise_and_one_level_is_learned_with_its_sound(family: str) -> None:
    pipeline = make(family)
    pipeline.load(("transformer",), CPU, torch.float32)
    network = pipeline.models["transformer"].requires_grad_(True)
    clean, noise = (normal(1, *pipeline.latent_shape(SHAPE), seed=seed) for seed in (1, 2))
    sigma, batch = torch.tensor([0.6]), encoded(loaded(family), PROMPTS[:1], CLIPS[:1])
    optimizer, curves = torch.optim.AdamW(network.parameters(), lr=1e-2), []
    for _ in range(150):
        velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), mix(clean, noise, sigma), sigma)
        squares = pipeline.weigh((velocity - (noise - clean)).square())
        optimizer.zero_grad()
        squares.mean().backward()
        optimizer.step()
        parts = pipeline.parts(squares.detach())[1]
        curves.append((parts.video.mean().item(), parts.sound.mean().item()))
        if all(last < first / 10 for first, last in zip(curves[0], curves[-1], strict=True)):
            return
    pytest.fail(f"from {curves[0]} to {curves[-1]}")


@every
def test_the_streams_hear_and_see_one_another(family: str) -> None:
    pipeline, sigma = loaded(family), torch.tensor([0.7])
    x, batch = normal(1, *pipeline.latent_shape(SHAPE)), encoded(loaded(family), PROMPTS[:1], CLIPS[:1])
    streams, parts = pipeline.parts(x)

    def found(video: Tensor, sound: Tensor) -> Any:
        with torch.no_grad():
            return streams.parts(pipeline.velocity(pipeline.begin(batch, sigma, x), streams.join(video, sound), sigma))

    own = found(parts.video, parts.sound)
    assert (found(parts.video, -parts.sound).video - own.video)[:, :, 1:].abs().max() > 1e-4
    assert (found(-parts.video, parts.sound).sound - own.sound).abs().max() > 1e-4


@every
def test_units_are_cacheable_and_call_the_models_that_they_declare(family: str) -> None:
    text, connectors, *image, video, sound, target = loaded(family).units()
    assert [(u.input_params, u.onload_model_names) for u in (text, connectors, *image, video, sound)] == [
        (("prompt",), ("text_encoder",)), (("text_states", "text_mask"), ("connectors",)),
        *[(("video",), ("vae",))] * len(image), (("video",), ("vae",)), (("audio",), ("audio_vae",)),
    ]  # fmt: skip
    assert len(image) == loaded(family).given and not any(unit.may_write for unit in loaded(family).units())
    assert target.onload_model_names == () and target.random == "per_epoch"


def test_the_table_of_undeclared_rewrites_is_what_the_blocks_do() -> None:
    pipeline = loaded("ltx2")
    given = {"prompt": ["a red apple"], "max_sequence_length": 64, "text_states": normal(1, 64, 96), "text_mask": torch.ones(1, 64).long()}
    for name in ("text_encoder", "connectors"):
        (block,) = pipeline.modular._encoding[name]
        components = pipeline.modular._pipeline(["tokenizer"])
        setattr(components, name, pipeline.models[name])
        state = PipelineState(values={i.name: given[i.name] for i in block.inputs})
        block(components, state)
        assert all(state.values[i.name] is given[i.name] for i in block.inputs) and pipeline.rewrites[name] == ()


def test_the_published_sizes_are_taken_without_weights() -> None:
    """Those of the classes themselves, but for what the published settings say otherwise."""
    own = [f"+model.components.{name}={{}}" for name in ("transformer", "audio_vae", "connectors", "vocoder", "scheduler")]
    text = "+model.components.text_encoder={text_config:{hidden_size:3840,num_hidden_layers:48}}"
    vae = "+model.components.vae={spatial_compression_ratio:32,temporal_compression_ratio:8}"
    pipeline = assembled("ltx2", "model.weights=null", *own, text, vae)
    shape = (121, 512, 768)
    latents = pipeline.latent_shape(shape)
    assert latents == (131, 16, 16, 24) and pipeline.pixel_shape(latents) == shape
    parts = pipeline.parts(torch.empty(1, *latents, device="meta"))[1]
    assert parts.video.shape == (1, 128, 16, 16, 24) and parts.sound.shape == (1, 126, 128) and parts.rest.shape == (1, 2304)
    assert pipeline.sound == Hearing(rate=16000, channels=2, fps=24.0) and pipeline.models == {}


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        ("ltx2", "model.components.transformer.in_channels=8", "transformer.in_channels: is 8; must be 4, as vae.latent_channels"),
        ("ltx2", "model.components.transformer.audio_in_channels=8", "audio_in_channels: is 8; must be 4, as audio_vae.latent_channels"),
        ("ltx2", "model.components.transformer.vae_scale_factors=[8,8,8]", r"vae_scale_factors: is \[8, 8, 8\]; must be \[4, 8, 8\]"),
        ("ltx2", "+model.components.audio_vae.sample_rate=24000", "audio_sampling_rate: is 16000; must be 24000, as audio_vae.sample_r"),
        ("ltx2", "model.components.audio_vae.ch_mult=[1,1]", r"audio_vae.ch_mult: is \[1, 1\]; give 3 levels: a latent is 4 frames"),
        ("ltx2", "model.components.audio_vae.base_channels=8", "audio_vae.base_channels: is 8; must be 4, as latent_channels in all"),
        ("ltx2", "model.components.connectors.text_proj_in_factor=4", "text_proj_in_factor: is 4; must be 3, as text_encoder's num_hid"),
        ("ltx2", "model.components.vocoder.output_sampling_rate=800", "output_sampling_rate: is 800; must be 400, as upsample_factors"),
        ("ltx2", "model.components.vocoder.in_channels=8", "vocoder.in_channels: is 8; must be 16, as audio_vae's channels in all"),
        ("ltx2", "+model.components.audio_vae.in_channels=3", "audio_vae.in_channels: is 3; give 1 for mono or 2 for stereo"),
        ("ltx2", "+model.components.vae.timestep_conditioning=true", "timestep_conditioning: is true; only VAEs that are told no time"),
        ("ltx2", "model.max_sequence_length=60", "max_sequence_length: is 60, which 8 registers of a connector do not divide; give"),
        ("ltx2", "model.fps=0", "model.fps: is 0.0; give frames a second"),
        ("ltx2", "model.audio_weight=-1", "model.audio_weight: is -1.0; give 0 or more"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(family: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(family, setting)


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("ltx2", (6, 32, 32), r"^data: a video of 6 frames .*; choose 1 \+ 4 n frames, such as 5 or 9$"),
        ("ltx2", (5, 32, 36), "data: a picture of 32x36 pixels does not divide into tiles of 8x8"),
        ("ltx2", (32, 32), "data: rows are pictures, and this model takes videos"),
        ("ltx2_i2v", (1, 32, 32), "data: a video of 1 frame is all given, and nothing is left to learn; choose 1 [+] 4 n frames"),
    ],
)
def test_shapes_that_the_model_cannot_take_are_refused(family: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(family).latent_shape(shape)
