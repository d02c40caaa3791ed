"""LoRA, rsLoRA and DoRA: closed forms, plain diffusers with the same output, and starting from saved ones."""

import json
import math

import pytest
import torch
from networks import FILE, config, flux, lora_model, outlines, output, plain_pipeline, refusal, shake
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import conv2d, linear

from flowrun.adapters import attach, check, save_trained, trained_parameters

VARIANTS = ("lora", "rslora", "dora")
R, ALPHA = 4, 8.0  # of networks.config
SCALE = {"lora": ALPHA / R, "rslora": ALPHA / math.sqrt(R), "dora": ALPHA / R}


def trained(directory, variant, seed=1):
    """A network with an adapter that has learned something, which is saved in `directory`."""
    model = lora_model(variant=variant)
    shake(trained_parameters({"transformer": model}), seed)
    save_trained(directory, {"transformer": model}, [], config(variant=variant))
    return model.eval()


def parts(layer):
    """(W, b, A, B) of a layer with an adapter, in float64."""
    tensors = (layer.base_layer.weight, layer.base_layer.bias, layer.lora_A["default"].weight,
               layer.lora_B["default"].weight)  # fmt: skip
    return [tensor.detach().double() for tensor in tensors]


# ---- closed forms


@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_the_adapter_adds_its_scaled_product(variant):
    model = lora_model(variant=variant)
    shake(trained_parameters({"transformer": model}))
    layer, x = model.single_transformer_blocks[0].attn.to_q, torch.randn(3, 32)
    w, b, down, up = parts(layer)
    wanted = linear(x.double(), w + SCALE[variant] * up @ down, b)
    assert torch.allclose(layer(x).double(), wanted, rtol=0, atol=1e-5)


def test_dora_is_a_magnitude_times_a_direction_of_norm_one():
    model = lora_model(variant="dora")
    shake(trained_parameters({"transformer": model}))
    layer, x = model.single_transformer_blocks[0].attn.to_q, torch.randn(3, 32)
    w, b, down, up = parts(layer)
    m = layer.lora_magnitude_vector["default"].weight.detach().double()  # [out]
    direction = w + ALPHA / R * up @ down  # [out, in]
    direction = direction / direction.norm(dim=1, keepdim=True)
    assert torch.allclose(layer(x).double(), linear(x.double(), m[:, None] * direction, b), rtol=0, atol=1e-5)


