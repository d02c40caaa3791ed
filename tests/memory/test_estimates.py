"""What is counted without weights is what is there with them.   pytest tests/memory"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flowrun import adapters
from flowrun.compose import compose
from flowrun.config import ConfigError, Held, Model
from flowrun.memory.conditions import TEXT, conditions
from flowrun.memory.count import Live, Saved
from flowrun.memory.estimate import Step, step
from flowrun.memory.fake import checkpointed
from flowrun.memory.published import COUNTS, SETTINGS
from flowrun.memory.table import _outline
from flowrun.optim import make_optimizer
from flowrun.registry import PIPELINES
from tests.frozen.test_held_weights import every, taken
from tests.pipelines.families import CPU, encoded, make

SHAPES = {"wan": (5, 32, 32)}
long = pytest.mark.slow


@cache
def cached(family: str) -> dict[str, Tensor]:
    """The conditions of two captions, as the real encoders make them."""
    pipeline = make(family)
    pipeline.load([name for name in pipeline.components() if name not in pipeline.denoisers], CPU, torch.float32)
    return encoded(pipeline, ["a red apple", "a very small cat on top of a large house"])


def made(family: str, *overrides: str) -> Step:
    name = "unet" if family == "sdxl" else "transformer"
    settings = ["adapter=lora", f"adapter.lora_base_model=[{name}]", "train.batch_size=2", "model.dtype=bf16", *overrides]
    return Step(compose([f"model={family}_tiny", *settings]), SHAPES.get(family, (64, 64)))


def real(given: Step, checkpointing: bool) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """The same networks with their weights, as the train stage has them: a batch, and what is trained."""
    pipeline = given.pipeline
    pipeline.load(given.networks, CPU, given.dtype)
    adapters.attach(pipeline.models, given.task.trainable_models, given.adapter, pipeline.lora_targets, 0, pipeline.adapter_names)
    pipeline.settle(CPU)
    for network in pipeline.models.values():
        if checkpointing:
            network.enable_gradient_checkpointing(checkpointed)
    kind = given.run.model["name"].removesuffix("_tiny")
    batch = {**cached(kind), pipeline.target: torch.zeros(2, *pipeline.latent_shape(given.shape))}
    return batch, adapters.trained_parameters(pipeline.models)


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        pytest.param(*case, marks=() if case == ("flux", "bf16", True) else long)
        for case in product(TEXT, ("bf16", "fp32"), (False, True))
    ],
)
@pytest.mark.slow
def test_a_step_without_weights_counts_the_bytes_of_one_with_them(family: str, precision: str, checkpointing: bool) -> None:
    found = made(family, f"precision={precision}").estimate(cached(family), checkpointing)
    given = made(family, f"precision={precision}")
    batch, trained = real(given, checkpointing)
    assert (found.kept, found.working) == step(given.pipeline, given.algorithm, batch, given.computes)
    assert found.weights == sum(taken(network) for network in given.pipeline.models.values())
    assert found.gradients == sum(p.grad.untyped_storage().nbytes() for p in trained.values() if p.grad is not None)
    optimizer = make_optimizer(given.run.optimizer, trained)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert found.optimizer == sum(value.untyped_storage().nbytes() for value in state if isinstance(value, Tensor))


@long
@every(Held.bnb_nf4, Held.fp8_cast)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_so_does_one_whose_base_is_held_otherwise(held: Held, checkpointing: bool) -> None:
    """Kept to the byte. bitsandbytes' own workspace on the CPU, and what diffusers casts back, exist for moments beside it."""
    overrides = ["precision=bf16", f"+memory.weights.transformer={held.value}"]
    found = made("flux", *overrides).estimate(cached("flux"), checkpointing)
    given = made("flux", *overrides)
    batch, _ = real(given, checkpointing)
    kept, working = step(given.pipeline, given.algorithm, batch, given.computes)
    assert found.weights == sum(taken(network) for network in given.pipeline.models.values())
    again = sum(p.nbytes for p in given.pipeline.models["transformer"].parameters() if p.dtype.itemsize == 1 and p.is_floating_point())
    assert found.kept == kept
    assert found.working == pytest.approx(working - again, rel=0.02)


