"""Families that change pictures, against diffusers' own pipelines.   pytest tests/pipelines/test_editing_families.py"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from diffusers.modular_pipelines.qwenimage.prompt_templates import (
    QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE,
    QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE_START_IDX,
)
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from PIL import Image

from flowrun.cache.code import code_identity
from flowrun.config import ConfigError
from flowrun.data._picture import from_tensor
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.sampling import denoise
from tests.pipelines.families import CPU, EDITORS, PROMPTS, SIZE, encoded, loaded, make, normal, oracle, seen
from tests.pipelines.oracles import ORACLES

every = pytest.mark.parametrize("family", EDITORS)
SEVERAL = [family for family in EDITORS if family != "flux_kontext"]


def shown(pipeline: DiffusersPipeline, rows: Sequence[int], size: tuple[int, int] = SIZE) -> list[list[Image.Image]]:
    """The pictures of these rows as diffusers' pipelines take them."""
    return [[from_tensor(pixels) for pixels in seen(pipeline, row, size).values()] for row in rows]


@every
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_sampling_gives_the_pictures_of_diffusers(family: str, guidance: float, size: tuple[int, int]) -> None:
    if guidance != 1 and not oracle(family).guided:
        pytest.skip("diffusers' pipeline takes no negative prompt")
    pipeline, noise = loaded(family), normal(2, *loaded(family).latent_shape(size))
    conditions, negative = encoded(pipeline, PROMPTS[:2], size), encoded(pipeline, ["", ""], size)
    latents = denoise(pipeline, conditions, negative, noise, pipeline.schedule(3, size), guidance)
    ours = (pipeline.decode(latents) + 1) / 2
    truth = oracle(family).sampled(noise, PROMPTS[:2], 3, guidance, shown(pipeline, (0, 1), size))
    assert ours.shape == truth.shape == (2, 3, *size)
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=0)
    assert truth.std() > 0.01 and (truth[0] - truth[1]).abs().max() > 1e-3


@every
def test_the_network_hears_of_caption_and_picture_what_diffusers_tells_it(family: str) -> None:
    pipeline, x, sigma = loaded(family), normal(1, *loaded(family).latent_shape(SIZE)), torch.tensor([0.5])
    prepared = pipeline.begin(encoded(pipeline, PROMPTS[1:2], first=1), sigma, x)
    for name, value in oracle(family).heard(x, PROMPTS[1], shown(pipeline, [1])[0]).items():
        torch.testing.assert_close(getattr(prepared, name), value, atol=1e-5, rtol=1e-5)


@every
def test_another_picture_gives_another_velocity(family: str) -> None:
    pipeline, x, sigma = loaded(family), normal(1, *loaded(family).latent_shape(SIZE)), torch.tensor([0.5])
    with torch.no_grad():
        first, other = (pipeline.velocity(pipeline.begin(encoded(pipeline, ["a cat"], first=row), sigma, x), x, sigma) for row in (0, 1))
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize("family", SEVERAL)
def test_two_pictures_of_a_row_are_seen_in_their_order(family: str) -> None:
    two = make(family, "model.conditions=2")
    two.models, size = loaded(family).models, (64, 96)
    assert two.inputs == ("image", "prompt", "condition", "condition_2")
    noise = normal(1, *two.latent_shape(size))
    conditions = encoded(two, PROMPTS[:1], size)
    ours = (two.decode(denoise(two, conditions, None, noise, two.schedule(2, size), 1.0)) + 1) / 2
    pictures = shown(two, [0], size)[0]
    truth, swapped = (oracle(family).sampled(noise, PROMPTS[:1], 2, 1.0, [order]) for order in (pictures, pictures[::-1]))
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=0)
    assert (swapped - truth).abs().max() > 1e-4


