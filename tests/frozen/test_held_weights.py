"""Frozen weights held otherwise: what they take, what they compute, what is refused.   pytest tests/frozen"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models.modeling_utils import get_parameter_dtype
from torch import Tensor, nn

from flowrun import adapters, frozen
from flowrun.adapters.config import Variant
from flowrun.config import ConfigError, Held, Memory
from flowrun.frozen.cast import STORED, cast_layers
from flowrun.frozen.layers import in_full
from flowrun.frozen.quantized import LEAST, LIBRARIES
from flowrun.run import assemble
from tests.pipelines.families import CPU, SIZE, encoded, make, normal

DATA = ("data.captions=[red apple,green apple,pear,lemon]", "data.size=64", "sample.prompts=[]", "tracker=[csv]")
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=4")


def lacking(held: Held) -> str | None:
    """Why it cannot be tried here."""
    package = LIBRARIES.get(held)
    if package is None:
        return None
    try:
        version(package)
        return None
    except PackageNotFoundError:
        return f"{package} {LEAST[package]} or newer is not installed: pip install 'flowrun[quantized]'"


def every(*kinds: Held) -> Any:
    chosen = kinds or (*LIBRARIES, Held.fp8_cast)
    marks = {held: [pytest.mark.skipif(lacking(held) is not None, reason=str(lacking(held)))] for held in chosen}
    return pytest.mark.parametrize("held", [pytest.param(held, marks=marks[held], id=held.value) for held in chosen])


def assembled(family: str, *overrides: str) -> Any:
    return assemble([f"model={family}_tiny", "model.dtype=bf16", *LORA, *DATA, *overrides])


def loaded(family: str, name: str, held: Held | None, *overrides: str) -> Any:
    """The pipeline with one component, held so."""
    chosen = [] if held is None else [f"+memory.weights.{name}={held.value}"]
    assembly = assembled(family, *chosen, *overrides)
    assembly.pipeline.load([name], CPU, assembly.dtype)
    return assembly.pipeline


def taken(network: nn.Module) -> int:
    """Bytes of all that a network's weights are made of, each storage once."""
    seen = {}
    for tensor in (*network.parameters(), *network.buffers()):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "__tensor_flatten__") else [tensor]
        if (state := getattr(tensor, "quant_state", None)) is not None:
            parts += [state.absmax, state.code]
        parts += [scale] if (scale := getattr(tensor, "SCB", None)) is not None else []
        seen |= {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(seen.values())


@every()
@pytest.mark.parametrize("name", ["transformer", "text_encoder_2"])
def test_the_plan_says_to_the_byte_what_the_weights_take(held: Held, name: str) -> None:
    pipeline = loaded("flux", name, held)
    pipeline.settle(CPU)
    outline, holding = pipeline.components()[name].outline(), pipeline.holdings[name]
    assert holding.bytes(outline, torch.bfloat16) == taken(pipeline.models[name]) < in_full(outline, torch.bfloat16)
    (line,) = frozen.told({name: holding}, {name: outline}, torch.bfloat16)
    saved = in_full(outline, torch.bfloat16) - taken(pipeline.models[name])
    assert line.startswith(f"{name}: {holding.describe}, ") and line.endswith(f"saves {saved / 1e6:.3f} MB")


def test_weights_in_full_take_what_is_counted_for_them() -> None:
    pipeline = loaded("flux", "transformer", None)
    assert taken(pipeline.models["transformer"]) == in_full(pipeline.components()["transformer"].outline(), torch.bfloat16)


@pytest.mark.slow
@every()
@pytest.mark.parametrize("family", ["sd3", "sdxl", "qwen_image", "z_image", "wan"])
def test_encoders_say_nearly_the_same(family: str, held: Held) -> None:
    """T5 asks a layer what precision it has, and would cast what it is given to integers."""
    found = []
    for chosen in (None, held):
        pipeline = make(family)
        names = [name for name in pipeline.components() if name.startswith("text_encoder")]
        if chosen is not None:
            pipeline.holdings = frozen.holdings(Memory(weights=dict.fromkeys(names, chosen)), names, [])
        pipeline.load(names, CPU, torch.bfloat16)
        pipeline.settle(CPU)
        states = encoded(pipeline, ["a red apple", "a cat"])
        assert {state.dtype for state in states.values() if state.is_floating_point()} == {torch.bfloat16}
        found.append(torch.cat([state.float().flatten() for state in states.values()]))
    assert not torch.equal(*found)
    assert torch.cosine_similarity(*found, dim=0) > 0.97


@pytest.mark.slow
@every()
def test_a_layer_that_shares_its_weight_with_an_embedding_stays_as_it_is(held: Held) -> None:
    pipeline = make("flux2_klein", "+model.components.text_encoder.tie_word_embeddings=true")
    pipeline.holdings = frozen.holdings(Memory(weights={"text_encoder": held}), ["text_encoder"], [])
    pipeline.load(["text_encoder"], CPU, torch.bfloat16)
    pipeline.settle(CPU)
    network, outline = pipeline.models["text_encoder"], pipeline.components()["text_encoder"].outline()
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert taken(network) == pipeline.holdings["text_encoder"].bytes(outline, torch.bfloat16)
    assert encoded(pipeline, ["a red apple"])["prompt_embeds"].isfinite().all()


def trained(family: str, held: Held | None, *overrides: str, steps: int = 5) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Losses of an adapter on one batch, its gradients in the first step, and the network."""
    name = "unet" if family == "sdxl" else "transformer"
    chosen = [] if held is None else [f"+memory.weights.{name}={held.value}"]
    a = assembled(family, f"adapter.lora_base_model=[{name}]", *chosen, *overrides)
    a.pipeline.load([name], CPU, a.dtype)
    adapters.attach(a.pipeline.models, [], a.adapter, a.pipeline.lora_targets, 0, a.pipeline.adapter_names)
    a.pipeline.settle(CPU)
    network, parameters = a.pipeline.models[name], adapters.trained_parameters(a.pipeline.models)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    configs, batch = a.pipeline.configs[name], {a.pipeline.target: normal(2, *a.pipeline.latent_shape(SIZE))}
    batch["prompt_embeds"] = normal(2, 20, configs.get("joint_attention_dim") or configs["cross_attention_dim"], seed=1)
    batch["pooled_prompt_embeds"] = normal(2, configs.get("pooled_projection_dim") or 32, seed=2)
    optimizer, losses, first = torch.optim.AdamW(parameters.values(), lr=2e-2), [], {}
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = a.algorithm.loss(a.pipeline, batch, torch.Generator().manual_seed(0)).loss
        loss.backward()
        assert {n for n, p in network.named_parameters() if p.grad is not None} <= {n.partition(".")[2] for n in parameters}
        first = first or {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, network


@every()
@pytest.mark.parametrize("family", ["flux", *(pytest.param(f, marks=pytest.mark.slow) for f in ("sd3", "sdxl"))])
def test_an_adapter_learns_on_a_base_that_is_held_so(family: str, held: Held) -> None:
    losses, gradients, _ = trained(family, held)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert gradients and all(g.isfinite().all() for g in gradients.values())
    assert losses[0] == pytest.approx(trained(family, None, steps=1)[0][0], rel=0.05)


@pytest.mark.slow
@every()
@pytest.mark.parametrize("variant", ["rslora", "dora", "lokr", "loha"])
def test_all_variants_of_adapters_learn_on_it(held: Held, variant: str) -> None:
    if held in frozen.UNFIT.get(Variant(variant), ()):
        with pytest.raises(ConfigError, match=f"adapter.variant: is {variant}, and peft cannot read the weights of transformer"):
            trained("flux", held, f"adapter.variant={variant}")
        return
    losses, _, _ = trained("flux", held, f"adapter.variant={variant}")
    assert losses[-1] < losses[0]


def test_a_cast_network_has_the_gradients_of_one_whose_weights_were_rounded() -> None:
    """The truth: the same weights, rounded to 8 bits once and held in full; adapters' own layers are left out."""
    _, cast, network = trained("flux", Held.fp8_cast, steps=1)
    kept = {name for name, p in network.named_parameters() if p.dtype == STORED}
    assert kept and not [name for name in kept if "lora_" in name]
    own = assembled("flux").pipeline
    own.load(["transformer"], CPU, torch.bfloat16)
    for layer in cast_layers(own.models["transformer"]):
        for p in layer.parameters():
            p.data = p.data.to(STORED).to(torch.bfloat16)
    load = type(own).load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(own), "load", lambda self, *_: self.models.update(own.models))
        _, rounded, _ = trained("flux", None, steps=1)
    assert type(own).load is load
    assert cast.keys() == rounded.keys() and all(torch.equal(cast[name], rounded[name]) for name in cast)


