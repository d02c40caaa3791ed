"""What a unit's declaration means, and which declarations are refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from flowrun.graph import Unit

NAME_FIELDS = ("input_params", "output_params", "onload_model_names")


@pytest.mark.parametrize("field", NAME_FIELDS)
def test_a_missing_comma_is_refused_with_the_repair(field):
    with pytest.raises(TypeError) as caught:
        Unit(name="encode", **{field: ("prompt")})
    assert str(caught.value) == f"unit encode: {field} is the text 'prompt'; give a tuple, with its comma: ('prompt',)"


@pytest.mark.parametrize("field", NAME_FIELDS)
@pytest.mark.parametrize("value", [None, {"prompt"}, {"prompt": "prompt"}, 3, (name for name in "ab")])
def test_names_come_in_a_tuple(field, value):
    with pytest.raises(TypeError, match=f"unit encode: {field} is .*; give a tuple of names, \\(\\) for none"):
        Unit(name="encode", **{field: value})


@pytest.mark.parametrize("field", NAME_FIELDS)
def test_names_are_strings(field):
    with pytest.raises(TypeError, match=f"unit encode: {field} holds 3; names are strings"):
        Unit(name="encode", **{field: ("prompt", 3)})


@pytest.mark.parametrize("field", NAME_FIELDS)
def test_a_list_of_names_becomes_a_tuple(field):
    assert getattr(Unit(name="encode", **{field: ["a", "b"]}), field) == ("a", "b")


@pytest.mark.parametrize("field", ["input_params_posi", "input_params_nega"])
@pytest.mark.parametrize("value", ["prompt", ("prompt",), None, {"prompt": 1}, {1: "prompt"}, {"prompt": ("prompt",)}])
def test_a_side_maps_argument_names_to_names(field, value):
    with pytest.raises(TypeError, match=f"unit encode: {field} is .*; map argument names to names of that scope"):
        Unit(name="encode", **{field: value})


@pytest.mark.parametrize("value", ["", "epoch", True, None])
def test_an_unknown_kind_of_randomness_is_refused(value):
    with pytest.raises(ValueError, match=f"unit noise: random is {value!r}; one of none, frozen, per_epoch"):
        Unit(name="noise", random=value)


def test_take_over_excludes_separate_cfg():
    with pytest.raises(ValueError, match="unit both: take_over sees all scopes at once, separate_cfg one side"):
        Unit(name="both", take_over=True, separate_cfg=True)


def test_a_unit_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Unit(name="encode").output_params = ("x",)


def test_a_plain_unit_reads_three_scopes_and_writes_the_shared_one():
    unit = Unit(
        name="mix",
        input_params=("a", "b"),
        input_params_posi={"p": "e"},
        input_params_nega={"n": "e"},
        output_params=("a", "c"),
    )
    assert unit.reads == {("shared", "a"), ("shared", "b"), ("posi", "e"), ("nega", "e")}
    assert unit.writes == unit.certain_writes == {("shared", "a"), ("shared", "c")}
    assert not unit.is_barrier


def test_separate_cfg_writes_both_sides():
    sides = {"input_params_posi": {"prompt": "prompt"}, "input_params_nega": {"prompt": "negative"}}
    unit = Unit(name="encode", input_params=("tokens",), **sides, output_params=("e",), separate_cfg=True)
    assert unit.reads == {("shared", "tokens"), ("posi", "prompt"), ("nega", "negative")}
    assert unit.writes == unit.certain_writes == {("posi", "e"), ("nega", "e")}


def test_take_over_counts_in_all_scopes_and_writes_nothing_for_certain():
    unit = Unit(name="take", input_params=("a",), input_params_posi={"p": "e"}, output_params=("x",), take_over=True)
    assert unit.reads == {(scope, name) for scope in ("shared", "posi", "nega") for name in ("a", "e")}
    assert unit.writes == {(scope, "x") for scope in ("shared", "posi", "nega")}
    assert unit.certain_writes == frozenset()
    assert not unit.is_barrier


def test_may_write_leaves_no_write_certain():
    unit = Unit(name="maybe", output_params=("x",), may_write=True)
    assert (unit.writes, unit.certain_writes) == ({("shared", "x")}, frozenset())


@pytest.mark.parametrize(
    ("declared", "barrier"),
    [
        ({"take_over": True}, True),
        ({"take_over": True, "onload_model_names": ("vae",), "random": "frozen"}, True),
        ({"take_over": True, "input_params": ("a",)}, False),
        ({"take_over": True, "output_params": ("a",)}, False),
        ({"take_over": True, "input_params_posi": {"a": "a"}}, False),
        ({"take_over": True, "input_params_nega": {"a": "a"}}, False),
        ({}, False),
        ({"separate_cfg": True}, False),
    ],
)
def test_a_barrier_takes_over_and_declares_no_names(declared, barrier):
    assert Unit(name="u", **declared).is_barrier is barrier
