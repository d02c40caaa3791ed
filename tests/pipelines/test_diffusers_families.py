"""The families against diffusers' own pipelines.   pytest tests/pipelines/test_diffusers_families.py"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor, nn

from flowrun.adapters import Config, Kind, attach
from flowrun.config import ConfigError
from flowrun.data._picture import from_tensor
from flowrun.graph import Draws, Executor, State
from flowrun.sampling import denoise
from tests.pipelines.families import (
    FAMILIES,
    FROM_TEXT,
    PROMPTS,
    SIZE,
    each,
    encoded,
    learn,
    loaded,
    make,
    normal,
    oracle,
    picture,
    run_unit,
    seen,
    theirs,
)
from tests.pipelines.oracles import Oracle

every, from_text = each(FAMILIES), each(FROM_TEXT)


@from_text
def test_captions_encoded_one_by_one_are_those_of_a_padded_batch(family: str) -> None:
    with torch.no_grad():
        truth = oracle(family).embeddings(PROMPTS)
    for prompt, row in zip(PROMPTS, truth, strict=True):
        ours = encoded(loaded(family), [prompt])
        assert ours.keys() == row.keys()
        for name, value in row.items():
            torch.testing.assert_close(ours[name][0], value.to(ours[name]), atol=1e-5, rtol=1e-5)
    for name in truth[0]:
        if not name.endswith("mask"):
            assert truth[0][name].shape != truth[1][name].shape or not torch.equal(truth[0][name], truth[1][name])


@from_text
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_sampling_gives_the_pictures_of_diffusers(family: str, guidance: float, size: tuple[int, int]) -> None:
    if guidance != 1 and not oracle(family).guided:
        pytest.skip("diffusers' pipeline takes no negative prompt")
    pipeline, noise = loaded(family), normal(2, *loaded(family).latent_shape(size))
    conditions, negative = encoded(pipeline, PROMPTS[:2]), encoded(pipeline, ["", ""])
    latents = denoise(pipeline, conditions, negative, noise, pipeline.schedule(5, size), guidance)
    ours = (pipeline.decode(latents) + 1) / 2
    truth = oracle(family).sampled(noise, PROMPTS[:2], 5, guidance)
    assert ours.shape == truth.shape == (2, 3, *size)
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=0)
    assert truth.std() > 0.01 and (truth[0] - truth[1]).abs().max() > 1e-3


@from_text
@pytest.mark.parametrize("size", [(64, 64), (128, 96)])
def test_noise_levels_are_the_schedulers_own(family: str, size: tuple[int, int]) -> None:
    pipeline = loaded(family)
    oracle(family).sampled(normal(1, *pipeline.latent_shape(size)), PROMPTS[:1], 6, 1.0)
    levels = pipeline.schedule(6, size)
    assert torch.equal(levels, oracle(family).levels())
    assert levels[0] == (1 if family != "sdxl" else levels.max()) and levels[-1] == 0 and levels.shape == (7,)
    dynamic = theirs(family).scheduler.config.get("use_dynamic_shifting", False)
    assert torch.equal(levels, pipeline.schedule(6, (256, 256))) != dynamic  # whether the shift follows the size


@every
def test_a_drawn_target_is_the_vaes_sample_in_the_networks_units(family: str) -> None:
    pipeline, image, draws = loaded(family), picture(), Draws(3, "row", 5)
    moments = run_unit(pipeline, "target_moments", draws, image=image)
    found = run_unit(pipeline, "target_latents", draws, **{n: moments[n] for n in ("target_mean", "target_std")})
    (unit,) = [unit for unit in pipeline.units() if unit.name == "target_latents"]
    with torch.no_grad():
        truth = oracle(family).latents(oracle(family).posterior(image).sample(draws.generator(unit)))
    torch.testing.assert_close(found["target_latents"], truth, atol=1e-5, rtol=1e-5)
    assert found["target_latents"].shape == pipeline.latent_shape(SIZE)
    later = run_unit(pipeline, "target_latents", Draws(3, "row", 6), **{n: moments[n] for n in ("target_mean", "target_std")})
    assert not torch.equal(later["target_latents"], found["target_latents"])


@every
def test_the_mode_is_the_mean_and_can_be_cached(family: str) -> None:
    pipeline, image, draws = make(family, "model.target=mode"), picture(), Draws(0, "row", 0)
    pipeline.models = loaded(family).models
    state = run_unit(pipeline, "target_moments", draws, image=image)
    found = run_unit(pipeline, "target_latents", draws, target_mean=state["target_mean"])
    with torch.no_grad():
        truth = oracle(family).latents(oracle(family).posterior(image).mode())
    torch.testing.assert_close(found["target_latents"], truth, atol=1e-5, rtol=1e-5)
    assert {unit.random for unit in pipeline.units()} == {"none"}


@every
def test_decoding_is_the_pipelines(family: str) -> None:
    latents = normal(3, *loaded(family).latent_shape(SIZE))
    with torch.no_grad():
        truth = oracle(family).decoded(latents)
    torch.testing.assert_close(loaded(family).decode(latents), truth, atol=1e-5, rtol=1e-5)
    assert loaded(family).decode(latents.bfloat16()).dtype == torch.float32


@every
def test_captions_of_different_length_make_one_batch(family: str) -> None:
    pipeline, sigma = loaded(family), torch.tensor([0.2, 0.5, 0.9])
    x, conditions = normal(3, *pipeline.latent_shape(SIZE)), encoded(pipeline, PROMPTS)
    with torch.no_grad():
        batch = pipeline.velocity(pipeline.begin(conditions, sigma, x), x, sigma)
        for row in range(3):
            one = encoded(pipeline, PROMPTS[row : row + 1], first=row)
            alone = pipeline.velocity(pipeline.begin(one, sigma[row : row + 1], x[row : row + 1]), x[row : row + 1], sigma[row : row + 1])
            torch.testing.assert_close(batch[row : row + 1], alone, atol=1e-5, rtol=1e-5)
    assert batch.shape == x.shape and batch.dtype == torch.float32


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_velocity_is_the_networks_own_output_at_each_rows_time(family: str) -> None:
    pipeline, x, sigma = loaded(family), normal(2, 16, 8, 12), torch.tensor([0.25, 0.75])
    c = encoded(pipeline, PROMPTS[:2])
    named = {"encoder_hidden_states": c["prompt_embeds"], "pooled_projections": c["pooled_prompt_embeds"]}
    with torch.no_grad():
        if family == "sd3":
            truth = pipeline.models["transformer"](hidden_states=x, timestep=1000 * sigma, **named).sample
        else:
            ids = {"txt_ids": torch.zeros(77, 3), "img_ids": FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32)}
            packed = pipeline.models["transformer"](
                hidden_states=FluxPipeline._pack_latents(x, *x.shape), timestep=sigma, guidance=torch.full([2], 3.5), **named, **ids
            ).sample
            truth = FluxPipeline._unpack_latents(packed, 64, 96, 8)
        ours = pipeline.velocity(pipeline.begin(c, sigma, x), x, sigma)
    torch.testing.assert_close(ours, truth, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(ours, pipeline.velocity(pipeline.begin(c, sigma, x), x, sigma.flip(0)), atol=1e-4)


class Known(nn.Module):
    """Stands in for a denoiser: returns what stands for a velocity that is the same everywhere; keeps the times it was told."""

    def __init__(self, network: nn.Module, truth: Oracle, velocity: Tensor) -> None:
        super().__init__()
        self.weight, self.config, self.dtype = nn.Parameter(torch.zeros(1)), network.config, torch.float32
        self.truth, self.velocity, self.times, self.at = truth, velocity, [], (velocity, torch.zeros(len(velocity)))

    def forward(self, *args: Any, **named: Any) -> Any:
        times = next((named[name] for name in ("timestep", "t") if name in named), args[-1] if args else None)
        self.times.append(times)
        return self.truth.answer(self.velocity, *self.at)


@from_text
def test_a_constant_velocity_leads_from_the_noise_to_the_clean_latents(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the network's own sign and time; a wrong one would end elsewhere, or be told at the wrong time."""
    pipeline, truth = copy.copy(loaded(family)), oracle(family)
    shape = pipeline.latent_shape(SIZE)
    clean, noise = normal(2, *shape, seed=1), normal(2, *shape, seed=2)
    truth.sampled(noise, PROMPTS[:2], 4, 1.0)  # sets the scheduler's times
    sigmas = pipeline.schedule(4, SIZE)
    x = pipeline.start(noise, sigmas)
    network = Known(pipeline.models[pipeline.denoiser], truth, (x - clean) / sigmas[0])
    pipeline.models = {**pipeline.models, pipeline.denoiser: network}
    signature = inspect.signature(loaded(family).models[pipeline.denoiser].forward)
    monkeypatch.setattr(Known.forward, "__signature__", signature, raising=False)
    velocity = pipeline.velocity

    def placed(prepared: Any, x: Tensor, sigma: Tensor) -> Tensor:
        network.at = (x, sigma)
        return velocity(prepared, x, sigma)

    pipeline.velocity = placed
    end = denoise(pipeline, encoded(loaded(family), PROMPTS[:2]), None, noise, sigmas, 1.0)
    torch.testing.assert_close(end, clean, atol=1e-4, rtol=1e-4)
    for told, sigma in zip(network.times, sigmas[:-1], strict=True):
        torch.testing.assert_close(told.float(), truth.told(sigma.expand(2)).float(), atol=1e-3, rtol=1e-4)


