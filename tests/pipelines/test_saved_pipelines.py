"""Pipelines from a folder or the hub.   pytest tests/pipelines/test_saved_pipelines.py"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from flowrun.config import ConfigError
from flowrun.pipelines import _saved
from tests.pipelines.families import CPU, FROM_TEXT, PROMPTS, assembled, encoded, loaded, normal, theirs

OPTIONS = {
    "sd3_5_medium": "sd3", "sd3_5_large": "sd3", "flux1_dev": "flux", "flux2_dev": "flux2", "flux2_klein_base_4b": "flux2_klein",
    "qwen_image": "qwen_image", "z_image": "z_image", "sdxl": "sdxl",
}  # fmt: skip
every = pytest.mark.parametrize("option", OPTIONS)


def hash_file(path: Path) -> bytes:
    return sha256(path.read_bytes()).digest()


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> a folder by diffusers' save_pretrained. Not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    for family in FROM_TEXT:
        theirs(family).save_pretrained(root / family)
    return {family: root / family for family in FROM_TEXT}


def again(option: str, folder: Path, *overrides: str, seed: int = 0) -> Any:
    """The public checkpoint's option on the tiny saved pipeline."""
    tiny = loaded(OPTIONS[option]).config
    small = {name: getattr(tiny, name, None) for name in ("max_sequence_length", "text_encoder_out_layers")}
    settings = [f"model.{name}={value}" for name, value in small.items() if value is not None]
    return assembled(option, f"model.weights={folder}", *settings, *overrides, seed=seed)


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the SD3 folder for one test to spoil."""
    return Path(shutil.copytree(originals["sd3"], tmp_path / "copy"))


def sd3(folder: Path, *overrides: str) -> Any:
    return assembled("sd3_5_medium", f"model.weights={folder}", "model.max_sequence_length=77", *overrides)


def identities(pipeline: Any) -> dict[str, bytes]:
    return {name: component.identity(hash_file) for name, component in pipeline.components().items()}


@every
def test_a_saved_pipeline_computes_what_it_did(option: str, originals: dict[str, Path]) -> None:
    family = OPTIONS[option]
    saved = again(option, originals[family], seed=5)
    saved.load(saved.components(), CPU, torch.float32)
    first, second = encoded(loaded(family), PROMPTS), encoded(saved, PROMPTS)
    assert all(torch.equal(first[name], second[name]) for name in first)
    x, sigma = normal(3, *saved.latent_shape((64, 64))), torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        velocities = [p.velocity(p.begin(first, sigma, x), x, sigma) for p in (loaded(family), saved)]
    assert torch.equal(*velocities)
    assert torch.equal(loaded(family).decode(x), saved.decode(x))
    assert torch.equal(loaded(family).schedule(4, (64, 64)), saved.schedule(4, (64, 64)))


def test_a_guidance_must_fit_the_saved_transformer(originals: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="model.guidance: is None, but the transformer must be told"):
        assembled("flux1_schnell", f"model.weights={originals['flux']}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_come_in_the_precision_of_their_files(folder: Path, dtype: torch.dtype) -> None:
    for name in ("transformer", "text_encoder"):
        for file in (folder / name).glob("*.safetensors"):
            tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
    pipeline = sd3(folder)
    assert {p.dtype for p in pipeline.components()["transformer"].load().parameters()} == {dtype}


def test_nothing_but_configurations_is_read_before_weights_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("diffusers.ModelMixin.from_pretrained", refuse)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    pipeline = sd3(folder)
    for name, component in pipeline.components().items():
        assert component.configure() and component.identity(hash_file) and str(folder) in component.describe
        assert {p.device.type for p in component.outline().parameters()} == {"meta"}, name
    pipeline.units(), pipeline.latent_shape((64, 64)), pipeline.schedule(2, (64, 64)), pipeline.long_texts(["x" * 99])


def test_an_identity_is_settings_weights_and_tokenizer_wherever_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    before = identities(sd3(folder))
    folder = folder.rename(tmp_path / "elsewhere")
    (folder / "README.md").write_text("changed")
    assert identities(sd3(folder)) == before and len(set(before.values())) == 5

    def changed(file: Path, change: Callable[[bytes], bytes]) -> set[str]:
        kept = file.read_bytes()
        file.write_bytes(change(kept))
        after = identities(sd3(folder))
        file.write_bytes(kept)
        return {name for name in before if after[name] != before[name]}

    def nudge(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    def respell(data: bytes) -> bytes:
        return data + b"\n"

    assert changed(folder / "vae" / "diffusion_pytorch_model.safetensors", nudge) == {"vae"}
    assert changed(folder / "text_encoder_2" / "config.json", respell) == {"text_encoder_2"}
    assert changed(folder / "tokenizer_3" / "tokenizer.json", respell) == {"text_encoder_3"}
    assert changed(folder / "tokenizer" / "tokenizer_config.json", respell) == {"text_encoder"}
    assert changed(folder / "scheduler" / "scheduler_config.json", respell) == set()


def write_index(folder: Path, **changes: Any) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_folder_that_is_no_pipeline_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.weights: there is no folder .*nowhere; give a folder made by"):
        sd3(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="model.weights: .*transformer is no diffusers pipeline; .*model_index.json"):
        sd3(folder / "transformer")
    (folder / "model_index.json").write_text("{")
    with pytest.raises(ConfigError, match="model.weights: .*model_index.json is damaged"):
        sd3(folder)


def test_a_missing_component_is_named(folder: Path) -> None:
    write_index(folder, tokenizer=[None, None])
    with pytest.raises(ConfigError, match="has no tokenizer; it must have a CLIPTokenizer there"):
        sd3(folder)
    write_index(folder, tokenizer=["transformers", "CLIPTokenizer"])
    (folder / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="model.weights: .*text_encoder_2 holds no weights; copy the whole folder"):
        sd3(folder)
    shutil.rmtree(folder / "text_encoder_2")
    with pytest.raises(ConfigError, match="a StableDiffusion3Pipeline, has no text_encoder_2; it must have a CLIPTextModelWith"):
        sd3(folder)


def test_another_familys_pipeline_is_named(originals: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="has a CLIPTextModel as text_encoder, this model a CLIPTextModelWithProjection; choose"):
        sd3(originals["flux"])
    with pytest.raises(ConfigError, match="has a CLIPTextModelWithProjection as text_encoder, this model a CLIPTextModel; "):
        assembled("flux1_dev", f"model.weights={originals['sd3']}")


def test_t5_can_be_left_out_and_may_be_missing(folder: Path) -> None:
    assert "text_encoder_3" in sd3(folder).components()
    left_out = sd3(folder, "+model.components.text_encoder_3=null")
    assert "text_encoder_3" not in left_out.components()
    write_index(folder, text_encoder_3=[None, None], tokenizer_3=[None, None])
    shutil.rmtree(folder / "text_encoder_3")
    missing = sd3(folder)
    assert missing.components().keys() == left_out.components().keys()
    left_out.models = missing.models = {n: m for n, m in loaded("sd3").models.items() if n != "text_encoder_3"}
    assert all(torch.equal(a, b) for a, b in zip(*(encoded(p, PROMPTS).values() for p in (left_out, missing)), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("+model.components.vae=null", "model.components.vae: is null, but .* needs it; what can be left out: text_encoder_3"),
        ("+model.components.transformer={num_layers:3}", "transformer.num_layers: is 3, but .* was made with 2; leave it out"),
        ("+model.components.tokenizer=null", "model.components.tokenizer: is null, but this pipeline needs it"),
        ("+model.components.scheduler={shift:2.0}", "model.components.scheduler: comes with model.weights; leave it out"),
    ],
)
def test_components_beside_weights_can_only_be_left_out(folder: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sd3(folder, change)


def test_damaged_and_incomplete_weights_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = sd3(folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if name != "proj_out.bias"}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.weights: .*has no proj_out.bias \(1 tensors are missing\)"):
        pipeline.components()["transformer"].load()
    save_file({**tensors, "stranger": torch.zeros(1)}, file, metadata={"format": "pt"})
    pipeline.components()["transformer"].load()
    assert "does not use: stranger (1 such)" in caplog.text
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ConfigError, match="model.weights: .*transformer cannot be loaded"):
        pipeline.components()["transformer"].load()


def test_of_a_hub_repository_only_what_is_needed_is_fetched(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fetch(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert hub_id == "stabilityai/stable-diffusion-3.5-large"
        asked.append(allow_patterns)
        return str(originals["sd3"])

    monkeypatch.setattr(_saved, "snapshot_download", fetch)
    pipeline = assembled("sd3_5_large")
    pipeline.units(), pipeline.schedule(2, (64, 64)), pipeline.long_texts(["x" * 400])
    assert asked == [_saved.SMALL] and not any("safetensors" in pattern for pattern in _saved.SMALL)
    pipeline.load(("transformer",), CPU, torch.float32)
    pipeline.components()["vae"].identity(hash_file)
    assert asked[1:] == [["transformer/*"], ["vae/*"]]


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("no", response=RESPONSE), "is gated and you have no access; accept its licence at https://hugg.*FLUX.1-dev"),
        (RepositoryNotFoundError("no", response=RESPONSE), "the hub has no repository black-forest-labs/FLUX.1-dev, or not for you"),
        (LocalEntryNotFoundError("no"), "out of reach; hf download black-forest-labs/FLUX.1-dev --local-dir DIR"),
        (ConnectionError("no"), "out of reach; hf download black-forest-labs/FLUX.1-dev --local-dir DIR"),
    ],
)  # fmt: skip
def test_what_to_download_is_said_when_the_hub_refuses(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(_saved, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=f"model.weights: .*{message}"):
        assembled("flux1_dev")


def test_offline_the_real_hub_client_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    real = _saved.snapshot_download
    monkeypatch.setattr(_saved, "snapshot_download", lambda *a, **named: real(*a, **named, cache_dir=tmp_path))
    with pytest.raises(ConfigError, match="FLUX.1-schnell is not on this machine and the hub is out of reach"):
        assembled("flux1_schnell")
