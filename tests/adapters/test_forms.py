"""Forms of adapter files: each is read back by diffusers or peft with the same output, and training starts from each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from networks import FILE, config, flux, lora_model, outlines, output, refusal, shake
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import adapted, answer, checks, networks, plain, settings, trained

from flowrun.adapters import check, save_trained, trained_parameters
from flowrun.adapters.config import Form, Variant
from flowrun.adapters.export import FILES, possible
from flowrun.pipelines import AdapterNames
from flowrun.pipelines.flux import NAMES as FLUX
from tests.pipelines.families import FROM_TEXT, loaded

pytestmark = pytest.mark.slow

# FLUX.1's single blocks have forms at the published width alone
DOUBLE = r"re:transformer_blocks\..*(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|net\.0\.proj|net\.2)"
CASES = [(family, variant, form) for family in FROM_TEXT for variant in ("lora", "rslora", "lokr") for form in ("comfyui", "kohya")
         if family != "sd3" and (family, form) != ("sdxl", "comfyui")
         and (variant != "lokr" or (form == "comfyui" and family in ("flux2", "flux2_klein", "z_image")))]  # fmt: skip
QUICK = {("flux2", "lora", "comfyui"), ("sdxl", "lora", "kohya"), ("z_image", "lokr", "comfyui")}
every = pytest.mark.parametrize("family, variant, form", [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES])  # fmt: skip
TABLE = """
| family | `diffusers` | `peft` | `comfyui` | `kohya` |
|---|---|---|---|---|
| `sd3` | lora, rslora, dora | all | - | - |
| `flux` | lora, rslora, dora | all | lora, rslora | lora, rslora |
| `flux2` | lora, rslora, dora, lokr | all | lora, rslora, lokr | lora, rslora |
| `flux2_klein` | lora, rslora, dora, lokr | all | lora, rslora, lokr | lora, rslora |
| `qwen_image` | lora, rslora, dora | all | lora, rslora | lora, rslora |
| `z_image` | lora, rslora, dora, lokr | all | lora, rslora, lokr | lora, rslora |
| `sdxl` | lora, rslora, dora | all | - | lora, rslora |
"""


def targets(family: str) -> str:
    return DOUBLE if family == "flux" else "auto"


def saved(folder: Path, family: str, **changes):
    """An adapter that has learned, saved. Returns its networks and settings."""
    made = settings(family, **{"targets": targets(family)} | changes)
    models = trained(family, made)
    save_trained(folder, models, [], made, loaded(family).adapter_names)
    return models, made


@every
def test_diffusers_reads_what_other_programs_read_with_the_same_output(tmp_path, family, variant, form):
    models, made = saved(tmp_path, family, variant=variant, export=[form])
    assert checks(family, made) == []
    wanted = answer(family, models)
    fresh = networks(family, made)
    assert (wanted - answer(family, fresh)).abs().max() > 1e-3
    plain(family, fresh).load_lora_weights(tmp_path, weight_name=FILES[Form(form)])
    torch.testing.assert_close(answer(family, fresh), wanted, atol=5e-6, rtol=0)
    tensors = load_file(tmp_path / FILES[Form(form)])
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in tensors.values())
    assert not any(word in key for key in tensors for word in ("base_layer", "default", "module."))


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
def test_a_layer_that_others_hold_together_with_more_is_read_back_alone(tmp_path, form):
    layers = ["transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.add_v_proj"]
    models, made = saved(tmp_path, "flux", export=[form], targets=layers)
    fresh = networks("flux", made)
    plain("flux", fresh).load_lora_weights(tmp_path, weight_name=FILES[Form(form)])
    torch.testing.assert_close(answer("flux", fresh), answer("flux", models), atol=5e-6, rtol=0)


@every
def test_training_starts_from_them(tmp_path, family, variant, form):
    """kohya's file says its scale; in ComfyUI's it is within the weights, where alpha is then the rank."""
    models, made = saved(tmp_path, family, variant=variant, export=[form])
    path = str(tmp_path / FILES[Form(form)])
    alpha = 12.0 * (2 if variant == "rslora" else 1) if form == "kohya" else 4.0
    again = replace(made, variant=Variant.lokr if variant == "lokr" else Variant.lora, alpha=alpha, init_from=path, export=[])
    found = adapted(family, again)
    torch.testing.assert_close(answer(family, found), answer(family, models), atol=5e-6, rtol=0)
    assert checks(family, again) == []


@pytest.mark.parametrize("variant", [v.value for v in Variant])
@pytest.mark.parametrize("family", ["sd3", *(pytest.param(f, marks=pytest.mark.slow) for f in FROM_TEXT if f != "sd3")])
def test_peft_reads_its_folder_and_training_starts_from_it(tmp_path, family, variant):
    models, made = saved(tmp_path, family, variant=variant, export=["peft"], targets="auto")
    ((name, network),) = networks(family, made).items()
    wanted = answer(family, models)
    before = answer(family, {name: network})
    with_adapter = PeftModel.from_pretrained(network, tmp_path / "peft" / name)
    assert (wanted - before).abs().max() > 1e-3
    assert torch.equal(answer(family, {name: with_adapter.get_base_model()}), wanted)
    for path in (tmp_path, tmp_path / "peft", tmp_path / "peft" / name, tmp_path / "peft" / name / "adapter_model.safetensors"):
        again = replace(made, init_from=str(path), export=[])
        assert checks(family, again) == []
    assert torch.equal(answer(family, adapted(family, again)), wanted)


def test_text_encoders_are_within_kohyas_form_of_sdxl(tmp_path):
    names = ["unet", "text_encoder", "text_encoder_2"]
    models, made = saved(tmp_path, "sdxl", export=["kohya"], lora_base_model=names)
    keys = load_file(tmp_path / FILES[Form.kohya]).keys()
    assert {key.split("_")[1] for key in keys} == {"unet", "te1", "te2"}
    fresh = networks("sdxl", made)
    plain("sdxl", fresh).load_lora_weights(tmp_path, weight_name=FILES[Form.kohya])
    wanted = answer("sdxl", models)
    torch.testing.assert_close(answer("sdxl", fresh), wanted, atol=5e-6, rtol=0)
    assert (answer("sdxl", {"unet": models["unet"]}) - wanted).abs().max() > 1e-3, "text encoders count"
    again = replace(made, init_from=str(tmp_path / FILES[Form.kohya]), export=[])
    assert checks("sdxl", again) == []
    torch.testing.assert_close(answer("sdxl", adapted("sdxl", again)), wanted, atol=5e-6, rtol=0)


def test_forms_of_flux_at_its_published_width():
    """Read back from random weights of the adapter; the network itself has none here."""
    def outline():
        with torch.device("meta"):
            return {"transformer": FluxTransformer2DModel(num_layers=1, num_single_layers=1)}

    double_and_single = r"re:.*transformer_blocks\..*(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|proj_mlp|proj_out|net.*(2|proj))"
    for chosen in (double_and_single, ["attn.to_q"], "re:.*norm.*linear"):
        made = config(rank=2, targets=chosen, export=["comfyui", "kohya"])
        if chosen == "re:.*norm.*linear":  # norm_out, outside the blocks, is among them
            assert "norm_out.linear has no name there" in refusal(lambda made=made: check(outline(), [], made, {}, FLUX))
        else:
            assert check(outline(), [], made, {}, FLUX) == []


@pytest.mark.parametrize("changes, names, words", [
    ({"export": ["kohya"]}, None, ["adapter.export: kohya: diffusers reads no lora of this model", "what there is: diffusers, peft"]),
    ({"export": ["kohya"], "variant": "dora"}, FLUX, ["does not read dora's magnitudes", "diffusers, peft"]),
    ({"export": ["comfyui"], "variant": "loha"}, FLUX, ["diffusers reads no loha", "what there is: peft"]),
    ({"export": ["diffusers"], "variant": "lokr"}, FLUX, ["this model's load_lora_weights reads no lokr"]),
    ({"export": ["kohya"], "targets": ["single_transformer_blocks.0.attn.to_q"]}, FLUX,
     ["224 wide together", "21504 wide alone", "other adapter.targets"]),
    ({"export": ["kohya"], "targets": ["x_embedder"]}, FLUX, ["x_embedder has no name there"]),
    ({"export": ["kohya"], "targets": ["ff.net.2"]}, AdapterNames(reader="FluxPipeline", kohya={"transformer": "lora_transformer_"}),
     ["diffusers' FluxPipeline does not read back the adapter of transformer.transformer_blocks.0.ff.net.2"]),
    ({"export": ["kohya"], "targets": ["ff.net.2"]}, AdapterNames(reader="FluxPipeline", kohya={"transformer": "lora_unet_"}),
     ["diffusers cannot read", "FluxPipeline", "Incompatible keys"]),
])  # fmt: skip
def test_a_form_that_cannot_be_read_back_is_refused_before_training(changes, names, words):
    text = refusal(lambda: check(outlines(), [], config(**changes), {}, names))
    assert all(word in text for word in words), text


def test_a_component_that_the_form_cannot_hold_is_refused():
    made = settings("qwen_image", export=["comfyui"], lora_base_model=["transformer", "text_encoder"])
    assert "comfyui: text_encoder has no name there" in refusal(lambda: checks("qwen_image", made))


def test_the_table_of_forms_is_that_of_the_readme():
    found = []
    for family in FROM_TEXT:
        forms = {form: [v.value for v in Variant if form in possible(config(variant=v.value), loaded(family).adapter_names)]
                 for form in Form}  # fmt: skip
        cells = ["all" if len(names) == len(Variant) else ", ".join(names) or "-" for names in forms.values()]
        found.append(f"| `{family}` | {' | '.join(cells)} |")
    assert TABLE.strip().splitlines()[2:] == found
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert TABLE.strip() in readme


# ---- files of others


def kohya(tensors, alpha):
    """Of a file with `transformer.` names: kohya's, as others write them for FLUX with diffusers' names of layers."""
    found = {}
    for key, value in tensors.items():
        layer, end = key.removeprefix("transformer.").rsplit(".lora_", 1)
        start = "lora_transformer_" + layer.replace(".", "_")
        found[f"{start}.lora_{'down' if end.startswith('A') else 'up'}.weight"] = value
        found[f"{start}.alpha"] = torch.tensor(alpha(layer, value))
    return found


def flux_file(tmp_path, **changes):
    model = lora_model(**changes)
    shake(trained_parameters({"transformer": model}))
    save_trained(tmp_path, {"transformer": model}, [], config(**changes))
    return model.eval(), load_file(tmp_path / FILE)


def start_from(path, **changes):
    from flowrun.adapters import attach

    model = flux()
    attach({"transformer": model}, [], config(init_from=str(path), **changes), {}, 0, FLUX)
    return model.eval()


def test_the_scale_is_taken_from_kohyas_alpha(tmp_path):
    model, tensors = flux_file(tmp_path)
    save_file(kohya(tensors, lambda *_: 8.0), tmp_path / "k.safetensors")
    assert torch.equal(output(start_from(tmp_path / "k.safetensors")), output(model))
    save_file(kohya(tensors, lambda *_: 2.0), tmp_path / "k.safetensors")
    text = refusal(lambda: start_from(tmp_path / "k.safetensors"))
    assert "adapter.alpha: is 8" in text and "was made with 2; set adapter.alpha=2" in text
    assert "adapter.variant: is rslora" in refusal(lambda: start_from(tmp_path / "k.safetensors", variant="rslora"))


def test_scales_that_differ_from_layer_to_layer_are_kept_in_the_weights(tmp_path):
    """alpha is then the rank."""
    model, tensors = flux_file(tmp_path)
    scaled = {key: value / (4 if "to_v" in key and "lora_B" in key else 1) for key, value in tensors.items()}
    save_file(kohya(scaled, lambda layer, _: 32.0 if "to_v" in layer else 8.0), tmp_path / "k.safetensors")
    found = output(start_from(tmp_path / "k.safetensors", alpha=4.0))
    torch.testing.assert_close(found, output(model), atol=2e-6, rtol=0)


@pytest.mark.parametrize("recorded", [True, False])
def test_ranks_that_differ_from_layer_to_layer_are_kept(tmp_path, recorded):
    from peft import LoraConfig, get_peft_model_state_dict

    plain_model = flux()
    ranks = {"^transformer_blocks.0.attn.to_q": 2, "^single_transformer_blocks.1.attn.to_v": 6}
    alphas = {layer: 2.0 * rank for layer, rank in ranks.items()}
    plain_model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"], rank_pattern=ranks,
                                       alpha_pattern=alphas if recorded else {}))  # fmt: skip
    for layer in plain_model.modules():
        if not recorded and hasattr(layer, "lora_A"):
            layer.scaling["default"] = 2.0
    shake({name: p for name, p in plain_model.named_parameters() if "lora_" in name})
    tensors = {f"transformer.{key}": value for key, value in get_peft_model_state_dict(plain_model).items()}
    layout = {f"transformer.{key}": sorted(value) if isinstance(value, set) else value
              for key, value in plain_model.peft_config["default"].to_dict().items()}  # fmt: skip
    save_file(tensors, tmp_path / FILE, {"lora_adapter_metadata": json.dumps(layout)} if recorded else None)
    model = start_from(tmp_path / FILE)
    assert torch.equal(output(model), output(plain_model.eval()))
    save_trained(tmp_path / "again", {"transformer": model}, [], config())
    fresh = flux()
    fresh.load_lora_adapter(tmp_path / "again", prefix="transformer", use_safetensors=True)
    assert torch.equal(output(fresh), output(model))
    assert "mostly" not in refusal(lambda: start_from(tmp_path / FILE, rank=16))


@pytest.mark.parametrize("change, words", [
    (lambda t: {k.replace("blocks.0.attn.to_q", "blocks.0.attn.to_qq"): v for k, v in t.items()},
     ["holds an adapter of transformer.", "to_qq", "has no such layer", "did you mean transformer."]),
    (lambda t: {k.replace("transformer.", "unet.", 1): v for k, v in t.items()},
     ["holds an adapter of transformer.unet.", "has no such layer"]),
    (lambda t: t | {"transformer.note": torch.zeros(1)}, ["holds transformer.note, which is no adapter's"]),
    (lambda t: {k.replace("transformer.", "lora_unet_", 1): v for k, v in t.items()},
     ["diffusers cannot read", "FluxPipeline", "it does not know lora_unet_"]),
    (lambda t: {k: v for k, v in kohya(t, lambda *_: 8.0).items() if "lora_up" not in k}, ["diffusers cannot read", "lora_up"]),
    (lambda t: kohya(t, lambda *_: 8.0) | {"lora_transformer_x.dora_scale": torch.zeros(1)}, ["is a DoRA of another trainer"]),
])  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, change, words):
    _, tensors = flux_file(tmp_path)
    save_file({key: value.clone() for key, value in change(tensors).items()}, tmp_path / "x.safetensors")
    text = refusal(lambda: start_from(tmp_path / "x.safetensors"))
    assert all(word in text for word in words), text


def test_other_trainers_names_are_refused_for_a_model_that_diffusers_has_no_reader_for(tmp_path):
    _, tensors = flux_file(tmp_path)
    save_file(kohya(tensors, lambda *_: 8.0), tmp_path / "k.safetensors")
    text = refusal(lambda: lora_model(init_from=str(tmp_path / "k.safetensors")))
    assert "has another trainer's names (lora_transformer_" in text and "as diffusers or peft save it" in text


def test_a_peft_folder_for_one_of_several_components_has_to_say_which(tmp_path):
    models, made = saved(tmp_path, "sd3", export=["peft"])
    (tmp_path / "peft" / "transformer").rename(tmp_path / "alone")
    several = settings("sd3", lora_base_model=["transformer", "text_encoder"], init_from=str(tmp_path / "alone"))
    assert "does not say which component it is for" in refusal(lambda: checks("sd3", several))
    one = replace(made, init_from=str(tmp_path / "alone"), export=[])
    assert torch.equal(answer("sd3", adapted("sd3", one)), answer("sd3", models))
