"""LoKr and LoHa: closed forms, plain peft and diffusers with the same output, starting from saved ones, what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks import FILE, bert, config, flux, lora_model, outlines, output, refusal, shake
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear

from flowrun.adapters import attach, check, save_trained, trained_parameters
from flowrun.adapters.config import Variant

pytestmark = pytest.mark.slow

PRODUCTS = ("lokr", "loha")
R, ALPHA = 4, 8.0  # of networks.config


def trained(directory, variant, **changes):
    """A network with an adapter that has learned something, which is saved in `directory`."""
    model = lora_model(variant=variant, **changes)
    shake(trained_parameters({"transformer": model}))
    save_trained(directory, {"transformer": model}, [], config(variant=variant, **changes))
    return model.eval()


def added(layer, variant):
    """What the adapter adds to a weight [out, in], in float64."""
    def of(name):
        found = getattr(layer, name)
        return found["default"].detach().double() if "default" in found else None

    if variant == "loha":
        return ALPHA / R * (of("hada_w1_a") @ of("hada_w1_b")) * (of("hada_w2_a") @ of("hada_w2_b"))
    w2 = of("lokr_w2") if of("lokr_w2") is not None else of("lokr_w2_a") @ of("lokr_w2_b")
    return ALPHA / R * torch.kron(of("lokr_w1"), w2)


@pytest.mark.parametrize("width", [32, 400])
@pytest.mark.parametrize("variant", PRODUCTS)
def test_the_adapter_adds_its_product(variant, width):
    """LoKr's second factor is whole in the small network and B A in the wide layer."""
    model = nn.ModuleDict({"layer": nn.Linear(width, width)})
    attach({"m": model}, [], config(variant=variant, lora_base_model=["m"], targets=["layer"]), {}, 0)
    shake(trained_parameters({"m": model}))
    layer, x = model["layer"], torch.randn(3, width)
    if variant == "lokr":
        assert ("default" in layer.lokr_w2_a) == (width == 400)
    w, b = layer.base_layer.weight.detach().double(), layer.base_layer.bias.detach().double()
    torch.testing.assert_close(layer(x).double(), linear(x.double(), w + added(layer, variant), b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", PRODUCTS)
def test_it_changes_nothing_at_first_on_any_base_and_is_wide(variant, dtype):
    model = lora_model(dtype, variant=variant)
    found = trained_parameters({"transformer": model})
    assert found and {p.dtype for p in found.values()} == {torch.float32}
    assert all(re.search(r"\.(lokr|hada)_", name) for name in found)
    layer, plain = model.transformer_blocks[0].attn.to_q, flux().to(dtype).transformer_blocks[0].attn.to_q
    x = torch.randn(3, 32).to(dtype)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("variant", PRODUCTS)
def test_the_same_seed_gives_the_same_start(variant):
    first, second, other = (trained_parameters({"transformer": lora_model(variant=variant, seed=seed)}) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name, value in first.items() if value.any()]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("variant", PRODUCTS)
def test_peft_loads_it_as_the_readme_says(tmp_path, variant):
    wanted = output(trained(tmp_path, variant))
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (recipe,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "PeftModel" in block]
    recipe = "\n".join(line.strip() for line in recipe.splitlines()).replace("RUN_DIR/model", str(tmp_path))
    pipe = type("Pipe", (), {"transformer": flux()})()
    assert (output(pipe.transformer) - wanted).abs().max() > 1e-3
    exec(recipe, {"pipe": pipe})
    torch.testing.assert_close(output(pipe.transformer), wanted, atol=2e-6, rtol=0)
    assert {p.name for p in tmp_path.iterdir()} == {"peft"} and pipe.transformer.state_dict().keys() == flux().state_dict().keys()


@pytest.mark.parametrize("variant", PRODUCTS)
def test_a_text_encoder_carries_it_too(tmp_path, variant):
    models = {"transformer": flux(), "text_encoder": bert()}
    both = config(variant=variant, lora_base_model=list(models), targets=["to_q", "query"])
    attach(models, [], both, {}, 0)
    shake(trained_parameters(models))
    save_trained(tmp_path, models, [], both)
    ids, fresh = torch.tensor([[1, 2]]), bert()
    fresh.load_state_dict({k.replace(".base_layer", ""): v for k, v in models["text_encoder"].state_dict().items()
                           if not re.search("lokr|hada", k)})  # fmt: skip
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "peft" / "text_encoder")
    wanted = models["text_encoder"].eval()(ids).last_hidden_state
    assert torch.equal(loaded.eval()(ids).last_hidden_state, wanted)
    again = {"transformer": flux(), "text_encoder": bert()}
    attach(again, [], replace(both, init_from=str(tmp_path)), {}, 0)
    mine, theirs = trained_parameters(again), trained_parameters(models)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_diffusers_own_network_loads_lokr(tmp_path):
    """Where its pipeline's load_lora_weights does, FLUX.2's and Z-Image's; see test_forms."""
    from flowrun.adapters.config import Form
    from flowrun.adapters.export import save

    model = trained(tmp_path, "lokr")
    save(tmp_path, {"transformer": model}, Form.diffusers, config(variant="lokr"), None)
    fresh = flux()
    fresh.load_lora_adapter(tmp_path, prefix="transformer", use_safetensors=True)
    assert torch.equal(output(fresh), output(model))


@pytest.mark.parametrize("where", ["", "peft", "peft/transformer", "peft/transformer/adapter_model.safetensors"])
@pytest.mark.parametrize("variant", PRODUCTS)
def test_training_starts_from_a_saved_adapter(tmp_path, variant, where):
    wanted = output(trained(tmp_path, variant))
    settings = {"variant": variant, "init_from": str(tmp_path / where)}
    again = lora_model(**settings)
    assert torch.equal(output(again.eval()), wanted)
    assert all(p.requires_grad for p in trained_parameters({"transformer": again}).values())
    assert check(outlines(), [], config(**settings), {}) == []


@pytest.mark.parametrize("changes, words", [
    ({"rank": 2}, ["adapter.rank", "is 2", "made with 4"]),
    ({"alpha": 4.0}, ["adapter.alpha", "is 4", "made with 8"]),
    ({"variant": "lora"}, ["adapter.variant", "is lora", "made with lokr"]),
    ({"variant": "loha"}, ["adapter.variant", "is loha", "made with lokr"]),
    ({"targets": ["to_q"]}, ["also has", "to_v"]),
])  # fmt: skip
def test_one_that_does_not_fit_is_refused_in_one_line(tmp_path, changes, words):
    trained(tmp_path, "lokr")
    changes = {"variant": "lokr", "init_from": str(tmp_path)} | changes
    text = refusal(lambda: lora_model(**changes))
    assert all(word in text for word in words), text
    assert refusal(lambda: check(outlines(), [], config(**changes), {})) == text


@pytest.mark.parametrize("text, words", [
    ("{", ["adapter_config.json is not peft's", "save the adapter again"]),
    ("{}", ["adapter_config.json is not peft's"]),
    ('{"peft_type": "IA3"}', ["is of an adapter called IA3", "LORA, LOKR, LOHA"]),
])  # fmt: skip
def test_settings_that_are_no_adapters_are_refused_in_one_line(tmp_path, text, words):
    trained(tmp_path, "lokr")
    (tmp_path / "peft" / "transformer" / "adapter_config.json").write_text(text)
    said = refusal(lambda: lora_model(variant="lokr", init_from=str(tmp_path)))
    assert all(word in said for word in words), said


@pytest.mark.parametrize("variant", PRODUCTS)
def test_settings_that_do_not_apply_are_refused(variant):
    text = refusal(lambda: config(variant=variant, dropout=0.1))
    assert "adapter.dropout: is 0.1" in text and variant in text and "set it to 0" in text


def test_layers_that_cannot_carry_it_are_refused():
    text = refusal(lambda: attach({"m": nn.ModuleDict({"e": nn.Embedding(3, 4)})}, [],
                                  config(variant="lokr", lora_base_model=["m"], targets=["e"]), {}, 0))  # fmt: skip
    assert text.startswith("adapter.targets: m: ") and "name linear or convolution layers" in text


@pytest.mark.parametrize("variant", [v.value for v in Variant])
def test_three_updates_show_and_leave_finite_files_without_wrappers_names(tmp_path, variant):
    model = lora_model(variant=variant, targets="auto")
    wrapped = {"transformer": nn.DataParallel(model)}
    before = output(model)
    optimizer = torch.optim.AdamW(trained_parameters(wrapped).values(), lr=0.05)
    for _ in range(3):
        with torch.enable_grad():
            loss = (output.__wrapped__(model) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = output(model)
    assert after.isfinite().all() and (after - before).abs().max() > 1e-3
    save_trained(tmp_path, wrapped, [], config(variant=variant, targets="auto"))
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 1
    for key, value in load_file(files[0]).items():
        assert value.isfinite().all() and not re.search(r"(^|\.)(module|_orig_mod|default|base_layer)\.", key), key
    for file in tmp_path.rglob("*.json"):
        assert json.loads(file.read_text())["r"] == R
    assert FILE in {file.name for file in files} or variant in PRODUCTS
