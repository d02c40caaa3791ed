"""Where a pipeline's weights come from and how they are known.   pytest tests/pipelines/test_weights.py"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from flowrun.config import ConfigError
from flowrun.pipelines.emoji import EmojiPipeline

Make = Callable[..., EmojiPipeline]
CPU = torch.device("cpu")


def hash_file(path: Path) -> bytes:
    return sha256(path.read_bytes()).digest()


def transformer_of(pipeline: EmojiPipeline) -> torch.nn.Module:
    pipeline.load(("transformer",), CPU, torch.float32)
    return pipeline.models["transformer"]


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def identity(pipeline: EmojiPipeline, name: str = "transformer") -> bytes:
    return pipeline.components()[name].identity(hash_file)


@pytest.fixture
def saved(make: Make, tmp_path: Path) -> Path:
    """A transformer of seed 7 as `save_pretrained` leaves it."""
    transformer_of(make(seed=7)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_random_weights_are_a_function_of_the_seed_alone(make: Make) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = transformer_of(make(seed=0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert equal(first, transformer_of(make(seed=0)))
    assert not equal(first, transformer_of(make(seed=1)))


def test_loading_the_text_encoder_leaves_the_global_generator_alone(make: Make) -> None:
    before = torch.get_rng_state()
    make().load(("text_encoder",), CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_what_is_asked_for_is_loaded_frozen_and_in_evaluation_mode(make: Make) -> None:
    pipeline = make()
    assert pipeline.models == {}
    network = transformer_of(pipeline)
    assert set(pipeline.models) == {"transformer"}
    assert not network.training and not any(p.requires_grad for p in network.parameters())
    with pytest.raises(KeyError, match="vae"):
        pipeline.load(("vae",), CPU, torch.float32)


def test_loaded_weights_lie_in_aligned_memory_of_their_own(loaded: EmojiPipeline, make: Make, saved: Path) -> None:
    networks = (loaded.models["text_encoder"], transformer_of(make(weights=str(saved))))
    for network in networks:
        for tensor in network.parameters():
            assert tensor.data_ptr() % 64 == 0
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("place", ["", "transformer", "model/transformer"])
def test_saved_weights_come_back_exactly(make: Make, saved: Path, tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    saved.rename(root / place)
    again = transformer_of(make(seed=0, weights=str(root)))
    assert equal(again, transformer_of(make(seed=7)))
    assert not again.training


def test_identities_read_no_weights(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    components = make().components()
    monkeypatch.setattr(AutoModel, "from_pretrained", refuse)
    monkeypatch.setattr("diffusers.FluxTransformer2DModel.__init__", refuse)
    for name, component in components.items():
        assert component.name == name and component.describe
        assert isinstance(component.identity(lambda path: path.name.encode()), bytes)
        assert component.configure()


def test_the_transformers_identity_is_its_configuration_and_seed_or_its_weights(make: Make, saved: Path) -> None:
    random = identity(make())
    assert random == identity(make(scheduler={"shift": 3.0}, text_tokens=4))
    assert random != identity(make(seed=1))
    assert random != identity(make(transformer={"num_layers": 2}))
    kept = identity(make(weights=str(saved)))
    assert kept == identity(make(seed=1, weights=str(saved))) != random
    (file,) = saved.glob("*.safetensors")
    tensors = load_file(file)
    tensors["x_embedder.bias"] += 1e-3
    save_file(tensors, file)
    assert identity(make(weights=str(saved))) != kept


def test_the_text_encoders_identity_holds_its_tokenizer(make: Make) -> None:
    component = make().components()["text_encoder"]
    read: list[str] = []

    def note(path: Path) -> bytes:
        read.append(path.name)
        return path.name.encode()

    whole = component.identity(note)
    assert {"config.json", "model.safetensors", "tokenizer.json", "vocab.txt"} <= set(read)
    for changed in read:
        assert (
            component.identity(lambda path, changed=changed: path.name.encode() + b"x" * (path.name == changed))
            != whole
        )


def test_a_component_can_be_asked_for_its_configuration(make: Make) -> None:
    components = make().components()
    assert components["text_encoder"].configure()["hidden_size"] == 384
    assert components["transformer"].configure()["num_layers"] == 1
    assert components["transformer"].configure()["out_channels"] is None  # the class's own value of a setting left out


def test_weights_that_are_not_there_or_not_these_are_named(make: Make, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="model.weights: .*nowhere holds no transformer; give a folder made by save_pretrained"
    ):
        make(weights=str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match="components.transformer.num_layers: is 2, but the weights in .*saved were made with 1"
    ):
        make(weights=str(saved), transformer={"num_layers": 2})


def test_missing_and_strange_tensors_are_refused(make: Make, saved: Path) -> None:
    (file,) = saved.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if name != "x_embedder.bias"}, file)
    with pytest.raises(ConfigError, match=r"model.weights: .*x_embedder.bias"):
        transformer_of(make(weights=str(saved)))
    save_file({**tensors, "stranger": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match="model.weights: .*stranger"):
        transformer_of(make(weights=str(saved)))


def test_a_damaged_file_is_refused(make: Make, saved: Path) -> None:
    (file,) = saved.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="model.weights: .*saved cannot be loaded"):
        transformer_of(make(weights=str(saved)))
