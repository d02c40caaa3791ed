"""An input that a unit changes in place is noticed, whatever the way."""

from __future__ import annotations

import pytest
import torch
from declared import DRAWS, refusal, run, unit

from flowrun.graph import Executor, State, UndeclaredEffect, Unit


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.zero_(),
        lambda x: x.__setitem__(0, 5),
        lambda x: x[1:].mul_(2),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.add(x, 1, out=x),
    ],
)
def test_a_changed_tensor(change):
    def process(ctx, x):
        change(x)
        return {"y": x * 2}

    said = refusal([unit("scale", ["x"], ["y"], process)], x=torch.arange(3.0))
    assert said == "unit scale changes its input shared.x in place; return a new value instead"


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda x: x.append(3)),
        ([1, 2], lambda x: x.reverse()),
        ({"k": 1}, lambda x: x.update(k=2)),
        ({"k": 1}, lambda x: x.pop("k")),
        ({"k": [1]}, lambda x: x["k"].append(2)),
        ([[], []], lambda x: x[0].append(x[1].append(1))),
        ({"k": (torch.zeros(1), 1)}, lambda x: x["k"][0].add_(1)),
        ([torch.zeros(2)], lambda x: x.__setitem__(0, torch.zeros(2))),
        (([torch.zeros(2)],), lambda x: x[0].clear()),
        ({"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
        ([1, 1.0], lambda x: x.__setitem__(1, True)),
        ({"a": 1}, lambda x: x.update(b=x.pop("a"))),
        ([[1], 2], lambda x: x[0].append(x.pop())),
    ],
)
def test_a_changed_container(value, change):
    said = refusal([unit("scale", ["x"], [], lambda ctx, x: change(x) and None)], x=value)
    assert said == "unit scale changes its input shared.x in place; return a new value instead"


def test_of_a_side():
    def process(ctx, e):
        return {"f": e.mul_(2)}

    sides = {"input_params_posi": {"e": "e"}, "input_params_nega": {"e": "e"}}
    scale = Unit(name="scale", **sides, output_params=("f",), separate_cfg=True, process=process)
    with pytest.raises(UndeclaredEffect, match="unit scale changes its input (posi|nega).e in place"):
        Executor([scale], {}).run(State(posi={"e": torch.ones(1)}, nega={"e": torch.ones(1)}), DRAWS)


@pytest.mark.parametrize("declared", [{}, {"input_params": ("x",)}])
def test_by_a_unit_that_takes_over(declared):
    def process(ctx, shared, posi, nega):
        nega["x"].add_(1)
        return shared, posi, nega

    with pytest.raises(UndeclaredEffect, match=r"unit take changes its input nega\.x in place"):
        Executor([Unit(name="take", take_over=True, process=process, **declared)], {}).run(
            State(nega={"x": torch.ones(1)}), DRAWS
        )


def test_of_a_value_that_is_declared_as_output_too():
    """Returned or not: another name may be bound to the same tensor."""
    assert "in place" in refusal([unit("scale", ["x"], ["x"], lambda ctx, x: {"x": x.add_(1)})], x=torch.ones(1))


@pytest.mark.parametrize(
    "value", [torch.ones(2), [torch.ones(2), 10**6, 2.5, "a"], {"k": (None, torch.ones(1))}, "text", None]
)
def test_reading_is_no_change(value):
    def process(ctx, x):
        copy = list(x) if isinstance(x, list) else x
        return {"y": copy}

    assert "y" in run([unit("read", ["x"], ["y"], process)], x=value)


def test_a_second_name_for_one_tensor_does_not_follow_when_the_first_is_written_anew():
    units = [
        unit("bind", ["x"], ["y"], lambda ctx, x: {"y": x}),
        unit("write", ["x"], ["x"], lambda ctx, x: {"x": x + 1}),
    ]
    state = run(units, x=torch.zeros(2))
    assert (state["x"].tolist(), state["y"].tolist()) == ([1, 1], [0, 0])