def test_doras_norm_counts_as_a_constant_in_the_gradient():
    model = lora_model(variant="dora")
    shake(trained_parameters({"transformer": model}))
    layer, x, wanted = model.single_transformer_blocks[0].attn.to_q, torch.randn(3, 32), torch.randn(3, 32)
    (layer(x) * wanted).sum().backward()
    w, b, down, up = parts(layer)
    m = layer.lora_magnitude_vector["default"].weight.detach().double()
    down, up, m = (tensor.requires_grad_() for tensor in (down, up, m))
    direction = w + ALPHA / R * up @ down
    out = linear(x.double(), m[:, None] * direction / direction.detach().norm(dim=1, keepdim=True), b)
    (out * wanted.double()).sum().backward()
    own = (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.lora_magnitude_vector["default"].weight)
    for ours, theirs in zip(own, (down, up, m), strict=True):
        assert theirs.grad.abs().max() > 1e-2
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_doras_magnitude_of_a_convolution_is_one_per_output_channel():
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 5, 3)})
    attach({"m": model}, [], config(variant="dora", lora_base_model=["m"], targets=["conv"]), {}, 0)
    shake(trained_parameters({"m": model}))
    layer, x = model["conv"], torch.randn(2, 3, 8, 8)
    w, b, down, up = parts(layer)
    m = layer.lora_magnitude_vector["default"].weight.detach().double()  # [1, out, 1, 1]
    direction = w + ALPHA / R * (up.flatten(1) @ down.flatten(1)).reshape(w.shape)
    direction = direction / direction.flatten(1).norm(dim=1)[:, None, None, None]
    wanted = conv2d(x.double(), m.reshape(-1, 1, 1, 1) * direction, b)
    assert m.shape == (1, 5, 1, 1) and torch.allclose(layer(x).double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_changes_nothing_at_first_on_any_base(variant, dtype):
    model = lora_model(dtype, variant=variant)
    found = trained_parameters({"transformer": model})
    assert {p.dtype for p in found.values()} == {torch.float32}
    assert sum("lora_magnitude_vector" in name for name in found) == (6 if variant == "dora" else 0)
    layer, plain = model.transformer_blocks[0].attn.to_q, flux().to(dtype).transformer_blocks[0].attn.to_q
    x = torch.randn(3, 32).to(dtype)
    assert torch.equal(layer(x), plain(x))
    if dtype == torch.float32:
        assert torch.equal(output(model), output(flux()))


# ---- saved files


@pytest.mark.parametrize("targets", [["to_q", "to_v"], "all-linear", r"re:.*\.to_[qk]"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_diffusers_loads_it_with_the_same_output(tmp_path, caplog, variant, targets):
    model = lora_model(variant=variant, targets=targets)
    shake(trained_parameters({"transformer": model}))
    save_trained(tmp_path, {"transformer": model}, [], config(variant=variant, targets=targets))
    wanted = output(model.eval())
    assert (wanted - output(flux())).abs().max() > 1e-3
    plain = plain_pipeline()
    plain.load_lora_weights(tmp_path, weight_name=FILE)
    assert torch.equal(output(plain.transformer), wanted)
    network = flux()
    network.load_lora_adapter(tmp_path, prefix="transformer", use_safetensors=True)
    assert torch.equal(output(network), wanted)
    (layout,) = network.peft_config.values()
    assert (layout.r, layout.lora_alpha) == (R, ALPHA)
    assert (layout.use_rslora, layout.use_dora) == (variant == "rslora", variant == "dora")
    assert "led to" not in caplog.text, "a key was missing or left over"


def test_the_variants_differ_on_the_same_matrices(tmp_path):
    """Else a scale or a magnitude that is lost on the way would not show above."""
    outputs = [output(trained(tmp_path, variant)) for variant in VARIANTS]
    for i, first in enumerate(outputs):
        assert all((first - second).abs().max() > 1e-3 for second in outputs[:i])


def test_the_same_adapter_is_saved_in_the_same_words(tmp_path):
    model = lora_model(targets="all-linear")
    for name in ("a", "b"):
        save_trained(tmp_path / name, {"transformer": model}, [], config(targets="all-linear"))
    layouts = []
    for name in ("a", "b"):
        with safe_open(tmp_path / name / FILE, "pt") as handle:
            layouts.append(handle.metadata()["lora_adapter_metadata"])
    names = json.loads(layouts[0])["transformer.target_modules"]
    assert layouts[0] == layouts[1] and names == sorted(names)


# ---- starting from a saved adapter


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_starts_from_a_saved_adapter(tmp_path, variant):
    wanted = output(trained(tmp_path, variant))
    again = lora_model(variant=variant, init_from=str(tmp_path))
    assert torch.equal(output(again.eval()), wanted)
    assert all(p.requires_grad for p in trained_parameters({"transformer": again}).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_starts_from_what_plain_diffusers_saved(tmp_path, variant):
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig, get_peft_model_state_dict

    plain = plain_pipeline()
    plain.transformer.add_adapter(LoraConfig(r=R, lora_alpha=ALPHA, target_modules=["to_q", "to_v"],
                                             use_rslora=variant == "rslora", use_dora=variant == "dora"))  # fmt: skip
    shake({name: p for name, p in plain.transformer.named_parameters() if "lora_" in name})
    plain.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(plain.transformer),
                            **_collate_lora_metadata({"transformer": plain.transformer}))  # fmt: skip
    settings = {"variant": variant, "init_from": str(tmp_path)}
    assert torch.equal(output(lora_model(**settings).eval()), output(plain.transformer.eval()))
    assert check(outlines(), [], config(**settings), {}) == []


@pytest.mark.parametrize("saved", VARIANTS)
@pytest.mark.parametrize("wanted", VARIANTS)
def test_an_adapter_of_another_variant_is_refused_in_one_line(tmp_path, saved, wanted):
    trained(tmp_path, saved)
    settings = {"variant": wanted, "init_from": str(tmp_path)}
    if saved == wanted:
        assert check(outlines(), [], config(**settings), {}) == []
        return
    text = refusal(lambda: lora_model(**settings))
    assert text == (f"adapter.variant: is {wanted}, but {tmp_path} was made with {saved}; set adapter.variant={saved}")
    assert refusal(lambda: check(outlines(), [], config(**settings), {})) == text, "known before weights are loaded"


def test_without_a_recorded_layout_the_magnitudes_tell_dora_and_the_setting_tells_rslora(tmp_path):
    trained(tmp_path, "dora")
    path = str(tmp_path / "other.safetensors")
    save_file(load_file(tmp_path / FILE), path)
    assert "was made with dora" in refusal(lambda: lora_model(init_from=path))
    assert check(outlines(), [], config(variant="dora", init_from=path), {})
    wanted = output(trained(tmp_path, "rslora"))
    save_file(load_file(tmp_path / FILE), path)
    (warning,) = check(outlines(), [], config(variant="rslora", init_from=path), {})
    assert "does not record its scale" in warning and "adapter.variant=rslora" in warning
    assert torch.equal(output(lora_model(variant="rslora", init_from=path).eval()), wanted)


@pytest.mark.parametrize("end", [".default.weight", ".weight", ""])
def test_all_names_of_magnitudes_are_understood(tmp_path, end):
    wanted = output(trained(tmp_path, "dora"))
    tensors = {key + end if key.endswith("magnitude_vector") else key: value
               for key, value in load_file(tmp_path / FILE).items()}  # fmt: skip
    save_file(tensors, tmp_path / "other.safetensors")
    again = lora_model(variant="dora", init_from=str(tmp_path / "other.safetensors"))
    assert torch.equal(output(again.eval()), wanted)


def test_an_adapter_that_is_both_is_refused(tmp_path):
    trained(tmp_path, "dora")
    with safe_open(tmp_path / FILE, "pt") as handle:
        layout = json.loads(handle.metadata()["lora_adapter_metadata"]) | {"transformer.use_rslora": True}
    save_file(load_file(tmp_path / FILE), tmp_path / FILE, {"lora_adapter_metadata": json.dumps(layout)})
    text = refusal(lambda: lora_model(variant="dora", init_from=str(tmp_path)))
    assert "made with rslora and dora" in text and "give another" in text
