"""Whole runs of the real families at their smallest.   pytest tests/stages/test_real_families.py"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from safetensors import safe_open

import flowrun.library
from flowrun import adapters, cli
from flowrun.adapters.config import Variant
from flowrun.checkpoint import Checkpoints
from flowrun.checks import check_called, check_sizes
from flowrun.config import ConfigError
from flowrun.graph import seed_of
from flowrun.pipelines._random import RandomWeights
from flowrun.run import assemble
from flowrun.sampling import denoise
from flowrun.splitters import split
from tests.conftest import Runs, losses
from tests.pipelines.families import CPU, FROM_TEXT, SIZE, each, encoded, make, normal, theirs
from tests.pipelines.oracles import ORACLES, Oracle
from tests.stages.test_split_equals_whole import NoStore

both = pytest.mark.parametrize("family", [pytest.param("sd3", marks=pytest.mark.slow), "flux"])
every, core = each(FROM_TEXT), each(FROM_TEXT, [family for family in FROM_TEXT if family not in ("sd3", "flux")])
STEPS = 6
FAST = (
    "tracker=[csv]", "sample.prompts=[]", "train.log_every=1", "train.batch_size=2", f"train.steps={STEPS}",
    "task.caption_dropout=0.3",
)  # fmt: skip
SMALL = ("data.captions=[red apple,green apple,pear,lemon]", "data.size=64", *FAST)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=12", "optimizer.lr=0.02")


def denoiser(family: str) -> str:
    return "unet" if family == "sdxl" else "transformer"


def train(runs: Runs, family: str, *overrides: str) -> Path:
    """overrides may choose what is trained; else it is the denoiser."""
    key = "adapter.lora_base_model" if "adapter=lora" in overrides else "task.trainable_models"
    assert cli.main([f"model={family}_tiny", *SMALL, f"{key}=[{denoiser(family)}]", *overrides]) == 0
    return runs.newest("train")


def stages(run: Path) -> dict[str, str]:
    """Unit -> stage, by the plan."""
    lines = [line.split() for line in (run / "plan.txt").read_text().splitlines()]
    units = ("text_encoder", "target_moments", "target_latents")
    return {words[0]: "cache" if "cache" in words else "train" for words in lines if words[:1] and words[0] in units
            and "loaded" not in words}  # fmt: skip


def both_ways(runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str, *overrides: str) -> Path:
    """Train in two stages and in one: the losses are equal bit for bit. Returns the two-stage run."""
    split = train(runs, family, "task=sft_split", *overrides)
    with monkeypatch.context() as patch:
        patch.setattr(flowrun.library, "Store", NoStore)
        whole = train(runs, family, "task=sft", *overrides)
    assert losses(split) == losses(whole) and len(set(losses(split))) == STEPS
    return split


def fresh(family: str) -> Oracle:
    """Diffusers' pipeline with the weights that training starts from."""
    pipeline = make(family)
    pipeline.load(pipeline.components(), CPU, torch.float32)
    return ORACLES[family](pipeline)


