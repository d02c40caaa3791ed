"""Whatever a unit does beyond its declaration is refused, with the unit, the effect and the declaration that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from declared import DRAWS, run, unit

from flowrun.graph import Executor, State, UndeclaredEffect, Unit


def refusal(units: list[Unit], models: dict[str, Any] | None = None, **shared: Any) -> str:
    with pytest.raises(UndeclaredEffect) as caught:
        run(units, models, **shared)
    return str(caught.value)


class TestReturned:
    def test_an_undeclared_output(self):
        said = refusal([unit("encode", [], ["e"], lambda ctx: {"e": 1, "mask": 2})])
        assert said == "unit encode writes 'mask'; add it to output_params, which has ['e']"

    def test_a_certain_output_that_is_missing(self):
        said = refusal([unit("encode", [], ["e", "mask"], lambda ctx: {"e": 1})])
        assert said == "unit encode does not return 'mask'; return it always, or declare may_write=True"

    @pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), ([("e", 1)], "list"), (torch.zeros(1), "Tensor")])
    def test_no_mapping(self, value, kind):
        said = refusal([unit("encode", [], ["e"], lambda ctx: value)])
        assert said == f"unit encode returns {kind}; return a mapping of output names to values"

    def test_on_one_side_only(self):
        def process(ctx, prompt):
            return {"e": prompt} if prompt == "good" else {}

        sides = {"input_params_posi": {"prompt": "prompt"}, "input_params_nega": {"prompt": "prompt"}}
        encode = Unit(name="encode", **sides, output_params=("e",), separate_cfg=True, process=process)
        state = State(posi={"prompt": "good"}, nega={"prompt": "bad"})
        with pytest.raises(UndeclaredEffect, match="unit encode does not return 'e'"):
            Executor([encode], {}).run(state, DRAWS)

    @pytest.mark.parametrize("value", [None, {}, {"e": 1}])
    def test_a_may_writer_may_leave_out_any_output(self, value):
        assert run([unit("encode", [], ["e", "mask"], lambda ctx: value, may_write=True)]) == dict(value or {})

    def test_a_may_writer_is_held_to_its_names_too(self):
        assert "writes 'f'" in refusal([unit("encode", [], ["e"], lambda ctx: {"f": 1}, may_write=True)])

    def test_a_unit_without_outputs_may_return_nothing(self):
        assert run([unit("check", ["x"], [], lambda ctx, x: None)], x=1) == {"x": 1}


class TestModels:
    @pytest.mark.parametrize("use", [lambda models: models["vae"], lambda models: models.get("vae"), lambda models: "vae" in models])
    def test_an_undeclared_model(self, use):
        loaded = {"vae": object(), "text": object()}
        said = refusal([unit("encode", [], [], lambda ctx: use(ctx.models) and None, models=["text"])], loaded)
        assert said == "unit encode calls the model 'vae'; add it to onload_model_names, which has ['text']"

    def test_the_same_model_under_another_name(self):
        said = refusal([unit("encode", [], [], lambda ctx: ctx.models["text_encoder"], models=["text"])], {"text": object()})
        assert said == "unit encode calls the model 'text_encoder'; add it to onload_model_names, which has ['text']"

    def test_a_declared_name_that_the_pipeline_does_not_have(self):
        with pytest.raises(KeyError, match="text_encoder"):
            run([unit("encode", [], [], lambda ctx: ctx.models["text_encoder"], models=["text_encoder"])], {"text": object()})

    def test_the_whole_when_a_part_is_declared(self):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        assert "calls the model 'dit'" in refusal([unit("u", [], [], lambda ctx: ctx.models["dit"], models=["dit.0"])], {"dit": model})
        assert "calls the model 'dit.1'" in refusal([unit("u", [], [], lambda ctx: ctx.models["dit.1"], models=["dit.0"])], {"dit": model})

    @pytest.mark.parametrize(("declared", "asked"), [("dit", "dit"), ("dit", "dit.1"), ("dit.1", "dit.1"), ("dit.1", "dit.1.bias"), ("", "dit.1")])
    def test_declared_models_and_their_parts_are_given(self, declared, asked):
        model, seen = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1)), []
        run([unit("u", [], [], lambda ctx: seen.append(ctx.models[asked]), models=[declared])], {"dit": model})
        assert seen == [{"dit": model, "dit.1": model[1], "dit.1.bias": model[1].bias}[asked]]

    def test_a_walk_over_the_models_sees_the_declared_ones(self):
        seen = []
        loaded = {"vae": 1, "text": 2, "dit": 3}
        run([unit("u", [], [], lambda ctx: seen.append((dict(ctx.models), len(ctx.models))), models=["dit", "vae"])], loaded)
        assert seen == [({"dit": 3, "vae": 1}, 2)]

    def test_the_configuration_of_any_model_is_free(self):
        process = lambda ctx: {"channels": ctx.configs["dit"]["in_channels"]}  # noqa: E731
        executor = Executor([unit("u", [], ["channels"], process)], {}, {"dit": {"in_channels": 16}})
        assert executor.run(State(), DRAWS).shared == {"channels": 16}


class TestInputs:
    def test_an_argument_that_nothing_declared_fills(self):
        with pytest.raises(UndeclaredEffect) as caught:
            Executor([unit("mix", ["x"], ["z"], lambda ctx, x, y: {"z": x + y})], {})
        assert str(caught.value) == "unit mix takes the argument 'y'; add 'y' to input_params"

    def test_a_declared_input_that_the_process_does_not_take(self):
        with pytest.raises(ValueError, match="unit mix: its process takes no argument 'y'; declare only what it reads"):
            Executor([unit("mix", ["x", "y"], ["z"], lambda ctx, x: {"z": x})], {})

    def test_two_inputs_under_one_argument_name(self):
        sides = {"input_params_posi": {"e": "e"}, "input_params_nega": {"e": "e"}}
        process = lambda ctx, e: {"z": e}  # noqa: E731
        with pytest.raises(ValueError, match="unit mix: two inputs are passed as the argument 'e'; rename one"):
            Executor([Unit(name="mix", **sides, output_params=("z",), process=process)], {})
        assert Executor([Unit(name="mix", **sides, output_params=("z",), separate_cfg=True, process=process)], {})

    def test_undeclared_names_do_not_reach_a_process_that_takes_anything(self):
        seen = []
        run([unit("u", ["x"], [], lambda ctx, **given: seen.append(given))], x=1, secret=2)
        assert seen == [{"x": 1}]

    def test_an_input_that_is_not_there_leaves_the_default(self):
        assert run([unit("u", ["x"], ["y"], lambda ctx, x="default": {"y": x})])["y"] == "default"
        assert run([unit("u", ["x"], ["y"], lambda ctx, x="default": {"y": x})], x=None)["y"] is None

    def test_arguments_come_from_the_declared_scopes(self):
        seen = []
        sides = {"input_params_posi": {"good": "e"}, "input_params_nega": {"bad": "e"}}
        mix = Unit(name="mix", input_params=("e",), **sides, process=lambda ctx, e, good, bad: seen.append((e, good, bad)))
        Executor([mix], {}).run(State(shared={"e": 1}, posi={"e": 2}, nega={"e": 3}), DRAWS)
        assert seen == [(1, 2, 3)]


class TestTakeOver:
    """It is handed mappings, which hold the declared inputs only."""

    def take(self, body: Callable[[dict, dict, dict], Any], reads=("x",), writes=("y",)) -> Unit:
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
    def test_reading_an_undeclared_name(self, look, place):
        def body(*scopes):
            look(scopes[place])

        scope = ("shared", "posi", "nega")[place]
        state = State(**{scope: {"x": 1, "secret": 2}})
        with pytest.raises(UndeclaredEffect) as caught:
            Executor([self.take(body)], {}).run(state, DRAWS)
        assert str(caught.value) == f"unit take reads {scope}.secret; add 'secret' to input_params"

    def test_a_walk_over_a_scope_sees_declared_names_only(self):
        seen = []
        take = self.take(lambda shared, posi, nega: seen.extend([dict(shared), dict(posi), list(nega)]))
        Executor([take], {}).run(State(shared={"x": 1, "secret": 2}, posi={"x": 3}, nega={"secret": 4}), DRAWS)
        assert seen == [{"x": 1}, {"x": 3}, []]

    def test_a_declared_name_that_is_not_there_is_simply_missing(self):
        with pytest.raises(KeyError, match="x"):
            run([self.take(lambda shared, posi, nega: shared["x"] and None)])
        assert run([self.take(lambda shared, posi, nega: shared.update(y=shared.get("x", 5)))]) == {"y": 5}

    def test_what_it_wrote_itself_it_may_read(self):
        def body(shared, posi, nega):
            posi["y"] = 1
            posi["y"] += 1
            shared["y"] = posi.pop("y")

        assert run([self.take(body)]) == {"y": 2}

    def test_writing_an_undeclared_name(self):
        said = refusal([self.take(lambda shared, posi, nega: posi.update(z=1))], x=0)
        assert said == "unit take writes posi.z; add 'z' to output_params, which has ['y']"

    def test_replacing_an_input_that_is_no_output(self):
        said = refusal([self.take(lambda shared, posi, nega: shared.update(x=1))], x=0)
        assert said == "unit take writes shared.x; add 'x' to output_params, which has ['y']"

    @pytest.mark.parametrize("body", [lambda s, p, n: s.clear(), lambda s, p, n: s.pop("x") and None, lambda s, p, n: ({}, p, n)])
    def test_removing_an_input_that_is_no_output(self, body):
        assert refusal([self.take(body)], x=7) == "unit take removes shared.x; return it, or add 'x' to output_params"

    @pytest.mark.parametrize("value", [{}, ({}, {}), ({}, {}, None), 3])
    def test_returning_no_three_mappings(self, value):
        said = refusal([self.take(lambda shared, posi, nega: value)])
        assert said == "unit take does not return three mappings; a take_over unit returns (shared, posi, nega)"

    def test_undeclared_names_pass_by_unseen(self):
        def body(shared, posi, nega):
            return {"y": shared["x"] + 1}, {}, {"y": 0}

        take = self.take(body, writes=("x", "y"))
        state = State(shared={"x": 1, "other": 2}, posi={"x": 3, "other": 4}, nega={"other": 5})
        Executor([take], {}).run(state, DRAWS)
        assert state == State(shared={"y": 2, "other": 2}, posi={"other": 4}, nega={"y": 0, "other": 5})

    def test_a_barrier_sees_and_changes_everything(self):
        def process(ctx, shared, posi, nega):
            posi["a"] = shared.pop("a")
            return shared, posi, {}

        state = State(shared={"a": 1, "b": 2}, nega={"c": 3, "d": 4})
        made = {}
        Executor([Unit(name="all", take_over=True, process=process)], {}).run(state, DRAWS, made=made)
        assert state == State(shared={"b": 2}, posi={"a": 1}, nega={})
        assert made[0].deleted == {("shared", "a"), ("nega", "c"), ("nega", "d")}


class TestInPlace:
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
    def test_a_changed_tensor(self, change):
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
            ({"k": (torch.zeros(2), 1)}, lambda x: x["k"][0].add_(1)),
            ([torch.zeros(2)], lambda x: x.__setitem__(0, torch.zeros(2))),
            (([torch.zeros(2)],), lambda x: x[0].clear()),
            ({"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
            ([1, 1.0], lambda x: x.__setitem__(1, True)),
        ],
    )
    def test_a_changed_container(self, value, change):
        said = refusal([unit("scale", ["x"], [], lambda ctx, x: change(x) and None)], x=value)
        assert said == "unit scale changes its input shared.x in place; return a new value instead"

    def test_of_a_side(self):
        def process(ctx, e):
            return {"f": e.mul_(2)}

        sides = {"input_params_posi": {"e": "e"}, "input_params_nega": {"e": "e"}}
        scale = Unit(name="scale", **sides, output_params=("f",), separate_cfg=True, process=process)
        with pytest.raises(UndeclaredEffect, match="unit scale changes its input (posi|nega).e in place"):
            Executor([scale], {}).run(State(posi={"e": torch.ones(1)}, nega={"e": torch.ones(1)}), DRAWS)

    @pytest.mark.parametrize("declared", [{}, {"input_params": ("x",)}])
    def test_by_a_unit_that_takes_over(self, declared):
        def process(ctx, shared, posi, nega):
            nega["x"].add_(1)
            return shared, posi, nega

        with pytest.raises(UndeclaredEffect, match=r"unit take changes its input nega\.x in place"):
            Executor([Unit(name="take", take_over=True, process=process, **declared)], {}).run(State(nega={"x": torch.ones(1)}), DRAWS)

    def test_of_a_value_that_is_declared_as_output_too(self):
        """Returned or not: another name may be bound to the same tensor."""
        assert "in place" in refusal([unit("scale", ["x"], ["x"], lambda ctx, x: {"x": x.add_(1)})], x=torch.ones(1))

    @pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2), 10**6, 2.5, "a"], {"k": (None, torch.ones(1))}, "text", None])
    def test_reading_is_no_change(self, value):
        def process(ctx, x):
            copy = list(x) if isinstance(x, list) else x
            return {"y": copy}

        assert "y" in run([unit("read", ["x"], ["y"], process)], x=value)

    def test_a_second_name_for_one_tensor_does_not_follow_when_the_first_is_written_anew(self):
        units = [
            unit("bind", ["x"], ["y"], lambda ctx, x: {"y": x}),
            unit("write", ["x"], ["x"], lambda ctx, x: {"x": x + 1}),
        ]
        state = run(units, x=torch.zeros(2))
        assert (state["x"].tolist(), state["y"].tolist()) == ([1, 1], [0, 0])


class TestDraws:
    def test_a_generator_that_is_not_declared(self):
        said = refusal([unit("noise", [], ["n"], lambda ctx: {"n": torch.rand(1, generator=ctx.generator)})])
        assert said == "unit noise draws random numbers; declare random='per_epoch' or random='frozen'"


def test_a_units_own_errors_pass_unchanged():
    def process(ctx):
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        run([unit("u", [], [], process)])


def test_a_refused_unit_leaves_the_state_as_it_was():
    state = State(shared={"x": torch.ones(1)})
    with pytest.raises(UndeclaredEffect):
        Executor([unit("u", ["x"], ["y"], lambda ctx, x: {"y": x.add(1), "z": 1})], {}).run(state, DRAWS)
    assert state == State(shared={"x": torch.ones(1)})
