"""Families by their modular blocks alone, against diffusers' pipelines and the families' own files.

    pytest tests/pipelines/test_any_blocks.py
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline, LTXPipeline
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.models import AutoencoderKL
from diffusers.modular_pipelines import (
    ComponentSpec,
    InputParam,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    OutputParam,
    SequentialPipelineBlocks,
)
from diffusers.modular_pipelines.stable_diffusion_3.modular_blocks_stable_diffusion_3 import StableDiffusion3AutoBlocks
from torch import Tensor

from flowrun.adapters import Config, Kind, attach
from flowrun.cache.code import code_identity
from flowrun.config import ConfigError
from flowrun.graph import Draws, Executor, State
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.sampling import denoise
from tests.pipelines.families import CPU, PROMPTS, assembled, encoded, learn, loaded, make, normal, picture, run_unit
from tests.pipelines.video_oracles import clip

HUNYUAN = "hunyuan_video1_5"
videos = pytest.mark.parametrize("family", ["ltx_video", pytest.param(HUNYUAN, marks=pytest.mark.slow)])
SHAPE = (9, 32, 64)
# A family with a file of its own -> its blocks and their workflow.
KNOWN = {
    "flux": ("FluxAutoBlocks", "text2image"),
    "qwen_image": ("QwenImageAutoBlocks", "text2image"),
    "sd3": ("StableDiffusion3AutoBlocks", "text2image"),
}


def ltx(ours: DiffusersPipeline, prompt: str, noise: Tensor, guidance: float, steps: int) -> Tensor:
    """A video [1, F, 3, H, W] in [0, 1] by diffusers' pipeline, from noise [1, C, f, h, w]."""
    whole = LTXPipeline(**ours.models, tokenizer=ours.modular.part("tokenizer"), scheduler=ours.modular.part("scheduler"))
    whole.set_progress_bar_config(disable=True)
    tokens = whole._pack_latents(noise, 1, 1)
    frames, height, width = SHAPE
    return whole(prompt=prompt, negative_prompt="", height=height, width=width, num_frames=frames, latents=tokens, output_type="pt",
                 guidance_scale=guidance, num_inference_steps=steps, max_sequence_length=32).frames  # fmt: skip


def hunyuan(ours: DiffusersPipeline, prompt: str, noise: Tensor, guidance: float, steps: int) -> Tensor:
    parts = {name: ours.modular.part(name) for name in ("tokenizer", "tokenizer_2", "scheduler")}
    whole = HunyuanVideo15Pipeline(**ours.models, **parts, guider=ClassifierFreeGuidance(guidance_scale=guidance))
    whole.set_progress_bar_config(disable=True)
    frames, height, width = SHAPE
    return whole(prompt=prompt, negative_prompt="", height=height, width=width, num_frames=frames, latents=noise, output_type="pt",
                 num_inference_steps=steps).frames  # fmt: skip


ORACLES = {"ltx_video": ltx, "hunyuan_video1_5": hunyuan}


@pytest.mark.parametrize(("family", "guidance"), [
    ("ltx_video", 1.0), ("ltx_video", 3.0), pytest.param(HUNYUAN, 6.0, marks=pytest.mark.slow)])  # fmt: skip
def test_sampling_gives_the_videos_of_diffusers(family: str, guidance: float) -> None:
    pipeline = loaded(family)
    noise = normal(2, *pipeline.latent_shape(SHAPE))
    conditions, negative = encoded(pipeline, PROMPTS[:2]), encoded(pipeline, ["", ""])
    latents = denoise(pipeline, conditions, negative, noise, pipeline.schedule(3, SHAPE), guidance)
    ours = (pipeline.decode(latents) + 1) / 2
    truth = torch.cat([ORACLES[family](pipeline, p, row, guidance, 3) for p, row in zip(PROMPTS, noise.split(1), strict=False)])
    assert ours.shape == truth.shape == (2, 9, 3, 32, 64)
    torch.testing.assert_close(ours, truth, atol=2e-5, rtol=0)
    assert truth.std() > 0.01 and (truth[0] - truth[1]).abs().max() > 1e-3


@videos
def test_decoding_undoes_what_the_target_is_encoded_by(family: str) -> None:
    """The VAE's own latents, in its own units, for statistics that are not one and zero."""
    pipeline = make(family, seed=1)
    pipeline.load(["vae"], CPU, torch.float32)
    vae = pipeline.models["vae"]
    if family == "ltx_video":
        vae.latents_mean.copy_(normal(8, seed=1))
        vae.latents_std.copy_(normal(8, seed=2).exp())
    video = clip(0, SHAPE)
    with torch.no_grad():
        raw = vae.encode((video.float() / 127.5 - 1).transpose(0, 1)[None]).latent_dist.mean
        shown = vae.decode(raw).sample.clamp(-1, 1).transpose(1, 2)
    mean = run_unit(pipeline, "target_moments", Draws(0, "row", 0), video=video)["target_mean"]
    assert mean.shape == pipeline.latent_shape(SHAPE) and not torch.allclose(mean, raw[0], atol=1e-3)
    torch.testing.assert_close(pipeline.decode(mean[None]), shown, atol=1e-4, rtol=0)


