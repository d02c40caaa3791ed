"""What is trained, adapters on real network classes, and saved results that plain diffusers and transformers load."""

import json

import pytest
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel
from networks import FILE, bert, config, flux, lora_model, none, outlines, output, plain_pipeline, refusal, shake
from safetensors.torch import load_file, save_file
from torch import nn

from flowrun.adapters import attach, check, save_trained, trained_names, trained_parameters, unwrapped
from flowrun.config import Failure

# ---- what is trained


def test_a_whole_component_is_trained_and_everything_else_is_frozen():
    models = {"transformer": flux(), "text_encoder": bert()}
    attach(models, ["transformer"], none(), {}, 0)
    wanted = {f"transformer.{name}": p for name, p in models["transformer"].named_parameters()}
    found = trained_parameters(models)
    assert found.keys() == wanted.keys() and all(found[name] is wanted[name] for name in wanted)
    assert not any(p.requires_grad for p in models["text_encoder"].parameters())
    assert models["transformer"].training and not models["text_encoder"].training


def test_a_dotted_name_trains_that_part_only():
    models = {"transformer": flux()}
    attach(models, ["transformer.single_transformer_blocks.1", "transformer.proj_out"], none(), {}, 0)
    names = set(trained_parameters(models))
    assert names == {
        f"transformer.{name}"
        for name, _ in models["transformer"].named_parameters()
        if name.startswith(("single_transformer_blocks.1.", "proj_out."))
    }
    assert (
        "transformer.proj_out.weight" in names and "transformer.single_transformer_blocks.1.attn.to_q.weight" in names
    )


def test_whole_numbers_are_no_trained_parameters():
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    attach({"m": model}, ["m"], none(), {}, 0)
    assert list(trained_parameters({"m": model})) == ["m.weight", "m.bias"]


def test_trained_names_are_the_whole_ones_and_the_adapters():
    both = config(lora_base_model=["text_encoder"])
    assert trained_names(["transformer.proj_out"], both, ["transformer", "text_encoder"]) == (
        "transformer.proj_out",
        "text_encoder",
    )


@pytest.mark.parametrize("trainable, adapter, words", [
    (["transfomer"], none(), ["task.trainable_models", "transfomer is no component", "did you mean transformer?"]),
    (["vae"], none(), ["vae is no component", "text_encoder, transformer"]),
    ([], config(lora_base_model=["unet"]), ["unet is no component", "denoiser is transformer: adapter.lora_base_model=[transformer]"]),
    (["transformer"], config(), ["task.trainable_models", "transformer is also in adapter.lora_base_model"]),
    (["transformer.proj_out"], config(), ["transformer is also in adapter.lora_base_model"]),
    ([], none(), ["task.trainable_models", "is empty and there is no adapter"]),
])  # fmt: skip
def test_wrong_trained_names_are_refused_without_a_model(trainable, adapter, words):
    text = refusal(lambda: trained_names(trainable, adapter, ["transformer", "text_encoder"]))
    assert all(word in text for word in words), text


def test_a_part_that_does_not_exist_is_refused_with_near_names():
    text = refusal(lambda: attach({"transformer": flux()}, ["transformer.proj_ou"], none(), {}, 0))
    assert "there is no transformer.proj_ou" in text and "did you mean transformer.proj_out" in text


@pytest.mark.parametrize("changes, words", [
    ({"rank": 0}, ["adapter.rank", "at least 1"]),
    ({"rank": None}, ["adapter.rank", "is None"]),
    ({"alpha": 0.0}, ["adapter.alpha", "no effect"]),
    ({"dropout": 1.0}, ["adapter.dropout", "no effect"]),
    ({"lora_base_model": []}, ["adapter.lora_base_model", "is empty"]),
    ({"kind": "dora"}, ["adapter.kind", "dora"]),
    ({"variant": "rslor"}, ["adapter.variant", "did you mean rslora"]),
    ({"variant": None}, ["adapter.variant", "is null", "lora, rslora, dora"]),
    ({"kind": "none"}, ["adapter.variant", "is lora", "adapter.kind=none does not use", "adapter=lora"]),
    ({"kind": "none", "variant": None}, ["adapter.lora_base_model", "adapter.kind=none does not use"]),
    ({"kind": "none", "variant": None, "lora_base_model": []}, ["adapter.rank", "adapter.kind=none does not use"]),
])  # fmt: skip
def test_settings_that_cannot_be_or_have_no_effect_are_refused(changes, words):
    text = refusal(lambda: config(**changes))
    assert all(word in text for word in words), text


def test_narrow_trained_weights_are_warned_about(caplog):
    attach({"transformer": flux().bfloat16()}, ["transformer"], none(), {}, 0)
    assert "trained weights are torch.bfloat16" in caplog.text


# ---- adapters