@each(FAMILIES, [family for family in FAMILIES if family not in ("flux", "qwen_image")])
def test_one_picture_with_one_noise_and_one_level_is_learned(family: str) -> None:
    learn(make(family), encoded(loaded(family), PROMPTS[:1]), SIZE)


@every
def test_half_precision_weights_give_nearly_the_same_velocity_in_fp32(family: str) -> None:
    half = make(family)
    half.load((half.denoiser,), torch.device("cpu"), torch.bfloat16)
    x = normal(2, *half.latent_shape(SIZE))
    sigma, c = torch.tensor([0.25, 0.75]), encoded(loaded(family), PROMPTS[:2])
    with torch.no_grad():
        rough = half.velocity(half.begin(c, sigma, x), x, sigma)
        exact = loaded(family).velocity(loaded(family).begin(c, sigma, x), x, sigma)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).square().mean().sqrt() < 0.05 * exact.std()


@every
@pytest.mark.parametrize("name", ["text_encoder", "vae", "denoiser"])
def test_gradients_reach_what_is_trained_and_nothing_else(family: str, name: str) -> None:
    pipeline = make(family)
    name = pipeline.denoiser if name == "denoiser" else name
    pipeline.load(pipeline.components(), torch.device("cpu"), torch.float32)
    none = Config(kind=Kind.none, variant=None, lora_base_model=[], targets="auto", rank=None, alpha=None, dropout=None,
                  init_from=None, merge_first=[], export=[])  # fmt: skip
    attach(pipeline.models, [name], none, pipeline.lora_targets, seed=0)
    executor = Executor(pipeline.units(), pipeline.models, trained=[name])
    state = executor.run(State(shared={"prompt": "a red apple", "image": picture(), **seen(pipeline, 0)}), Draws(0, "row", 0))
    batch = {n: state.shared[n][None] for n in (*pipeline.conditions, pipeline.target)}
    clean, sigma = batch[pipeline.target], torch.tensor([0.5])
    noise = normal(*clean.shape)
    velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), (clean + noise) / 2, sigma)
    (velocity - (noise - clean)).square().mean().backward()
    touched = {n for n, model in pipeline.models.items() for p in model.parameters() if p.grad is not None and p.grad.any()}
    assert touched == {name}