def test_the_template_that_is_cut_off_by_count_leaves_the_caption() -> None:
    """Qwen-Image-Edit's has 64 tokens; with more, as one for each letter, the cut would leave the template's last words or less."""
    pipeline = loaded("qwen_image_edit")
    words = pipeline.modular.part("processor").tokenizer
    before, after = QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE.split("{}")
    assert len(words(before)["input_ids"]) == QWENIMAGE_EDIT_PLUS_PROMPT_TEMPLATE_START_IDX < len(before)
    first, other, long = (encoded(pipeline, [text])["prompt_embeds"][0] for text in ("a bb", "a bz", "a bb and a bz"))
    end = len(words(after)["input_ids"])
    counts = [len(words(text)["input_ids"]) for text in ("a bb", "a bb and a bz")]
    assert len(long) - len(first) == counts[1] - counts[0]
    assert len(first) == len(other) and (first[-end - 1] - other[-end - 1]).abs().max() > 1e-3
    head = len(first) - end - counts[0]  # the picture's tokens stand before the caption's
    assert torch.equal(first[:head], other[:head]) and not torch.equal(first[head:], other[head:])


@pytest.mark.parametrize(("size", "fits"), [((64, 512), True), ((48, 64), False), ((64, 528), False)])
def test_pictures_that_flux2_does_not_take_are_refused_before_the_run(size: tuple[int, int], fits: bool) -> None:
    if fits:
        assert make("flux2_edit").latent_shape(size) == (128, 4, 32)
        return
    with pytest.raises(ConfigError, match=r"data: FLUX.2 sees no condition picture of .* pixels; choose sizes with both sides"):
        make("flux2_edit").latent_shape(size)
    assert make("flux2").latent_shape(size)


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        ("qwen_image_edit", "model.conditions=0", "model.conditions: is 0; give at least 1"),
        ("qwen_image_edit", "model.reading_area=8", "model.reading_area: is 8; give at least 1024"),
        ("qwen_image_edit", "+model.components.processor.sizes={}", "model.components.processor.sizes: is no setting of Qwen2VL"),
        ("qwen_image_edit", "~model.components.processor", "components.processor: is not given"),
        ("flux2_edit", "model.conditions=-1", "model.conditions: is -1; give a number of pictures; 0: text to image"),
    ],
)
def test_bad_settings_are_named(family: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(family, setting)


def test_what_reaches_a_value_is_among_the_settings_of_its_unit() -> None:
    for family, setting, touched in (
        ("flux_kontext", "model.preferred_sizes=true", {"vae_encoder"}),
        ("qwen_image_edit", "model.latents_area=16384", {"text_encoder", "vae_encoder"}),
        ("qwen_image_edit", "model.conditions=2", {"text_encoder", "vae_encoder"}),
        ("flux2_edit", "model.conditions=2", {"vae_encoder"}),
    ):
        before, after = ({unit.name: code_identity(unit) for unit in p.units()} for p in (make(family), make(family, setting)))
        assert {name for name in before if before[name] != after[name]} == touched


def test_kontexts_own_sizes_are_those_of_diffusers() -> None:
    ours = make("flux_kontext", "model.preferred_sizes=true")
    ours.models = loaded("flux_kontext").models
    found = encoded(ours, PROMPTS[:1], (64, 96))["image_latents"]
    width, height = min(((w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS), key=lambda size: abs(96 / 64 - size[0] / size[1]))
    assert found.shape == (1, 16, height // 8, width // 8)


def test_pictures_modulated_as_clean_as_in_the_2511_model() -> None:
    ours = make("qwen_image_edit", "+model.components.transformer.zero_cond_t=true")
    ours.load(ours.components(), CPU, torch.float32)
    noise, guidance = normal(1, *ours.latent_shape(SIZE)), 4.0
    conditions, negative = encoded(ours, PROMPTS[:1]), encoded(ours, [""])
    drawn = (ours.decode(denoise(ours, conditions, negative, noise, ours.schedule(2, SIZE), guidance)) + 1) / 2
    truth = ORACLES["qwen_image_edit"](ours).sampled(noise, PROMPTS[:1], 2, guidance, shown(ours, [0]))
    torch.testing.assert_close(drawn, truth, atol=2e-5, rtol=0)
    usual = oracle("qwen_image_edit").sampled(noise, PROMPTS[:1], 2, guidance, shown(ours, [0]))
    assert (usual - truth).abs().max() > 1e-4
