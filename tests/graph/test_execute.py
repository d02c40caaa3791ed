"""Live units run, the others' records are re-applied, in the pipeline's order; gradients and global generators."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy
import pytest
import torch
from declared import DRAWS, unit

from flowrun.graph import Draws, Executor, Record, State, UndeclaredEffect

X, Y = ("shared", "x"), ("shared", "y")


def add(name: str, reads: str, writes: str, amount: int = 1, calls: list | None = None):
    def process(ctx, **inputs):
        (calls if calls is not None else []).append(name)
        return {writes: inputs[reads] + amount}

    return unit(name, [reads], [writes], process)


class TestOrder:
    def test_live_units_run_and_records_are_applied_at_their_place(self):
        calls = []
        units = [add("a", "x", "p", 1, calls), add("b", "x", "p", 100, calls), add("c", "p", "q", 10, calls)]
        before = {1: Record({("shared", "p"): 7})}
        state = Executor(units, {}).run(State(shared={"x": 0}), DRAWS, live=(0, 2), records=before)
        assert calls == ["a", "c"]
        assert state.shared == {"x": 0, "p": 7, "q": 17}
        after = {0: Record({("shared", "p"): 7})}
        state = Executor(units, {}).run(State(shared={"x": 0}), DRAWS, live=(1, 2), records=after)
        assert state.shared == {"x": 0, "p": 100, "q": 110}

    def test_a_unit_neither_live_nor_recorded_is_passed_over(self):
        state = Executor([add("a", "x", "y"), add("b", "x", "z")], {}).run(State(shared={"x": 0}), DRAWS, live=(1,))
        assert state.shared == {"x": 0, "z": 1}

    def test_a_live_unit_runs_although_there_is_a_record_of_it(self):
        executor = Executor([add("a", "x", "y")], {})
        state = executor.run(State(shared={"x": 0}), DRAWS, live=(0,), records={0: Record({Y: 99})})
        assert state.shared["y"] == 1

    def test_a_record_is_what_was_returned_even_if_it_was_there_already(self):
        same = unit("same", ["x"], ["x", "y"], lambda ctx, x: {"x": x}, may_write=True)
        made = Executor([same], {}).run_recorded((State(shared={"x": 5, "y": 6}), DRAWS, {}), (0,))
        assert made == {0: Record({X: 5})}

    def test_recording_and_batches_leave_the_given_states_alone(self):
        state, executor = State(shared={"x": 0}), Executor([add("a", "x", "x")], {})
        executor.run_recorded((state, DRAWS, {}), (0,))
        assert [done.shared for done in executor.run_batch([(state, DRAWS, {})] * 2)] == [{"x": 1}, {"x": 1}]
        assert executor.run_batch([(state, DRAWS, {0: Record({X: 9})})], live=())[0].shared == {"x": 9}
        assert state.shared == {"x": 0}

    def test_units_that_can_do_several_rows_at_once_do_and_the_others_run_row_by_row(self):
        calls = []

        def rows(ctx, rows):
            calls.append(len(rows))
            return [{"p": row["x"] * 10} for row in rows]

        double = unit("d", ["x"], ["p"], lambda ctx, x: {"p": x * 10}, process_rows=rows)
        executor = Executor([double, add("a", "p", "q"), add("b", "q", "r")], {})
        jobs = [(State(shared={"x": n}), DRAWS, {1: Record({("shared", "q"): -n})}) for n in (1, 2, 3)]
        made = executor.run_rows(jobs, (0, 2))
        assert calls == [3]
        assert made == [executor.run_recorded(job, (0, 2)) for job in jobs]
        assert made[2] == {0: Record({("shared", "p"): 30}), 2: Record({("shared", "r"): -2})}
        assert [state.shared for state, _, _ in jobs] == [{"x": 1}, {"x": 2}, {"x": 3}]

    @pytest.mark.parametrize(("rows", "message"), [
        (lambda ctx, rows: [{"p": 1}], "returns 1 results for 2 rows"),
        (lambda ctx, rows: [{"z": 1}] * 2, "z"),
        (lambda ctx, rows: [{"p": row["x"].add_(1)} for row in rows], "changes an input in place"),
        (lambda ctx, rows: [{"p": torch.rand(1)} for _ in rows], "global random generator"),
    ])  # fmt: skip
    def test_several_rows_at_once_are_guarded_like_one(self, rows, message):
        process = lambda ctx, x: {"p": torch.rand(1)} if "generator" in message else {"p": x}  # noqa: E731
        one = unit("u", ["x"], ["p"], process, process_rows=rows)
        jobs = [(State(shared={"x": torch.zeros(2)}), DRAWS, {}) for _ in range(2)]
        with pytest.raises(UndeclaredEffect, match=message):
            Executor([one], {}).run_rows(jobs, (0,))

    def test_each_row_has_its_own_records_and_draws(self):
        noise = unit("n", [], ["n"], lambda ctx: {"n": torch.rand(1, generator=ctx.generator)}, random="per_epoch")
        executor = Executor([add("a", "x", "y"), noise], {})
        jobs = [(State(shared={"x": k}), Draws(0, f"r{k}", 0), {0: Record({Y: 10 * k})}) for k in range(3)]
        done = executor.run_batch(jobs, live=(1,))
        assert [state.shared["y"] for state in done] == [0, 10, 20]
        assert len({state.shared["n"].item() for state in done}) == 3


class TestGradients:
    """Through units that depend on a trained model, directly or by what they read, and through no other."""

    UNITS = [
        unit("frozen", ["x"], ["f"], lambda ctx, x: {"f": ctx.models["vae"](x)}, models=["vae"]),
        unit("trained", ["f"], ["e"], lambda ctx, f: {"e": ctx.models["te"](f)}, models=["te"]),
        unit("after", ["e"], ["g"], lambda ctx, e: {"g": {"deep": [e * 2]}}),
        unit("beside", ["f"], ["h"], lambda ctx, f: {"h": ctx.models["vae"](f)}, models=["vae"]),
    ]

    def models(self) -> dict:
        return {name: torch.nn.Linear(3, 3) for name in ("vae", "te")}

    @pytest.mark.parametrize("outside", [True, False])
    def test_unsplit_and_split_alike(self, outside):
        models = self.models()
        executor = Executor(self.UNITS, models, trained=["te"])
        assert executor.gradient_units == {1, 2}
        with torch.set_grad_enabled(outside):
            made = executor.run_recorded((State(shared={"x": torch.ones(3)}), DRAWS, {}), (0, 3))
            for live, records in ((None, {}), ((1, 2), made)):
                shared = executor.run_batch([(State(shared={"x": torch.ones(3)}), DRAWS, records)], live)[0].shared
                found = {name: shared[name].requires_grad for name in "feh"}
                assert found == {"f": False, "e": True, "h": False}
                for model in models.values():
                    model.zero_grad()
                with torch.enable_grad():
                    shared["g"]["deep"][0].sum().backward()
                assert models["te"].weight.grad.abs().sum() > 0
                assert models["vae"].weight.grad is None
            assert torch.is_grad_enabled() is outside

    @pytest.mark.parametrize("outside", [True, False])
    def test_autograd_records_inside_these_units_only(self, outside):
        seen = []

        def look(name):
            return unit(name, [], [], lambda ctx: seen.append((name, torch.is_grad_enabled())), models=[name])

        with torch.set_grad_enabled(outside):
            Executor([look("a"), look("b")], {}, trained=["b"]).run(State(), DRAWS)
        assert seen == [("a", False), ("b", True)]

    def test_a_returned_weight_of_a_frozen_model_is_detached_and_of_a_trained_one_is_not(self):
        weight = unit("w", [], ["w"], lambda ctx: {"w": ctx.models["m"].weight}, models=["m"])
        model = torch.nn.Linear(2, 2)
        value = Executor([weight], {"m": model}).run(State(), DRAWS).shared["w"]
        assert (type(value), value.requires_grad) == (torch.Tensor, False)
        value = Executor([weight], {"m": model}, trained=["m"]).run(State(), DRAWS).shared["w"]
        value.sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(2, 2))

    def test_canonical_form_keeps_the_gradient(self):
        view = unit("v", ["x"], ["v"], lambda ctx, x: {"v": ctx.models["m"](x).t()[1:]}, models=["m"])
        model = torch.nn.Linear(3, 3)
        state = State(shared={"x": torch.ones(2, 3)})
        value = Executor([view], {"m": model}, trained=["m"]).run(state, DRAWS).shared["v"]
        assert value.is_contiguous()
        value.sum().backward()
        assert model.bias.grad.tolist() == [0, 2, 2]

    def test_autocast_is_entered_around_these_units_only(self):
        inside, seen = [], []

        @contextmanager
        def autocast():
            inside.append(True)
            yield
            inside.pop()

        def look(name):
            return unit(name, [], [], lambda ctx: seen.append((name, bool(inside))), models=[name])

        units = [look("a"), look("b")]
        Executor(units, {}, trained=["b"], autocast=autocast).run(State(), DRAWS)
        assert seen == [("a", False), ("b", True)]


GLOBAL_DRAWS = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "numpy normal": numpy.random.randn,
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(3),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(4), 0.5, training=True),
    "seeding torch": lambda: torch.manual_seed(12345),
    "seeding numpy": lambda: numpy.random.seed(12345),
}


class TestGlobalGenerators:
    @pytest.fixture(autouse=True)
    def restored(self):
        kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        yield
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        torch.set_rng_state(kept[2])

    @pytest.mark.parametrize("how", GLOBAL_DRAWS)
    @pytest.mark.parametrize("odd", [False, True], ids=["", "second of a pair"])
    @pytest.mark.parametrize("recording", [False, True], ids=["batch", "recording"])
    def test_the_unit_that_draws_is_named(self, how, odd, recording):
        if odd:  # normal numbers come in pairs, the second one from memory
            random.gauss(0, 1), numpy.random.randn(), torch.randn(1)
        units = [
            add("innocent", "x", "y"),
            unit("culprit", ["y"], ["z"], lambda ctx, y: {"z": (GLOBAL_DRAWS[how](), y)[1]}),
            add("last", "z", "w"),
        ]
        jobs = [(State(shared={"x": k}), Draws(0, str(k), 0), {}) for k in range(2)]
        said = "unit culprit draws from a global random generator; draw from ctx.generator and declare `random`"
        executor = Executor(units, {})
        with pytest.raises(UndeclaredEffect) as caught:
            executor.run_recorded(jobs[0], (0, 1, 2)) if recording else executor.run_batch(jobs)
        assert str(caught.value) == said
        assert [state.shared for state, _, _ in jobs] == [{"x": 0}, {"x": 1}]

    def test_records_are_replayed_while_the_culprit_is_looked_for(self):
        seen = []

        def process(ctx, y):
            seen.append(y)
            return {"z": random.random()}

        units = [add("cached", "x", "y"), unit("culprit", ["y"], ["z"], process)]
        with pytest.raises(UndeclaredEffect, match="unit culprit"):
            Executor(units, {}).run_batch([(State(shared={"x": 0}), DRAWS, {0: Record({Y: 41})})], live=(1,))
        assert seen == [41, 41]

    def test_keyed_draws_leave_the_global_generators_alone(self):
        noise = unit("n", [], ["n"], lambda ctx: {"n": torch.randn(9, generator=ctx.generator)}, random="per_epoch")
        before = torch.get_rng_state()
        Executor([noise], {}).run_batch([(State(), DRAWS, {})])
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_gpu_first_used_by_a_unit_accuses_nobody(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)])

        def process(ctx):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

        Executor([unit("first", [], [], process)], {}).run_batch([(State(), DRAWS, {})])

    def test_a_draw_that_does_not_come_again_is_an_error_too(self):
        pending = [random.random]
        once = unit("once", [], [], lambda ctx: pending.pop()() and None if pending else None)
        with pytest.raises(RuntimeError, match="not when each ran again alone"):
            Executor([once], {}).run_batch([(State(), DRAWS, {})])


def test_the_trained_models_are_given_as_a_collection():
    with pytest.raises(TypeError, match="trained is the text 'dit'"):
        Executor([], {}, trained="dit")