def test_an_adapter_changes_nothing_at_first_and_only_it_is_trained():
    model = lora_model()
    assert torch.equal(output(model), output(flux()))
    names = list(trained_parameters({"transformer": model}))
    blocks = 3  # one double, two single
    assert len(names) == 2 * 2 * blocks and all(".lora_A." in name or ".lora_B." in name for name in names)


def test_the_adapter_adds_alpha_over_rank_times_its_product():
    model = lora_model(rank=4, alpha=8.0)
    shake(trained_parameters({"transformer": model}))
    layer, x = model.single_transformer_blocks[0].attn.to_q, torch.randn(3, 32)
    wanted = (
        nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias)
        + 8 / 4 * x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    )
    assert torch.allclose(layer(x), wanted, rtol=0, atol=1e-5)


def test_the_start_derives_from_the_seed_and_the_component_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trained_parameters({"transformer": lora_model(seed=5)})
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second, other = ({**trained_parameters({"transformer": lora_model(seed=seed)})} for seed in (5, 6))
    a = [name for name in first if "lora_A" in name]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in a)


def test_adapters_on_a_narrow_base_are_wide():
    model = lora_model(torch.bfloat16)
    assert {p.dtype for p in trained_parameters({"transformer": model}).values()} == {torch.float32}
    assert model.proj_out.weight.dtype == torch.bfloat16


def test_networks_without_diffusers_adapter_support_take_them_too():
    pixart = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        sample_size=4,
        cross_attention_dim=16,
        caption_channels=16,
        norm_num_groups=1,
        in_channels=4,
        out_channels=4,
    )
    models = {"transformer": pixart, "text_encoder": bert()}
    attach(models, [], config(lora_base_model=list(models), targets=["to_q", "query"]), {}, 0)
    names = list(trained_parameters(models))
    assert any(n.startswith("transformer.") and ".to_q.lora_A." in n for n in names)
    assert any(n.startswith("text_encoder.") and ".query.lora_A." in n for n in names)
    assert all(".lora_" in n for n in names)
    models["text_encoder"](torch.tensor([[1, 2]])).last_hidden_state.sum().backward()
    used = [n for n, p in trained_parameters(models).items() if n.startswith("text_encoder") and p.grad is not None]
    assert len(used) == 2


def test_parameters_that_get_no_gradient_do_not_disturb_clipping_and_updates():
    model = lora_model()
    parameters = trained_parameters({"transformer": model})
    before = {name: p.detach().clone() for name, p in parameters.items()}
    model.transformer_blocks[0].attn.to_q(torch.randn(2, 32)).square().sum().backward()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.0)
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step()
    moved = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    # A's gradient is zero while B is.
    assert moved == {"transformer.transformer_blocks.0.attn.to_q.lora_B.default.weight"}


# ---- saved results


@pytest.fixture
def trained(tmp_path):
    """A trained adapter (alpha twice the rank), saved; and its network."""
    model = lora_model()
    shake(trained_parameters({"transformer": model}))
    (file,) = save_trained(tmp_path, {"transformer": model}, [], config())
    assert file == tmp_path / FILE
    return model.eval()


def test_plain_diffusers_loads_the_adapter_with_the_same_output(trained, tmp_path):
    assert (output(trained) - output(flux())).abs().max() > 1e-3
    fresh = flux()
    fresh.load_lora_adapter(tmp_path, prefix="transformer", use_safetensors=True)
    assert torch.equal(output(fresh), output(trained))
    (adapter,) = fresh.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (4, 8)
    assert {p.name for p in tmp_path.iterdir()} == {FILE}


def test_a_plain_diffusers_pipeline_loads_the_adapter_with_the_same_output(trained, tmp_path):
    fresh = plain_pipeline()
    fresh.load_lora_weights(tmp_path, weight_name=FILE)
    assert torch.equal(output(fresh.transformer), output(trained))


def test_a_text_encoders_adapter_is_saved_beside_the_networks(tmp_path):
    models = {"transformer": flux(), "text_encoder": bert()}
    both = config(lora_base_model=list(models), targets=["to_q", "query"])
    attach(models, [], both, {}, 0)
    save_trained(tmp_path, models, [], both)
    keys = load_file(tmp_path / FILE)
    assert "text_encoder.encoder.layer.0.attention.self.query.lora_A.weight" in keys
    assert "transformer.transformer_blocks.0.attn.to_q.lora_B.weight" in keys


@pytest.mark.slow
def test_wrappers_leave_no_trace_in_names(trained, tmp_path):
    wrapped = {"transformer": nn.DataParallel(trained)}
    assert unwrapped(wrapped["transformer"]) is trained
    assert list(trained_parameters(wrapped)) == list(trained_parameters({"transformer": trained}))
    (tmp_path / "w").mkdir()
    save_trained(tmp_path / "w", wrapped, [], config())
    plain, other = load_file(tmp_path / FILE), load_file(tmp_path / "w" / FILE)
    assert plain.keys() == other.keys() and all(torch.equal(plain[key], other[key]) for key in plain)
    assert unwrapped(torch.compile(trained)) is trained


