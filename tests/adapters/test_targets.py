"""Which layers carry an adapter: the pipeline's own, all linear ones, named ones, those that a pattern matches."""

import re

import pytest
from networks import bert, config, flux, lora_model, outlines, refusal
from torch import nn

from flowrun.adapters import attach, blocks, check, trained_parameters
from flowrun.adapters.targets import resolve
from flowrun.compose import compose
from tests.pipelines.families import FROM_TEXT, make

BLOCKS = ("transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1")


def layers(model):
    """Names of the layers with an adapter."""
    names = trained_parameters({"transformer": model})
    return {name.removeprefix("transformer.").split(".lora_")[0] for name in names}


def linear():
    return {name for name, layer in flux().named_modules() if isinstance(layer, nn.Linear)}


def both(**changes):
    models = {"transformer": flux(), "text_encoder": bert()}
    attach(models, [], config(lora_base_model=list(models), **changes), {}, 0)
    return models


@pytest.mark.parametrize("targets, wanted", [
    ("auto", {f"{block}.attn.{end}" for block in BLOCKS for end in ("to_q", "to_k")}),
    ("all-linear", linear()),
    (["to_q", "to_out.0"], {f"{block}.attn.to_q" for block in BLOCKS} | {"transformer_blocks.0.attn.to_out.0"}),
    (["proj_out"], {"proj_out"} | {f"single_transformer_blocks.{i}.proj_out" for i in range(2)}),
    ("re:proj_out", {"proj_out"}),
    (r"re:.*\.to_[qk]", {f"{block}.attn.{end}" for block in BLOCKS for end in ("to_q", "to_k")}),
    (r"re:single_transformer_blocks\.1\..*to_(q|v)",
     {f"single_transformer_blocks.1.attn.{end}" for end in ("to_q", "to_v")}),
])  # fmt: skip
def test_targets_choose_layers(targets, wanted):
    assert layers(lora_model(targets=targets)) == wanted
    assert check(outlines(), [], config(targets=targets), {"transformer": ["to_q", "to_k"]}) == []


def test_all_linear_counts_what_is_there():
    assert len(linear()) > 20 and {"x_embedder", "proj_out", "norm_out.linear"} <= linear()


@pytest.mark.parametrize("targets", ["all-linear", "re:.*(to_q|query)", ["to_q", "query"]])
def test_several_components_take_what_is_theirs(targets):
    names = list(trained_parameters(both(targets=targets)))
    assert any(name.startswith("transformer.") and ".to_q.lora_A" in name for name in names)
    assert any(name.startswith("text_encoder.") and ".query.lora_A" in name for name in names)
    if targets != "all-linear":
        assert all(re.search(r"\.(to_q|query)\.lora_", name) for name in names)


@pytest.mark.parametrize("targets, words", [
    (["to_qq"], ["adapter.targets", "to_qq matches no layer of transformer", "did you mean to_q"]),
    (["to_q", "to_vv"], ["to_vv matches no layer", "to_v"]),
    (["o_q"], ["o_q matches no layer"]),
    (["attn"], ["adapter.targets", "transformer: Target module FluxAttention", "name linear"]),
    (r"re:.*\.to_qq", ["adapter.targets", r"re:.*\.to_qq matches no layer of transformer", "did you mean to_q"]),
    (r"re:.*attn\.to_vv", ["did you mean attn.to_v"]),
    (r"re:\.to_q", ["matches no layer", "has to match the whole name: put .* before"]),
    ("re:", ["matches no layer"]),
    (r"re:.*\.attn", ["transformer: Target module FluxAttention", "name linear"]),
])  # fmt: skip
def test_targets_that_match_nothing_are_refused_with_near_names(targets, words):
    text = refusal(lambda: lora_model(targets=targets))
    assert all(word in text for word in words), text
    assert refusal(lambda: check(outlines(), [], config(targets=targets), {})) == text, "known before weights are loaded"


@pytest.mark.parametrize("targets, words", [
    (["to_q"], "none of them is a layer of text_encoder"),
    (r"re:.*\.to_q", r"re:.*\.to_q matches no name: it is not a layer of text_encoder"),
])  # fmt: skip
def test_each_component_needs_a_target_of_its_own(targets, words):
    assert words in refusal(lambda: both(targets=targets))