@core
@pytest.mark.slow
def test_all_weights_in_two_stages_as_in_one_and_back_in_diffusers(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    run = both_ways(runs, monkeypatch, family)
    assert stages(run) == {"text_encoder": "cache", "target_moments": "cache", "target_latents": "train"}
    network = denoiser(family)
    first = getattr(fresh(family).whole, network)
    saved = dict(type(first).from_pretrained(run / "model" / network).named_parameters())
    trained = Checkpoints(run / "checkpoints", 1).newest().tensors["trained"]
    assert trained.keys() == {f"{network}.{name}" for name in saved}
    assert all(torch.equal(value, trained[f"{network}.{name}"]) for name, value in saved.items())
    start = dict(first.named_parameters())
    assert sum(not torch.equal(saved[name], start[name]) for name in start) > len(start) / 2


@every
def test_an_adapter_in_two_stages_as_in_one_and_in_diffusers(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    run = both_ways(runs, monkeypatch, family, *LORA)
    ours = make(family)
    ours.load(ours.components(), CPU, torch.float32)
    config = adapters.Config(kind=adapters.Kind.lora, variant=Variant.lora, lora_base_model=[denoiser(family)], targets="auto",
                             rank=4, alpha=12.0, dropout=0.0, init_from=str(run / "model"), merge_first=[], export=[])  # fmt: skip
    adapters.attach(ours.models, [], config, ours.lora_targets, seed=0)
    oracle, noise, guidance = fresh(family), normal(1, *ours.latent_shape(SIZE)), 3.5 if ORACLES[family].guided else 1.0
    before = oracle.sampled(noise, ["a red apple"], 3, guidance)
    oracle.whole.load_lora_weights(str(run / "model"))
    assert next(iter(getattr(oracle.whole, denoiser(family)).peft_config.values())).lora_alpha == 12
    conditions, negative = encoded(ours, ["a red apple"]), encoded(ours, [""])
    drawn = ours.decode(denoise(ours, conditions, negative, noise, ours.schedule(3, SIZE), guidance))
    theirs = oracle.sampled(noise, ["a red apple"], 3, guidance)
    torch.testing.assert_close((drawn + 1) / 2, theirs, atol=2e-5, rtol=0)
    assert (theirs - before).abs().max() > 1e-3
    with safe_open(run / "model" / "pytorch_lora_weights.safetensors", "pt") as file:
        keys = list(file.keys())
        assert all(file.get_tensor(key).isfinite().all() for key in keys)
    assert all(re.fullmatch(r"(transformer|unet)\.[\w.]+\.lora_[AB]\.weight", key) for key in keys), "no wrapper's names"


@core
def test_a_trained_text_encoder_is_live_and_comes_back(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    run = both_ways(runs, monkeypatch, family, "task.trainable_models=[text_encoder]")
    assert stages(run) == {"text_encoder": "train", "target_moments": "cache", "target_latents": "train"}
    first = fresh(family).whole.text_encoder
    saved = dict(type(first).from_pretrained(run / "model" / "text_encoder").named_parameters())
    trained = Checkpoints(run / "checkpoints", 1).newest().tensors["trained"]
    assert all(torch.equal(value, trained[f"text_encoder.{name}"]) for name, value in saved.items())
    start = dict(first.named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in saved.items())
    assert not (run / "model" / denoiser(family)).exists()


@both
@pytest.mark.slow
def test_a_trained_vae_encoder_is_live_and_comes_back(runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    run = both_ways(runs, monkeypatch, family, "task.trainable_models=[transformer,vae.encoder]")
    assert stages(run) == {"text_encoder": "cache", "target_moments": "train", "target_latents": "train"}
    saved = AutoencoderKL.from_pretrained(run / "model" / "vae")
    start = fresh(family).whole.vae
    changed = {n.split(".")[0] for (n, a), b in zip(saved.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)}
    assert changed == {"encoder"}


@both
@pytest.mark.slow
def test_adapters_on_text_encoder_and_transformer_together(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bases = ["transformer", "text_encoder", *(["text_encoder_2"] if family == "sd3" else [])]
    run = both_ways(runs, monkeypatch, family, *LORA, f"adapter.lora_base_model=[{','.join(bases)}]")
    assert stages(run)["text_encoder"] == "train" and stages(run)["target_moments"] == "cache"
    whole = fresh(family).whole
    with torch.no_grad():
        before = whole.encode_prompt("a red apple", None, *([None] if family == "sd3" else []), max_sequence_length=77)
        whole.load_lora_weights(str(run / "model"))
        after = whole.encode_prompt("a red apple", None, *([None] if family == "sd3" else []), max_sequence_length=77)
    place = 2 if family == "sd3" else 1  # of the pooled embedding, which comes from the trained encoder
    assert (after[place] - before[place]).abs().max() > 1e-4
    with safe_open(run / "model" / "pytorch_lora_weights.safetensors", "pt") as file:
        parts = {key.split(".")[0] for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert parts == set(bases)
    assert {next(iter(getattr(whole, name).peft_config.values())).lora_alpha for name in bases} == {12}
    ours = make(family)
    ours.load(ours.components(), CPU, torch.float32)
    config = adapters.Config(kind=adapters.Kind.lora, variant=Variant.lora, lora_base_model=bases, targets="auto", rank=4,
                             alpha=12.0, dropout=0.0, init_from=str(run / "model"), merge_first=[], export=[])  # fmt: skip
    adapters.attach(ours.models, [], config, ours.lora_targets, seed=0)
    torch.testing.assert_close(encoded(ours, ["a red apple"])["pooled_prompt_embeds"], after[place], atol=1e-5, rtol=1e-5)


@core
@pytest.mark.slow
def test_each_stage_loads_only_what_it_calls(runs: Runs, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    read: list[str] = []
    real = RandomWeights.load
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: read.append(name) or real(self, name))
    encoders = {name for name in make(family).components() if name.startswith("text_encoder")}
    for settings, wanted in (
        (("stage=cache",), {*encoders, "vae"}),
        (("stage=train",), {denoiser(family)}),
        (("stage=train", "sample.prompts=[pear]", "sample.guidance=1", "resume=none"), {denoiser(family), "vae"}),
    ):
        read.clear()
        train(runs, family, *settings)
        assert set(read) == wanted and len(read) == len(wanted)


def test_long_captions_are_told_before_anything_runs(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    long = "a red apple on a table " * 5
    assert cli.main(["model=sd3_tiny", *SMALL, f"sample.prompts=[{long}]", "dry_run=true"]) == 0
    shown = capfd.readouterr()
    assert "takes 77 tokens and 1 of 6 texts have more" in shown.out + shown.err
    assert "'a red apple on a table" in shown.out + shown.err


@pytest.mark.parametrize(("option", "family"), [pytest.param("sd3_5_medium", "sd3", marks=pytest.mark.slow), ("flux1_dev", "flux")])
@pytest.mark.slow
def test_a_saved_pipeline_trains_with_the_options_own_settings(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, option: str, family: str
) -> None:
    """Half precision and gradient checkpointing are on: the two ways are still equal."""
    folder = runs.folder / "saved"
    theirs(family).save_pretrained(folder)
    settings = [f"model={option}", f"model.weights={folder}", "model.max_sequence_length=77", *SMALL, *LORA]
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main([*settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == STEPS
    plan = (runs.newest("train") / "plan.txt").read_text()
    assert f"Transformer2DModel from {folder}" in plan and "bf16" in plan
    whole = fresh(family).whole
    whole.load_lora_weights(str(runs.newest("train") / "model"))
    assert next(iter(whole.transformer.peft_config.values())).lora_alpha == 12


def test_a_folder_without_weights_ends_the_command_with_one_line(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs("sd3").save_pretrained(runs.folder / "saved")
    (runs.folder / "saved" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert cli.main(["model=sd3_5_large", f"model.weights={runs.folder / 'saved'}", *SMALL]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert len(lines) == 1 and lines[0].startswith("flowrun: model.weights: ") and "vae holds no weights" in lines[0]
    assert runs.newest("cache") is None and runs.newest("train") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.trainable_models=[vae.decoder]"], "task.trainable_models: vae.decoder is called by nothing that the loss needs"),
        (["task.trainable_models=[transformer,vae.decoder.mid_block]"], "task.trainable_models: vae.decoder.mid_block is called by"),
        (["task.trainable_models=[tokenizer]"], "task.trainable_models: tokenizer is no component of the pipeline; known: text_enc"),
        (["task.trainable_models=[vae.encodr]"], "task.trainable_models: there is no vae.encodr; did you mean vae.encoder"),
        (["adapter=lora", "adapter.lora_base_model=[vae]"], "adapter.targets: auto: the pipeline lists no layers for vae, and"),
        (["precision=fp16"], "precision: fp16 needs a GPU and there is none; use bf16 or fp32"),
        (["model.dtype=fp8"], "model.dtype: there is no 'fp8'; known: bf16, fp16, fp32"),
    ],
)
def test_what_cannot_be_trained_so_is_told_before_weights_are_loaded(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str
) -> None:
    monkeypatch.setattr(RandomWeights, "load", lambda self, name: pytest.fail(f"{name} was loaded"))
    assert cli.main(["model=flux_tiny", *SMALL, *settings]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert line.startswith(f"flowrun: {message}")
    assert not (runs.folder / "outputs").exists()


def test_a_component_that_the_data_make_needless_cannot_be_trained(runs: Runs) -> None:
    """Rows that bring their latents: nothing calls the VAE."""
    assembly = assemble(["model=flux_tiny", *SMALL])
    units = [unit for unit in assembly.split.units if "vae" not in unit.onload_model_names]
    part = split("replay", units, ["vae"], live_out=["prompt_embeds"])
    with pytest.raises(ConfigError, match=r"^adapter.lora_base_model: vae is called by nothing .* called: text_.*, transformer$"):
        check_called(assembly.pipeline, assembly.task, ["transformer", "vae"], part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder / "transformer", "transformer is no diffusers pipeline; give one that .* it holds model_index.json"),
        (lambda folder: shutil.rmtree(folder / "vae") or folder, "a FluxPipeline, has no vae; it must have an? AutoencoderKL there"),
        (lambda folder: "nobody/nothing", "nobody/nothing is not on this machine and the hub is out of reach; hf download nobody/"),
        (lambda folder: folder / "vae" / "config.json", "config.json is one file; give a folder made by a diffusers pipeline's"),
        (lambda folder: "https://huggingface.co/a/b", "https://huggingface.co/a/b is an address; give the hub id alone, a/b$"),
        (lambda folder: folder / "lost", "there is no folder .*lost; give a folder made by a diffusers pipeline's save_pretrained"),
    ],
)
def test_weights_that_are_no_pipeline_end_the_command_with_one_line(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: Callable, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    theirs("flux").save_pretrained(runs.folder / "saved")
    words = [f"model.weights={change(runs.folder / 'saved')}", *SMALL]
    assert cli.main(["model=flux1_dev", *words]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flowrun: ")]
    assert re.match(f"flowrun: model.weights: .*{message}", line), line
    assert not (runs.folder / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("option", "family", "told"), [
    ("flux1_dev", "flux", {"guidance_scale": 3.5}),
    ("sdxl", "sdxl", {"guidance_scale": 5.0, "negative_prompt": ""}),
])  # fmt: skip
def test_plain_diffusers_draws_a_runs_sample_again(runs: Runs, option: str, family: str, told: dict) -> None:
    theirs(family).save_pretrained(runs.folder / "saved")
    words = [f"model={option}", f"model.weights={runs.folder / 'saved'}", "model.dtype=fp32", "precision=fp32", "adapter=lora",
             f"adapter.lora_base_model=[{denoiser(family)}]", "data.captions=[red apple,pear]", "data.size=64", "train.steps=3",
             "optimizer.lr=0.01", "sample.prompts=[red apple]", "sample.steps=4", "tracker=[csv]"]  # fmt: skip
    assert cli.main(words) == 0
    run = runs.newest("train")
    pipe = DiffusionPipeline.from_pretrained(runs.folder / "saved")
    pipe.set_progress_bar_config(disable=True)

    def again() -> np.ndarray:
        generator = torch.Generator().manual_seed(seed_of("sample", 0, "red apple"))
        return pipe("red apple", height=64, width=64, num_inference_steps=4, generator=generator, output_type="np", **told).images[0]

    drawn = np.asarray(Image.open(run / "samples" / "step-000003" / "000.png").convert("RGB")) / 255
    bare = again()
    pipe.load_lora_weights(str(run / "model"))
    assert np.abs(again() - drawn).max() < 2 / 255 < np.abs(bare - drawn).max()


def test_thumbnails_for_a_model_with_weights_are_pointed_out(runs: Runs) -> None:
    theirs("flux").save_pretrained(runs.folder / "saved")
    words = ["model=flux1_dev", f"model.weights={runs.folder / 'saved'}", "data.captions=[red apple]"]
    (warning,) = assemble([*words, "data.size=32"]).warnings
    assert warning.startswith("data: 32x32 pixels are only 4x4 latents, far from what the model has learned; set the size, e.g. ")
    assert assemble([*words, "data.size=64"]).warnings == assemble(["model=flux_tiny", "data.size=32"]).warnings == []
    assert check_sizes(assemble(["model=emoji_tiny"]).pipeline, "a run's directory", [(32, 32)]) == []  # tiles of pixels


def test_pictures_of_a_folder_in_their_own_sizes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.folder / "pictures"
    folder.mkdir()
    for number, (width, height) in enumerate([(64, 64), (96, 48), (64, 64), (100, 50)]):
        Image.effect_noise((width, height), 80).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number} with {'many ' * number}words")
    settings = ["data=folder", f"data.path={folder}", "data.geometry.mode=keep", "data.geometry.size=null",
                "data.geometry.multiple_of=16", *FAST]  # fmt: skip
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main(["model=flux_tiny", *settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == STEPS
    plan = (runs.newest("train") / "plan.txt").read_text()
    assert "64x64 pixels: 2 rows" in plan and "96x48 pixels: 2 rows" in plan


@pytest.mark.slow
def test_variants_of_rows_in_buckets_are_the_same_cached_and_live(runs: Runs) -> None:
    folder = runs.folder / "pictures"
    folder.mkdir()
    lines = []
    for number, (width, height) in enumerate([(64, 64), (130, 64), (70, 72), (300, 140)]):
        Image.effect_noise((width, height), 80).convert("RGB").save(folder / f"{number}.png")
        lines += [{"file_name": f"pictures/{number}.png", "text": f"{word}, fine, old, {number}"} for word in ("one", "other")]
    (runs.folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ["data=table", "data.path=t.jsonl", "data.geometry.mode=buckets", "data.geometry.size=null",
                "data.geometry.area=4096", "data.geometry.multiple_of=16", "data.geometry.max_aspect=2",
                "data.geometry.upscale=true", "data.augment.variants=3", "data.augment.flip=0.5", "data.augment.crop=true",
                "data.augment.caption.several=random", "data.augment.caption.shuffle=true", "task.caption_dropout=0.3",
                *FAST]  # fmt: skip
    curves = []
    for task in ("sft_split", "sft"):
        assert cli.main(["model=flux_tiny", *settings, f"task={task}"]) == 0
        curves.append(losses(runs.newest("train")))
    assert curves[0] == curves[1] and len(set(curves[0])) == STEPS
    plan = (runs.newest("train") / "plan.txt").read_text()
    assert "4 rows from table" in plan and "64x64 pixels: 2 rows" in plan and "80x48 pixels: 2 rows" in plan


@pytest.mark.slow
def test_a_text_encoder_trains_on_two_processes(runs: Runs) -> None:
    """Its gradients are averaged beside the transformer's, which has a wrapper for that."""
    where = [*SMALL, *LORA, "adapter.lora_base_model=[transformer,text_encoder]", "processes=2", "train.batch_size=1"]
    assert cli.main(["model=sd3_tiny", *where]) == 0
    assert len(losses(runs.newest("train"))) == STEPS
    before, whole = fresh("sd3").whole.text_encoder, fresh("sd3").whole
    whole.load_lora_weights(str(runs.newest("train") / "model"))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert (whole.text_encoder(ids).text_embeds - before(ids).text_embeds).abs().max() > 1e-4
