"""Adapters merged into the base first: the new one on top of them is what plain diffusers makes of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from networks import FILE, config, flux, lora_model, output, refusal, shake
from safetensors.torch import load_file, save_file
from tiny import answer, networks, plain, settings, trained

from flowrun.adapters import attach, merged, save_trained, trained_parameters
from flowrun.adapters.config import Variant
from tests.pipelines.families import loaded

pytestmark = pytest.mark.slow

VARIANTS = [variant.value for variant in Variant]


def changes(family, made):
    """What merge_first does, by component; checked on networks without weights."""
    pipeline = loaded(family)
    outlines = {name: component.outline for name, component in pipeline.components().items()}
    return merged(outlines, made, pipeline.adapter_names)


def preset(folder, family, seed, **settings_):
    made = settings(family, **settings_)
    models = trained(family, made, seed)
    save_trained(folder, models, [], made, loaded(family).adapter_names)
    return models


def on_top(family, made):
    """The base with `merge_first`, and a trained adapter."""
    pipeline, models = loaded(family), networks(family, made)
    for name, change in changes(family, made)[0].items():
        if name in models:
            change.apply(models[name].requires_grad_(False))
            assert not any("lora" in key or "base_layer" in key for key in models[name].state_dict())
    attach(models, [], made, pipeline.lora_targets, 0, pipeline.adapter_names)
    shake(trained_parameters(models), 5)
    return {name: model.eval() for name, model in models.items()}


@pytest.mark.parametrize("family", ["flux", pytest.param("sdxl", marks=pytest.mark.slow),
                                    pytest.param("qwen_image", marks=pytest.mark.slow)])  # fmt: skip
def test_the_new_adapter_on_merged_ones_is_all_of_them_in_diffusers(tmp_path, family):
    preset(tmp_path / "a", family, seed=2)
    preset(tmp_path / "b", family, seed=3, variant="rslora")
    entries = [str(tmp_path / "a"), {"path": str(tmp_path / "b" / FILE), "scale": 0.4}]
    made = settings(family, merge_first=entries)
    assert changes(family, made)[1] == []
    models = on_top(family, made)
    save_trained(tmp_path / "new", models, [], made)
    fresh = networks(family, made)
    pipe = plain(family, fresh)
    for name in ("a", "b", "new"):
        pipe.load_lora_weights(tmp_path / name, weight_name=FILE, adapter_name=name)
    pipe.set_adapters(["a", "b", "new"], [1.0, 0.4, 1.0])
    wanted = answer(family, fresh)
    torch.testing.assert_close(answer(family, models), wanted, atol=2e-5, rtol=0)
    for others in ([0.0, 0.4, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.4, 0.0]):  # each counts, as it is scaled
        pipe.set_adapters(["a", "b", "new"], others)
        assert (answer(family, fresh) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_merged_as_it_was_trained(tmp_path, variant):
    models = preset(tmp_path, "sd3", seed=2, variant=variant)
    made = settings("sd3", merge_first=[str(tmp_path)])
    fresh = networks("sd3", made)
    before = answer("sd3", fresh)
    found, _ = changes("sd3", made)
    found["transformer"].apply(fresh["transformer"])
    wanted = answer("sd3", models)
    torch.testing.assert_close(answer("sd3", fresh), wanted, atol=2e-5, rtol=0)
    assert (wanted - before).abs().max() > 1e-3
    assert fresh["transformer"].state_dict().keys() == networks("sd3", made)["transformer"].state_dict().keys()


def test_a_layer_whose_name_ends_others_names_is_merged_alone(tmp_path):
    model = lora_model(targets="re:proj_out")
    shake(trained_parameters({"transformer": model}))
    save_trained(tmp_path, {"transformer": model}, [], config(targets="re:proj_out"))
    fresh = flux()
    found, _ = merged({"transformer": flux}, config(merge_first=[str(tmp_path)]), None)
    found["transformer"].apply(fresh)
    torch.testing.assert_close(output(fresh), output(model.eval()), atol=2e-6, rtol=0)
    changed = {name for name, value in fresh.named_parameters() if not torch.equal(value, flux().get_parameter(name))}
    assert changed == {"proj_out.weight"}


@pytest.mark.parametrize("form, family", [("kohya", "sdxl"), ("comfyui", "z_image"), ("peft", "z_image")])
def test_files_of_every_form_can_be_merged(tmp_path, form, family):
    models = preset(tmp_path, family, seed=2, export=[form])
    path = tmp_path / "peft" if form == "peft" else tmp_path / f"lora_{form}.safetensors"
    made = settings(family, merge_first=[str(path)])
    fresh = networks(family, made)
    found, warnings = changes(family, made)
    assert warnings == []
    (name,) = found
    found[name].apply(fresh[name])
    torch.testing.assert_close(answer(family, fresh), answer(family, models), atol=2e-5, rtol=0)


def test_a_file_without_a_scale_is_taken_as_diffusers_does_and_that_is_said(tmp_path):
    preset(tmp_path, "flux", seed=2)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / FILE), bare)
    made = settings("flux", merge_first=[str(bare)])
    found, warnings = changes("flux", made)
    assert warnings == [f"{bare} does not record its scale; alpha is taken for the rank, as diffusers does"]
    fresh, theirs = networks("flux", made), networks("flux", made)
    found["transformer"].apply(fresh["transformer"])
    plain("flux", theirs).load_lora_weights(bare)
    torch.testing.assert_close(answer("flux", fresh), answer("flux", theirs), atol=2e-5, rtol=0)


def test_a_narrow_base_stays_narrow_and_gets_the_sum_rounded_once(tmp_path):
    model = lora_model()
    shake(trained_parameters({"transformer": model}))
    save_trained(tmp_path, {"transformer": model}, [], config())
    base = flux().bfloat16()
    found, _ = merged({"transformer": flux}, config(merge_first=[str(tmp_path)]), None)
    found["transformer"].apply(base)
    layer, inner = model.transformer_blocks[0].attn.to_q, base.transformer_blocks[0].attn.to_q
    wide = layer.base_layer.weight.bfloat16().float() + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert inner.weight.dtype == torch.bfloat16
    assert ((inner.weight.float() - wide).abs() <= wide.abs() / 256).all()


def test_an_adapter_that_is_not_finite_is_refused(tmp_path):
    preset(tmp_path, "sd3", seed=2)
    tensors = load_file(tmp_path / FILE)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, tmp_path / "x.safetensors")
    made = settings("sd3", merge_first=[str(tmp_path / "x.safetensors")])
    found, _ = changes("sd3", made)
    text = refusal(lambda: found["transformer"].apply(networks("sd3", made)["transformer"]))
    assert "cannot be merged into transformer" in text and "NaN" in text


@pytest.mark.parametrize("entries, words", [
    ([3], ["holds 3", "{path: PATH, scale: NUMBER}"]),
    ([{"path": "x", "scal": 1}], ["scal is no part of an entry", "did you mean scale"]),
    ([{"scale": 0.5}], ["path is a text"]),
    ([{"path": "x", "scale": 0}], ["scale a number other than 0"]),
])  # fmt: skip
def test_entries_that_are_none_are_refused(entries, words):
    text = refusal(lambda: config(merge_first=entries))
    assert text.startswith("adapter.merge_first: ") and all(word in text for word in words), text


@pytest.mark.parametrize("change, words", [
    (lambda t: {k.replace("transformer.", "unet.", 1): v for k, v in t.items()}, ["unet"]),
    (lambda t: {k.replace("to_q", "to_qq"): v for k, v in t.items()}, ["to_qq, which is no layer", "to_q"]),
    (lambda t: {k: v[:, :5] if "lora_A" in k else v for k, v in t.items()}, ["it was made for another network"]),
    (lambda t: {k: v for k, v in t.items() if "lora_A" in k}, ["is missing, the layer's adapter"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_weights_are_loaded(tmp_path, change, words):
    preset(tmp_path, "flux", seed=2)
    save_file({key: value.contiguous() for key, value in change(load_file(tmp_path / FILE)).items()}, tmp_path / "x.safetensors")
    text = refusal(lambda: changes("flux", settings("flux", merge_first=[str(tmp_path / "x.safetensors")])))
    assert text.startswith("adapter.merge_first: ") and all(word in text for word in words), text
    assert "there is no file" in refusal(lambda: changes("flux", settings("flux", merge_first=[str(tmp_path / "lost")])))


def test_identity_follows_content_and_scale_and_nothing_else(tmp_path):
    from pathlib import Path

    preset(tmp_path / "a", "flux", seed=2)
    preset(tmp_path / "b", "flux", seed=3)
    preset(tmp_path / "c", "flux", seed=2, export=["peft"])

    def identity(*entries):
        found, _ = changes("flux", replace(settings("flux"), merge_first=list(entries)))
        return found["transformer"].identity(lambda path: Path(path).read_bytes())

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert identity(a) == identity(str(tmp_path / "a" / FILE)) == identity({"path": a, "scale": 1})
    peft = str(tmp_path / "c" / "peft")
    different = [identity(a), identity(b), identity(a, b), identity(b, a), identity({"path": a, "scale": 0.5}), identity(peft)]
    settings_file = tmp_path / "c" / "peft" / "transformer" / "adapter_config.json"
    settings_file.write_text(settings_file.read_text().replace('"lora_alpha": 12.0', '"lora_alpha": 6.0'))
    different.append(identity(peft))
    assert len(set(different)) == len(different)