@cache
def by_blocks(family: str) -> DiffusersPipeline:
    """The same networks without the family's file."""
    ours = loaded(family)
    blocks, workflow = KNOWN[family]
    given = ["model.pipeline=modular", f"+model.blocks={blocks}", f"+model.workflow={workflow}", "+model.data=image",
             *(f"+model.settings.{name}={value}" for name, value in ours.settings().items()),
             "~model.max_sequence_length", *(["~model.guidance"] if family == "flux" else [])]  # fmt: skip
    pipeline = assembled(f"{family}_tiny", *given)
    pipeline.models = ours.models
    return pipeline


@pytest.mark.parametrize("family", KNOWN)
def test_a_known_family_is_the_same_without_its_file(family: str) -> None:
    mine, theirs, size = by_blocks(family), loaded(family), (32, 64)
    assert mine.latent_shape(size) == theirs.latent_shape(size)
    assert mine.pixel_shape(mine.latent_shape(size)) == size and mine.reduction == theirs.reduction
    torch.testing.assert_close(mine.schedule(4, size), theirs.schedule(4, size), atol=0, rtol=0)
    conditions = encoded(mine, PROMPTS[:1])
    for name, value in encoded(theirs, PROMPTS[:1]).items():
        torch.testing.assert_close(conditions[name], value, atol=0, rtol=0)
    x, sigma = normal(1, *mine.latent_shape(size)), torch.tensor([0.3])
    found, truth = (p.velocity(p.begin(conditions, sigma, x), x, sigma) for p in (mine, theirs))
    torch.testing.assert_close(found, truth, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mine.decode(x), theirs.decode(x), atol=1e-5, rtol=0)
    mean, std = (run_unit(mine, "target_moments", Draws(0, "row", 0), image=picture(1, size))[f"target_{n}"] for n in ("mean", "std"))
    raw = run_unit(theirs, "target_moments", Draws(0, "row", 0), image=picture(1, size))
    torch.testing.assert_close(mean, theirs.normalise(raw["target_mean"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(std, theirs.normalise(raw["target_std"]) - theirs.normalise(torch.zeros_like(std)), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ltx_video", HUNYUAN])
def test_one_video_with_one_noise_and_one_level_is_learned(family: str) -> None:
    learn(make(family), encoded(loaded(family), PROMPTS[:1]), SHAPE)


@videos
def test_half_precision_weights_give_nearly_the_same_velocity_in_fp32(family: str) -> None:
    half = make(family)
    half.load((half.denoiser,), CPU, torch.bfloat16)
    x, sigma, c = normal(2, *half.latent_shape(SHAPE)), torch.tensor([0.25, 0.75]), encoded(loaded(family), PROMPTS[:2])
    with torch.no_grad():
        rough = half.velocity(half.begin(c, sigma, x), x, sigma)
        exact = loaded(family).velocity(loaded(family).begin(c, sigma, x), x, sigma)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).square().mean().sqrt() < 0.05 * exact.std()


@videos
def test_a_batch_is_its_rows(family: str) -> None:
    pipeline = loaded(family)
    x, sigma, conditions = normal(3, *pipeline.latent_shape(SHAPE)), torch.tensor([0.2, 0.5, 0.9]), encoded(pipeline, PROMPTS)
    with torch.no_grad():
        together = pipeline.velocity(pipeline.begin(conditions, sigma, x), x, sigma)
        for row in range(3):
            one = {name: value[row : row + 1] for name, value in conditions.items()}
            at = slice(row, row + 1)
            alone = pipeline.velocity(pipeline.begin(one, sigma[at], x[at]), x[at], sigma[at])
            torch.testing.assert_close(together[at], alone, atol=1e-5, rtol=1e-5)
    assert (together[0] - together[2]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["text_encoder", "transformer"])
def test_gradients_reach_what_is_trained_and_nothing_else(name: str) -> None:
    pipeline = make("ltx_video")
    pipeline.load(pipeline.components(), CPU, torch.float32)
    none = Config(kind=Kind.none, variant=None, lora_base_model=[], targets="auto", rank=None, alpha=None, dropout=None,
                  init_from=None, merge_first=[], export=[])  # fmt: skip
    attach(pipeline.models, [name], none, pipeline.lora_targets, seed=0)
    executor = Executor(pipeline.units(), pipeline.models, trained=[name])
    state = executor.run(State(shared={"prompt": "a red apple", "video": clip(0, SHAPE)}), Draws(0, "row", 0))
    batch = {n: state.shared[n][None] for n in (*pipeline.conditions, pipeline.target)}
    clean, sigma = batch[pipeline.target], torch.tensor([0.5])
    noise = normal(*clean.shape)
    velocity = pipeline.velocity(pipeline.begin(batch, sigma, noise), (clean + noise) / 2, sigma)
    (velocity - (noise - clean)).square().mean().backward()
    touched = {n for n, model in pipeline.models.items() for p in model.parameters() if p.grad is not None and p.grad.any()}
    assert touched == {name}


class Grey(ModularPipelineBlocks):
    """A decoding step that is no scale and shift: it squares."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("vae", AutoencoderKL)]

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("latents"), InputParam("output_type")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("images")]

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        block_state = self.get_block_state(state)
        block_state.images = components.vae.decode(block_state.latents**2, return_dict=False)[0]
        self.set_block_state(state, block_state)
        return components, state


def changed(**steps: ModularPipelineBlocks) -> SequentialPipelineBlocks:
    """Stable Diffusion 3's steps, some of them replaced; those that are None left out."""
    blocks = dict(StableDiffusion3AutoBlocks().get_workflow("text2image").sub_blocks) | steps
    return SequentialPipelineBlocks.from_blocks_dict({name: block for name, block in blocks.items() if block is not None})


class Squared(SequentialPipelineBlocks):
    def __new__(cls) -> SequentialPipelineBlocks:
        names = [name for name in StableDiffusion3AutoBlocks().get_workflow("text2image").sub_blocks if name.startswith("decode")]
        return changed(**{names[0]: Grey(), **dict.fromkeys(names[1:])})


class Endless(SequentialPipelineBlocks):
    def __new__(cls) -> SequentialPipelineBlocks:
        steps = StableDiffusion3AutoBlocks().get_workflow("text2image").sub_blocks
        (loop,) = [name for name, block in steps.items() if isinstance(block, LoopSequentialPipelineBlocks)]
        return changed(**{loop: None})


def own(blocks: str) -> DiffusersPipeline:
    changes = [f"+model.blocks={blocks}", "+model.workflow=null", "+model.data=image", "+model.settings={}", "~model.max_sequence_length"]
    return assembled("sd3_tiny", "model.pipeline=modular", *changes)


def test_blocks_of_ones_own_that_decode_otherwise_are_refused() -> None:
    pipeline = own(f"{__name__}:Squared")
    pipeline.models = loaded("sd3").models
    with pytest.raises(ConfigError, match="model.blocks: decodes latents by more than a scale and a shift of each channel"):
        run_unit(pipeline, "target_moments", Draws(0, "row", 0), image=picture(0, (32, 32)))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("null", "model.blocks: names no blocks; give a class of diffusers"),
        ("LTXBlock", "is LTXBlock, which is no blocks of diffusers; did you mean LTXAutoBlocks"),
        ("nowhere:Blocks", "is nowhere:Blocks: No module named 'nowhere'"),
        (f"{__name__}:Grey", "is no SequentialPipelineBlocks"),
        (f"{__name__}:Endless", "0 loops in denoise"),
        ("Wan22Blocks", "calls transformer, transformer_2 in its loop"),
        ("StableDiffusionXLAutoBlocks", "scheduler|loop"),
    ],
)
def test_blocks_that_cannot_be_trained_as_they_are_say_why(blocks: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own(blocks)


def test_an_unknown_workflow_or_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="model.workflow: is text2pictures; did you mean text2image"):
        assembled("ltx_video_tiny", "model.blocks=FluxAutoBlocks", "model.workflow=text2pictures")
    with pytest.raises(ConfigError, match=r"model.settings.frame_rat: is no input of the blocks"):
        assembled("ltx_video_tiny", "+model.settings.frame_rat=25")


@videos
def test_rows_that_the_vae_does_not_give_back_are_refused(family: str) -> None:
    for shape in ((8, 32, 32), (9, 32, 30)):
        with pytest.raises(ConfigError, match=f"data: .*{'x'.join(map(str, shape))}.*; choose "):
            make(family).latent_shape(shape)
    with pytest.raises(ConfigError, match="rows are pictures; model.data says video"):
        make(family).latent_shape((32, 32))


def test_a_changed_block_of_ones_own_is_another_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for factor in (2, 3):
        source = OWN.replace("FACTOR", str(factor))
        (tmp_path / f"own_{factor}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        units = own(f"own_{factor}:Blocks").units()
        found.append(units[0])
    first, second = (unit.settings for unit in found)
    assert first["code"] != second["code"] and code_identity(found[0]) != code_identity(found[1])
    assert "code" not in loaded("sd3").units()[0].settings


OWN = '''
from diffusers.modular_pipelines import SequentialPipelineBlocks
from diffusers.modular_pipelines.stable_diffusion_3.encoders import StableDiffusion3TextEncoderStep
from diffusers.modular_pipelines.stable_diffusion_3.modular_blocks_stable_diffusion_3 import StableDiffusion3AutoBlocks


class Text(StableDiffusion3TextEncoderStep):
    def __call__(self, components, state):
        super().__call__(components, state)
        state.set("prompt_embeds", state.get("prompt_embeds") * FACTOR)
        return components, state


class Blocks(SequentialPipelineBlocks):
    def __new__(cls):
        steps = dict(StableDiffusion3AutoBlocks().get_workflow("text2image").sub_blocks)
        return SequentialPipelineBlocks.from_blocks_dict({**steps, "text_encoder": Text()})
'''