def test_a_whole_component_is_saved_for_from_pretrained(tmp_path):
    model = flux()
    attach({"transformer": model}, ["transformer.proj_out"], none(), {}, 0)
    shake(trained_parameters({"transformer": model}))
    for _ in range(2):  # the second replaces the first
        assert save_trained(tmp_path, {"transformer": model}, ["transformer.proj_out"], none()) == [
            tmp_path / "transformer"
        ]
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(output(again), output(model.eval()))
    assert {p.name for p in tmp_path.iterdir()} == {"transformer"}


def test_a_full_disk_keeps_the_earlier_result(trained, tmp_path, monkeypatch):
    import errno

    from diffusers.loaders.lora_base import LoraBaseMixin

    before = (tmp_path / FILE).read_bytes()

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LoraBaseMixin, "write_lora_layers", full)
    with pytest.raises(Failure, match="disk was full while saving the trained weights"):
        save_trained(tmp_path, {"transformer": trained}, [], config())
    assert (tmp_path / FILE).read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {FILE}


# ---- starting from a saved adapter


@pytest.mark.parametrize("whole_file", [True, False])
def test_training_starts_from_a_saved_adapter(trained, tmp_path, whole_file):
    path = tmp_path / FILE if whole_file else tmp_path
    again = lora_model(init_from=str(path))
    assert torch.equal(output(again.eval()), output(trained))
    assert len(trained_parameters({"transformer": again})) == 12


@pytest.mark.parametrize("rename", [
    lambda key: key.removeprefix("transformer."),
    lambda key: key.replace("lora_A.weight", "lora_A.mine.weight").replace("lora_B.weight", "lora_B.mine.weight"),
    lambda key: key.replace("transformer.", "transformer.base_model.model.", 1),
    lambda key: "module." + key,
])  # fmt: skip
def test_names_of_other_savers_are_understood(trained, tmp_path, rename):
    save_file({rename(key): value for key, value in load_file(tmp_path / FILE).items()}, tmp_path / "other.safetensors")
    path = str(tmp_path / "other.safetensors")
    again = lora_model(init_from=path)
    assert torch.equal(output(again.eval()), output(trained))
    warnings = check(outlines(), [], config(init_from=path), {"transformer": ["to_q", "to_k"]})
    assert warnings == [f"{path} does not record its scale; adapter.alpha=8 and adapter.variant=lora are used"]


@pytest.mark.parametrize("changes, words", [
    ({"rank": 16}, ["adapter.rank", "is 16", "made with 4", "set adapter.rank=4"]),
    ({"alpha": 4.0}, ["adapter.alpha", "is 4", "made with 8"]),
    ({"targets": ["to_q"]}, ["adapter.init_from", "also has", "to_v", "6 such"]),
    ({"targets": ["to_q", "to_k", "to_v"]}, ["adapter.init_from", "has no", "to_k", "6 such"]),
    ({"init_from": "/nowhere"}, ["adapter.init_from", "there is no file /nowhere"]),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(trained, tmp_path, changes, words):
    changes = {"init_from": str(tmp_path)} | changes
    text = refusal(lambda: lora_model(**changes))
    assert all(word in text for word in words), text
    lora_targets = {"transformer": ["to_q", "to_k"]}
    assert refusal(lambda: check(outlines(), [], config(**changes), lora_targets)) == text


def test_a_runs_directory_is_refused_with_its_result_named(tmp_path):
    (tmp_path / "model").mkdir()
    text = refusal(lambda: check(outlines(), [], config(init_from=str(tmp_path)), {"transformer": ["to_q", "to_k"]}))
    assert text == f"adapter.init_from: {tmp_path} holds no adapter itself; give a run's result, {tmp_path}/model"


def test_a_file_that_is_no_adapter_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"\0" * 100)
    assert "is no safetensors file" in refusal(lambda: lora_model(init_from=str(tmp_path)))


def test_an_adapter_of_another_width_is_refused(trained, tmp_path):
    tensors = load_file(tmp_path / FILE)
    tensors["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"] = torch.zeros(7, 4)
    save_file(tensors, tmp_path / FILE)
    text = refusal(lambda: lora_model(init_from=str(tmp_path)))
    assert "[7, 4]" in text and "[32, 4]" in text


def test_the_recorded_layout_is_plain_json(trained, tmp_path):
    from safetensors import safe_open

    with safe_open(tmp_path / FILE, "pt") as handle:
        layout = json.loads(handle.metadata()["lora_adapter_metadata"])
    assert layout["transformer.r"] == 4 and layout["transformer.lora_alpha"] == 8