def allocated(do: Any) -> int:
    """The most that torch's own allocator had given out at one time since `do` began, by its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        do()
    total = most = 0
    for event in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


@long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_torchs_allocator_gives_out_what_was_counted(checkpointing: bool) -> None:
    found = made("flux").estimate(cached("flux"), checkpointing)
    given = made("flux")
    batch, _ = real(given, checkpointing)

    def once() -> None:
        given.algorithm.loss(given.pipeline, batch, torch.Generator().manual_seed(0)).loss.backward()

    assert found.working == pytest.approx(allocated(once), rel=0.15)


def test_checkpointing_keeps_less_and_leaves_the_gradients_as_they_are() -> None:
    kept, gradients = [], []
    for on in (False, True):
        given = made("flux", "model.dtype=fp32")
        batch, trained = real(given, False)
        network = given.pipeline.models["transformer"]
        if on:
            network.enable_gradient_checkpointing()
        saved = Saved(network.parameters())
        with saved.counted():
            loss = given.algorithm.loss(given.pipeline, batch, torch.Generator().manual_seed(0)).loss
        loss.backward()
        kept.append(saved.bytes)
        gradients.append({name: p.grad for name, p in trained.items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert kept[1] < kept[0] / 10


def test_a_storage_counts_once_and_only_while_it_exists() -> None:
    before = torch.ones(1000)
    with Live([before]) as live:
        a = before * 2  # 4,000 bytes
        b = a[:10].view(2, 5)  # of the same storage
        assert (live.now, live.most) == (4000, 4000)
        del a, b
        c = before + 1  # in its place
        assert (live.now, live.most) == (4000, 4000)
        d = c.double()
        assert (live.now, live.most) == (12000, 12000)
        del d
    weight = nn.Parameter(torch.ones(10))
    saved = Saved([weight])
    with saved.counted():
        ((c[:10] * weight) * c[10:20]).sum()
    assert saved.bytes == 4000, "both slices are of one storage, and the weight does not count"


@pytest.mark.parametrize("family", ["flux", *(pytest.param(f, marks=long) for f in TEXT if f != "flux")])
def test_conditions_have_the_shapes_that_encoders_give(family: str) -> None:
    pipeline = make(family)
    found, true = conditions(pipeline, family, 2), cached(family)
    assert found.keys() == true.keys()
    for name, value in true.items():
        same = [side == (2 if place == 0 else value.shape[place]) for place, side in enumerate(found[name].shape)]
        assert all(same) or (pipeline.is_ragged(name) and found[name].shape[1] >= value.shape[1] and all(same[2:]))
        assert found[name].dtype == value.dtype


@pytest.mark.parametrize("option", [pytest.param(name, marks=() if name == "flux1_dev" else long) for name in SETTINGS])
def test_settings_make_as_many_parameters_as_the_checkpoint_has(option: str) -> None:
    model = {**compose([f"model={option}"]).model, "weights": None, "components": SETTINGS[option]}
    cls = PIPELINES.find(model["pipeline"], "model.pipeline")
    pipeline = cls(PIPELINES.build("model", cls, model, beside=Model), 0)
    networks = {name: component.outline() for name, component in pipeline.components().items()}
    texts = [name for name in networks if name.startswith("text_encoder")]
    networks |= {name: _outline(pipeline.names.networks[name], SETTINGS[option][name]) for name in texts}
    assert {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()} == COUNTS[option]


def test_what_is_not_estimated_says_so() -> None:
    for overrides, message in (
        (["+memory.weights.transformer=torchao_int8"], "memory.weights.transformer: is int8"),
        (["adapter.lora_base_model=[transformer,text_encoder]"], "task.trainable_models, adapter.lora_base_model: text_encoder is trained"),
    ):
        with pytest.raises(ConfigError) as caught:
            made("flux", *overrides).estimate(cached("flux"), False)
        assert str(caught.value).startswith(message)