@every
def test_the_table_of_undeclared_rewrites_is_what_the_blocks_do(family: str) -> None:
    """Each encoding step runs on the tiny model with all inputs given; the inputs that it replaces are the table's."""
    pipeline = loaded(family)
    found = {}
    for name, blocks in pipeline.modular._encoding.items():
        components = pipeline.modular._pipeline(list(pipeline.names.parts))
        for network, module in pipeline.models.items():
            setattr(components, network, module)
        asked = {i.name for block in blocks for i in block.inputs} - {n for b in blocks[:-1] for n in b.intermediate_output_names}
        texts = {name: [f"text {name}"] for name in asked if "prompt" in name}
        more = {"clip_skip": 0, "joint_attention_kwargs": {}, "cross_attention_kwargs": {}, "generator": torch.Generator(),
                "image": from_tensor(picture()), "height": 64, "width": 64}  # fmt: skip
        given = {**texts, **more, **pipeline.modular.settings}
        given = {name: given[name] for name in asked}  # a new input needs a value above
        state = PipelineState(values=dict(given))
        for block in blocks:
            block(components, state)
        found[name] = tuple(n for n, value in given.items() if state.values[n] is not value)
    assert found == dict(pipeline.rewrites)


@every
def test_units_declare_what_the_blocks_declare(family: str) -> None:
    pipeline = loaded(family)
    text, *pictures, moments, target = units = pipeline.units()
    encoders = tuple(name for name in pipeline.components() if name.startswith("text_encoder"))
    reading = pipeline.pictures if family == "qwen_image_edit" else ()
    assert text.input_params == ("prompt", *reading) and text.onload_model_names == encoders and not text.may_write
    if pipeline.pictures:
        (unit,) = pictures
        assert (unit.input_params, unit.output_params, unit.onload_model_names) == (pipeline.pictures, ("image_latents",), ("vae",))
    assert set(pipeline.conditions) <= {name for unit in units for name in unit.output_params}
    assert family == "qwen_image_edit" or text.settings.get("max_sequence_length") == oracle(family).tokens
    assert moments.onload_model_names == ("vae",) and target.onload_model_names == () and target.random == "per_epoch"