def test_a_network_that_waits_elsewhere_computes_the_same() -> None:
    """By diffusers' hooks, which here move from the CPU's memory to the CPU's."""
    found = []
    for offload in (False, True):
        pipeline = loaded("flux", "text_encoder_2", None)
        if offload:
            network = pipeline.models["text_encoder_2"]
            apply_group_offloading(network, onload_device=CPU, offload_device=CPU, offload_type="leaf_level")
        with torch.no_grad():
            found.append(pipeline.models["text_encoder_2"](torch.arange(1, 9)[None]).last_hidden_state)
    assert torch.equal(*found)


def test_of_what_waits_elsewhere_the_largest_layer_counts() -> None:
    outline = nn.Sequential(nn.Linear(10, 20, device="meta"), nn.Linear(20, 3, device="meta"))
    (holding,) = frozen.holdings(Memory(weights={"a": Held.offload}), ["a"], []).values()
    assert holding.bytes(outline, torch.bfloat16) == 2 * (10 * 20 + 20)


def test_precision_is_what_is_computed_in_however_weights_are_held() -> None:
    pipeline = loaded("flux", "transformer", Held.fp8_cast)
    pipeline.settle(CPU)
    assert get_parameter_dtype(pipeline.models["transformer"]) == torch.bfloat16
    batch = {"prompt_embeds": normal(1, 5, 32), "pooled_prompt_embeds": normal(1, 32)}
    with torch.no_grad():
        prepared = pipeline.begin(batch, torch.tensor([0.5]), normal(1, *pipeline.latent_shape(SIZE)))
    assert prepared.prompt_embeds.dtype == torch.bfloat16


