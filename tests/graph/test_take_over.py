"""A unit that takes over is handed mappings that hold its declared inputs only; what it hands back is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from declared import DRAWS, refusal, run

from flowrun.graph import Executor, State, UndeclaredEffect, Unit


def take(body: Callable[[dict, dict, dict], Any], reads=("x",), writes=("y",)) -> Unit:
    def process(ctx, shared, posi, nega):
        returned = body(shared, posi, nega)
        return (shared, posi, nega) if returned is None else returned

    return Unit(name="take", input_params=reads, output_params=writes, take_over=True, process=process)


@pytest.mark.parametrize(
    "look",
    [
        lambda scope: scope["secret"],
        lambda scope: scope.get("secret"),
        lambda scope: scope.pop("secret", None),
        lambda scope: scope.setdefault("secret", 1),
        lambda scope: "secret" in scope,
        lambda scope: scope.__delitem__("secret"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_reading_an_undeclared_name(look, place):
    def body(*scopes):
        look(scopes[place])

    scope = ("shared", "posi", "nega")[place]
    state = State(**{scope: {"x": 1, "secret": 2}})
    with pytest.raises(UndeclaredEffect) as caught:
        Executor([take(body)], {}).run(state, DRAWS)
    assert str(caught.value) == f"unit take reads {scope}.secret; add 'secret' to input_params"


def test_a_walk_over_a_scope_sees_declared_names_only():
    seen = []
    unit = take(lambda shared, posi, nega: seen.extend([dict(shared), dict(posi), list(nega)]))
    Executor([unit], {}).run(State(shared={"x": 1, "secret": 2}, posi={"x": 3}, nega={"secret": 4}), DRAWS)
    assert seen == [{"x": 1}, {"x": 3}, []]


def test_a_declared_name_that_is_not_there_is_simply_missing():
    with pytest.raises(KeyError, match="x"):
        run([take(lambda shared, posi, nega: shared["x"] and None)])
    assert run([take(lambda shared, posi, nega: shared.update(y=shared.get("x", 5)))]) == {"y": 5}


def test_what_it_wrote_itself_it_may_read():
    def body(shared, posi, nega):
        posi["y"] = 1
        posi["y"] += 1
        shared["y"] = posi.pop("y")

    assert run([take(body)]) == {"y": 2}


def test_writing_an_undeclared_name():
    said = refusal([take(lambda shared, posi, nega: posi.update(z=1))], x=0)
    assert said == "unit take writes posi.z; add 'z' to output_params, which has ['y']"


def test_replacing_an_input_that_is_no_output():
    said = refusal([take(lambda shared, posi, nega: shared.update(x=1))], x=0)
    assert said == "unit take writes shared.x; add 'x' to output_params, which has ['y']"


@pytest.mark.parametrize(
    "body", [lambda s, p, n: s.clear(), lambda s, p, n: s.pop("x") and None, lambda s, p, n: ({}, p, n)]
)
def test_removing_an_input_that_is_no_output(body):
    assert refusal([take(body)], x=7) == "unit take removes shared.x; return it, or add 'x' to output_params"


@pytest.mark.parametrize("value", [{}, ({}, {}), ({}, {}, None), 3])
def test_returning_no_three_mappings(value):
    said = refusal([take(lambda shared, posi, nega: value)])
    assert said == "unit take does not return three mappings; a take_over unit returns (shared, posi, nega)"


def test_undeclared_names_pass_by_unseen():
    def body(shared, posi, nega):
        return {"y": shared["x"] + 1}, {}, {"y": 0}

    unit = take(body, writes=("x", "y"))
    state = State(shared={"x": 1, "other": 2}, posi={"x": 3, "other": 4}, nega={"other": 5})
    Executor([unit], {}).run(state, DRAWS)
    assert state == State(shared={"y": 2, "other": 2}, posi={"other": 4}, nega={"y": 0, "other": 5})


def test_a_barrier_sees_and_changes_everything():
    def process(ctx, shared, posi, nega):
        posi["a"] = shared.pop("a")
        return shared, posi, {}

    state = State(shared={"a": 1, "b": 2}, nega={"c": 3, "d": 4})
    made = {}
    Executor([Unit(name="all", take_over=True, process=process)], {}).run(state, DRAWS, made=made)
    assert state == State(shared={"b": 2}, posi={"a": 1}, nega={})
    assert made[0].deleted == {("shared", "a"), ("nega", "c"), ("nega", "d")}


@pytest.mark.parametrize("declared", [{}, {"input_params": ("x",), "output_params": ("x",)}])
def test_scopes_changed_by_a_refused_unit_are_not_the_states(declared):
    def process(ctx, shared, posi, nega):
        shared.clear()
        posi["x"] = 1

    state = State(shared={"x": 0})
    with pytest.raises(UndeclaredEffect, match="does not return three mappings"):
        Executor([Unit(name="take", take_over=True, process=process, **declared)], {}).run(state, DRAWS)
    assert state == State(shared={"x": 0})