@from_text
def test_long_captions_are_counted_and_named_without_weights(family: str) -> None:
    """A caption of as many tokens as are said to fit changes with its last word; what lies far behind does not count."""
    pipeline = make(family)
    last = list(pipeline.tokens)[-1]
    most = int(re.search(r" takes (\d+) tokens", pipeline.long_texts(["z " * 900])[-1])[1])
    counts = [len(pipeline.modular.part(last)(text)["input_ids"]) for text in ("z", "z z")]
    fits = (most - counts[0]) // (counts[1] - counts[0]) + 1  # words
    long, short = "z " * (fits - 1) + "z", "a red apple"
    assert not any(warning.startswith(f"{last} ") for warning in pipeline.long_texts([long])), "it fits"
    warnings = pipeline.long_texts([short, f"{long} z", f"{long} z", f"{long} z more"])
    assert pipeline.models == {} and f"{last} takes {most} tokens and 2 of 3 texts have more" in warnings[-1]
    assert "'z z z" in warnings[-1] and short not in warnings[-1] and pipeline.long_texts([short]) == []
    name, end = pipeline.conditions[0], " z" * 99
    kept, cut = (encoded(loaded(family), [text, f"{text[:-1]}x"])[name] for text in (long, long + end))
    assert not torch.equal(kept[0], kept[1]) and torch.equal(cut[0], cut[1])


@from_text
@pytest.mark.parametrize("size", [(64, 72), (8, 64), (0, 16)])
def test_sizes_that_do_not_divide_into_tokens_are_refused(family: str, size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="data: a picture of .* does not divide into tiles of 16x16"):
        make(family).latent_shape(size)


def test_sd3_has_places_for_so_many_pixels() -> None:
    with pytest.raises(ConfigError, match="data: a picture of 272x64 pixels is larger .*; at most 256 pixels on a side"):
        make("sd3").latent_shape((272, 64))


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        ("sd3", "model.components.transformer.in_channels=8", "transformer.in_channels: is 8; must be 16, as vae.latent"),
        ("sd3", "+model.components.transformer.num_layer=8", "num_layer: is no setting of SD3Transformer2DModel"),
        ("sd3", "model.components.transformer.pooled_projection_dim=8", "is 8; must be 64, as text_encoder.projection_dim"),
        ("sd3", "+model.components.text_encoder.depth=8", "text_encoder.depth: is no setting of CLIPTextConfig"),
        ("sd3", "+model.components.text_encoder_4={}", "text_encoder_4: is no component that takes settings"),
        ("sd3", "~model.components.vae", "components.vae: is not given"),
        ("sd3", "model.components.vae=null", "components.vae: is null"),
        ("sd3", "model.max_sequence_length=0", "model.max_sequence_length: is 0"),
        ("flux", "model.guidance=null", "model.guidance: is None, but the transformer must be told a guidance; give a number"),
        ("flux", "model.components.transformer.guidance_embeds=false", "model.guidance: is 3.5, but .* cannot be told"),
        ("flux", "model.components.text_encoder_2=null", "text_encoder_2: is null"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(family: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(family, setting)


def test_sd3_goes_without_t5_as_in_diffusers() -> None:
    pipeline = make("sd3", "model.components.text_encoder_3=null")
    assert "text_encoder_3" not in pipeline.components() and len(pipeline.long_texts(["x " * 90])) == 2
    pipeline.models = {name: model for name, model in loaded("sd3").models.items() if name != "text_encoder_3"}
    whole = StableDiffusion3Pipeline(**{**theirs("sd3").components, "text_encoder_3": None, "tokenizer_3": None})
    with torch.no_grad():
        truth = whole.encode_prompt(["a red apple"], None, None, max_sequence_length=77)
    ours = encoded(pipeline, ["a red apple"])
    torch.testing.assert_close(ours["prompt_embeds"], truth[0], atol=1e-5, rtol=1e-5)


@every
def test_blocks_find_the_device_of_a_network_that_is_there_and_else_the_cpu(family: str) -> None:
    pipeline = make(family)
    components = pipeline.modular._pipeline(())
    assert components._execution_device == torch.device("cpu")
    components.text_encoder = pipeline.weights.outline("text_encoder")
    assert components._execution_device == torch.device("meta")
