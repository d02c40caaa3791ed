"""Which layers carry an adapter: the pipeline's own, all linear ones, named ones, those that a pattern matches."""

import re

import pytest
from networks import bert, config, flux, lora_model, outlines, refusal
from torch import nn

from flowrun.adapters import attach, check, trained_parameters
from flowrun.compose import compose

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


def test_auto_without_a_list_is_refused():
    text = refusal(lambda: attach({"transformer": flux()}, [], config(targets="auto"), {}, 0))
    assert "auto: the pipeline lists no layers for transformer" in text


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