def keys(*overrides: str) -> set[bytes]:
    return set(assembled("flux", *overrides).library.all_keys())


def test_only_what_is_held_otherwise_has_other_values_in_the_cache() -> None:
    plain, encoder = keys(), keys("+memory.weights.text_encoder_2=fp8_cast")
    assert keys("+memory.weights.transformer=fp8_cast") == plain
    assert plain & encoder and plain - encoder and encoder - plain, "the VAE's values stay, the captions' do not"
    assert not keys("+memory.weights.text_encoder_2=fp8_cast", "+memory.weights.vae=fp8_cast") & plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["+memory.weights.transfomer=fp8_cast"], "memory.weights.transfomer: is no component of the pipeline; did you mean transformer"),
        (["+memory.weights.transformer=nf4"], "memory.weights.transformer: there is no 'nf4'; did you mean bnb_nf4"),
        (["adapter=none", "task.trainable_models=[transformer.norm_out]", "+memory.weights.transformer=fp8_cast"],
         "memory.weights.transformer: is fp8_cast, but transformer is in task.trainable_models, and only weights held in full can be"),
        (["+memory.weights.text_encoder=offload"], "memory.weights.text_encoder: is offload, but this machine has no GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_so_is_told_before_weights_are_loaded(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble(["model=flux_tiny", *([] if "adapter=none" in settings else LORA), *DATA, *settings])
    assert str(caught.value).startswith(message)


def test_nothing_is_moved_away_that_gradients_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert assembled("flux", "+memory.weights.text_encoder=offload").pipeline.holdings
    for more in (["+memory.weights.transformer=offload"],
                 ["adapter.lora_base_model=[text_encoder]", "+memory.weights.text_encoder_2=offload"]):  # fmt: skip
        with pytest.raises(ConfigError, match=r"is offload, but gradients pass through (transformer|text_encoder_2)"):
            assembled("flux", *more)


@pytest.mark.parametrize("held", [held.value for held in LIBRARIES])
def test_a_library_that_is_not_there_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("flowrun.frozen.quantized.version", missing)
    with pytest.raises(ConfigError, match=rf"is {held}, which needs \w+ [\d.]+ or newer, and it is not installed; pip install 'flowrun"):
        assembled("flux", f"+memory.weights.transformer={held}")