def test_auto_without_a_list_takes_the_linear_layers_of_repeated_blocks():
    models = {"transformer": flux(), "text_encoder": bert()}
    attach(models, [], config(targets="auto", lora_base_model=list(models)), {}, 0)
    double = {f"attn.to_{x}" for x in ("q", "k", "v", "out.0", "add_out")} | {f"attn.add_{x}_proj" for x in "qkv"}
    double |= {f"{ff}.net.{end}" for ff in ("ff", "ff_context") for end in ("0.proj", "2")}
    single = {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"}
    wanted = {f"transformer_blocks.0.{layer}" for layer in double}
    wanted |= {f"single_transformer_blocks.{i}.{layer}" for i in range(2) for layer in single}
    assert layers(models["transformer"]) == wanted
    texts = {name.split(".lora_")[0] for name in trained_parameters({"": models["text_encoder"]})}
    ends = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
            "intermediate.dense", "output.dense")  # fmt: skip
    assert texts == {f".encoder.layer.0.{end}" for end in ends}


class Own(nn.Module):
    """A network that says nothing about itself."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.time_proj, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def test_auto_finds_the_blocks_of_a_network_of_ones_own():
    model = Own(2)
    attach({"net": model}, [], config(targets="auto", lora_base_model=["net"]), {}, 0)
    found = {name.removeprefix("net.").split(".lora_")[0] for name in trained_parameters({"net": model})}
    assert found == {f"layers.{i}.{layer}" for i in range(2) for layer in ("q", "mlp.0", "mlp.2")}


@pytest.mark.parametrize("family", ["flux2", *(pytest.param(f, marks=pytest.mark.slow) for f in FROM_TEXT if f != "flux2")])
def test_found_layers_are_within_blocks_and_cover_each_familys_own_list(family):
    pipeline = make(family)
    for name, component in pipeline.components().items():
        network = component.outline()
        names = {name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
        if name == "vae":
            assert blocks.pattern(network) is None
            continue
        found = {layer for layer, _ in network.named_modules() if re.fullmatch(blocks.pattern(network), layer)}
        own = resolve({name: network}, config(targets="auto", lora_base_model=[name]), pipeline.lora_targets)[name]
        listed = {layer for layer in names if (re.fullmatch(own, layer) if isinstance(own, str)
                                               else any(f".{layer}".endswith(f".{end}") for end in own))}  # fmt: skip
        assert listed <= found <= names, sorted(listed - found)
        assert all(re.search(r"(blocks?|layers?|refiner)\.\d+\.", layer) for layer in found)
        assert not [layer for layer in found if re.search(r"norm|embed|modulation|_mod\.", layer)]


def test_auto_without_a_list_or_repeated_blocks_is_refused():
    text = refusal(lambda: attach({"net": Own(1)}, [], config(targets="auto", lora_base_model=["net"]), {}, 0))
    assert "auto: the pipeline lists no layers for net, and it has no repeated blocks with linear layers" in text
    assert "give a list, or all-linear" in text


@pytest.mark.parametrize("targets, words", [
    ("to_q", ["is to_q", "auto, all-linear, a list of layers as [to_q,to_k]", "re:.*"]),
    ([], ["is []", "a list of layers"]),
    ([1], ["is [1]", "a list of layers"]),
    (None, ["is None", "a list of layers"]),
    ({"regex": "to_q"}, ["a regular expression as re:"]),
    ("re:to_(q", ["re:to_(q is no regular expression", "re:.*"]),
    (["to_q", "re:.*to_k"], ["holds re:.*to_k in a list", "write re:.*to_k alone"]),
    (["all-linear"], ["holds all-linear in a list", "alone"]),
    (["auto", "to_q"], ["holds auto in a list", "alone"]),
])  # fmt: skip
def test_what_is_no_choice_of_layers_is_refused(targets, words):
    text = refusal(lambda: config(targets=targets))
    assert text.startswith("adapter.targets: ") and all(word in text for word in words), text


@pytest.mark.parametrize("text, wanted", [
    ("all-linear", "all-linear"),
    ("[to_q,to_out.0]", ["to_q", "to_out.0"]),
    (r"re:.*\.to_q", r"re:.*\.to_q"),
    (r'"re:.*\.to_[qk]"', r"re:.*\.to_[qk]"),
    (r'"re:(a|b){1,2}\.to_q$"', r"re:(a|b){1,2}\.to_q$"),
])  # fmt: skip
def test_the_command_line_keeps_what_is_written(text, wanted):
    assert compose(["adapter=lora", f"adapter.targets={text}"]).adapter["targets"] == wanted
