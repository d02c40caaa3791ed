"""What a unit does beyond its declaration is refused, naming the unit, the effect and the missing declaration."""

from __future__ import annotations

import pytest
import torch
from declared import DRAWS, refusal, run, unit

from flowrun.graph import Executor, State, UndeclaredEffect, Unit


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
    @pytest.mark.parametrize(
        "use", [lambda models: models["vae"], lambda models: models.get("vae"), lambda models: "vae" in models]
    )
    def test_an_undeclared_model(self, use):
        loaded = {"vae": object(), "text": object()}
        said = refusal([unit("encode", [], [], lambda ctx: use(ctx.models) and None, models=["text"])], loaded)
        assert said == "unit encode calls the model 'vae'; add it to onload_model_names, which has ['text']"

    def test_the_same_model_under_another_name(self):
        said = refusal(
            [unit("encode", [], [], lambda ctx: ctx.models["text_encoder"], models=["text"])], {"text": object()}
        )
        assert said == "unit encode calls the model 'text_encoder'; add it to onload_model_names, which has ['text']"

    def test_a_declared_name_that_the_pipeline_does_not_have(self):
        with pytest.raises(KeyError, match="text_encoder"):
            run(
                [unit("encode", [], [], lambda ctx: ctx.models["text_encoder"], models=["text_encoder"])],
                {"text": object()},
            )

    def test_the_whole_when_a_part_is_declared(self):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        assert "calls the model 'dit'" in refusal(
            [unit("u", [], [], lambda ctx: ctx.models["dit"], models=["dit.0"])], {"dit": model}
        )
        assert "calls the model 'dit.1'" in refusal(
            [unit("u", [], [], lambda ctx: ctx.models["dit.1"], models=["dit.0"])], {"dit": model}
        )

    @pytest.mark.parametrize(
        ("declared", "asked"),
        [("dit", "dit"), ("dit", "dit.1"), ("dit.1", "dit.1"), ("dit.1", "dit.1.bias"), ("", "dit.1")],
    )
    def test_declared_models_and_their_parts_are_given(self, declared, asked):
        model, seen = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1)), []
        run([unit("u", [], [], lambda ctx: seen.append(ctx.models[asked]), models=[declared])], {"dit": model})
        assert seen == [{"dit": model, "dit.1": model[1], "dit.1.bias": model[1].bias}[asked]]

    def test_a_walk_over_the_models_sees_the_declared_ones(self):
        seen = []
        loaded = {"vae": 1, "text": 2, "dit": 3}
        run(
            [unit("u", [], [], lambda ctx: seen.append((dict(ctx.models), len(ctx.models))), models=["dit", "vae"])],
            loaded,
        )
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

    def test_the_arguments_of_each_side(self):
        sides = {"input_params_posi": {"e": "e"}, "input_params_nega": {"f": "e"}, "separate_cfg": True}
        with pytest.raises(UndeclaredEffect, match="unit mix takes the argument 'f'; add 'f' to input_params"):
            Executor([Unit(name="mix", **sides, process=lambda ctx, e, f: None)], {})
        with pytest.raises(ValueError, match="unit mix: its process takes no argument 'f'"):
            Executor([Unit(name="mix", **sides, process=lambda ctx, e=0: None)], {})

    def test_an_argument_with_a_default_need_not_be_declared(self):
        assert run([unit("scale", ["x"], ["y"], lambda ctx, x, by=2: {"y": x * by})], x=3, by=100)["y"] == 6

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
        mix = Unit(
            name="mix", input_params=("e",), **sides, process=lambda ctx, e, good, bad: seen.append((e, good, bad))
        )
        Executor([mix], {}).run(State(shared={"e": 1}, posi={"e": 2}, nega={"e": 3}), DRAWS)
        assert seen == [(1, 2, 3)]


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
