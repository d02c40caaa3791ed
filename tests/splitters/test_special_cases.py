"""Cases that have gone wrong in split training elsewhere, each run split and unsplit."""

from __future__ import annotations

import pytest
import torch
from executable import cut, run_split, run_unsplit, same_bits

from flowrun.graph import Draws, Executor, State, UndeclaredEffect, Unit
from flowrun.splitters import split

DRAWS = Draws(0, "row", 1)


class Scale(torch.nn.Module):
    """A model with one weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def equal(graph: list[Unit], state: State, splitter: str = "replay", models: dict | None = None) -> bool:
    models = {"m": Scale(3.0)} if models is None else models
    parts = split(splitter, graph, models)
    return same_bits(run_unsplit(graph, state, DRAWS, models), run_split(parts, state, DRAWS, models))


def trained(reads: str, writes: str) -> Unit:
    """Multiplies one input by the trained weight."""
    return Unit(name=f"train {writes}", input_params=(reads,), output_params=(writes,), onload_model_names=("m",),
                process=lambda ctx, **inputs: {writes: ctx.models["m"](inputs[reads])})  # fmt: skip


def plain(reads: str, writes: str, process=None) -> Unit:
    return Unit(name=f"make {writes}", input_params=(reads,), output_params=(writes,),
                process=process or (lambda ctx, **inputs: {writes: inputs[reads] + 1}))  # fmt: skip


def per_side(reads: str, writes: str, models: tuple[str, ...] = ()) -> Unit:
    sides = {"t": reads}
    return Unit(name=f"side {writes}", separate_cfg=True, input_params_posi=sides, input_params_nega=sides,
                output_params=(writes,), onload_model_names=models, process=lambda ctx, t: {writes: t + 1})  # fmt: skip


def test_a_cfg_unit_that_writes_a_shared_name_to_the_sides_does_not_hide_it():
    hiding = per_side("t", "x")
    graph = [trained("a", "x"), hiding, plain("x", "y")]
    state = State({"a": torch.ones(2)}, {"t": torch.zeros(2)}, {"t": torch.full((2,), 5.0)})
    assert split("replay", graph, {"m"}).live == (0, 2)
    assert split("ordered", graph, {"m"}).live == (0, 2)
    assert equal(graph, state)
    closure = split("closure", graph, {"m"}, on_hazard="report")
    assert closure.live == (0,)  # flattened names hide it; the conflict is found
    assert [str(hazard) for hazard in closure.hazards] == ["RAW shared.x 0->2"]


@pytest.mark.parametrize("before", [True, False], ids=["cached", "live"])
def test_a_take_over_unit_that_clears_a_scope(before):
    clear = Unit(name="clear", take_over=True, input_params=("e",), output_params=("e",),
                 process=lambda ctx, shared, posi, nega: (shared, posi, {}))  # fmt: skip
    graph = [per_side("t", "e", () if before else ("m",)), clear, trained("a", "y")]
    state = State({"a": torch.ones(2)}, {"t": torch.zeros(2)}, {"t": torch.ones(2)})
    unsplit = run_unsplit(graph, state, DRAWS, {"m": Scale(2.0)})
    assert "e" in unsplit.posi
    assert "e" not in unsplit.nega
    assert (1 in split("replay", graph, {"m"}).cached) == before
    assert equal(graph, state)


def test_a_removed_name_is_removed_from_the_data_too():
    clear = Unit(name="clear", take_over=True, input_params=("a",), output_params=("a",),
                 process=lambda ctx, shared, posi, nega: ({}, posi, nega))  # fmt: skip
    late = Unit(name="late", input_params=("a",), output_params=("y",), onload_model_names=("m",),
                process=lambda ctx, a=None: {"y": ctx.models["m"](torch.ones(2) if a is None else a)})  # fmt: skip
    parts = split("replay", [clear, late], {"m"}, live_out=["y"])
    assert parts.kept == {0: (("shared", "a"),)}
    assert equal([clear, late], State({"a": torch.zeros(2)}))


@pytest.mark.parametrize("splitter", ["replay", "none"])
def test_changing_an_input_in_place_is_refused(splitter):
    graph = [trained("a", "y"), plain("a", "b", lambda ctx, a: {"b": a.add_(1)})]
    with pytest.raises(UndeclaredEffect, match=r"unit make b changes its input shared\.a in place"):
        equal(graph, State({"a": torch.zeros(2)}), splitter)


def test_two_names_for_one_tensor_go_their_own_ways():
    graph = [
        plain("a", "b", lambda ctx, a: {"b": a}),  # the same tensor under a second name
        plain("b", "b", lambda ctx, b: {"b": b + 1}),
        trained("a", "y"),
    ]
    state = State({"a": torch.zeros(2)})
    unsplit = run_unsplit(graph, state, DRAWS, {"m": Scale(2.0)})
    assert unsplit.shared["a"].tolist() == [0, 0]
    assert unsplit.shared["b"].tolist() == [1, 1]
    assert equal(graph, state)


def test_fp32_positions_stay_fp32_when_live_units_compute_in_bf16():
    positions = plain("a", "ids", lambda ctx, a: {"ids": torch.arange(4.0) / 3 + a.float()})
    used = Unit(name="use", input_params=("ids",), output_params=("y",), onload_model_names=("m",),
                process=lambda ctx, ids: {"y": ids[None] @ ctx.models["m"].weight})  # fmt: skip
    models = {"m": torch.nn.Linear(4, 4, bias=False)}
    parts = split("replay", [positions, used], {"m"})
    state = State({"a": torch.zeros((), dtype=torch.bfloat16)})

    def under_bf16(live, records):
        executor = Executor(parts.units, models, trained={"m"}, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        return executor.run_batch([(state, DRAWS, records)], live=live)[0]

    stored = Executor(parts.units, {}, trained={"m"}).run_recorded((state, DRAWS, {}), parts.needed)
    unsplit, two_stage = under_bf16(None, {}), under_bf16(parts.live, stored)
    assert same_bits(unsplit, two_stage)
    assert unsplit.shared["ids"].dtype == torch.float32
    assert unsplit.shared["y"].dtype == torch.bfloat16


def noise_unit(kind: str) -> Unit:
    return Unit(name="noise", input_params=("a",), output_params=("noise",), random=kind,
                process=lambda ctx, a: {"noise": torch.randn(a.shape, generator=ctx.generator)})  # fmt: skip


def noise(kind: str, **key) -> torch.Tensor:
    draws = Draws(**{"seed": 0, "row_id": "r", "epoch": 0, **key})
    return run_unsplit([noise_unit(kind)], State({"a": torch.zeros(64)}), draws, {}).shared["noise"]


def test_noise_of_each_epoch_is_live_fresh_and_repeatable():
    parts = split("replay", [noise_unit("per_epoch"), plain("noise", "x")], set())
    assert parts.live == (0, 1)
    assert torch.equal(noise("per_epoch"), noise("per_epoch"))
    assert not torch.equal(noise("per_epoch"), noise("per_epoch", epoch=1))
    assert not torch.equal(noise("per_epoch"), noise("per_epoch", seed=1))
    assert not torch.equal(noise("per_epoch"), noise("per_epoch", row_id="s"))
    assert equal([noise_unit("per_epoch"), plain("noise", "x")], State({"a": torch.zeros(8)}))


def test_frozen_noise_is_cached_and_the_same_in_every_epoch():
    assert split("replay", [noise_unit("frozen"), plain("noise", "x")], set()).cached == (0, 1)
    assert torch.equal(noise("frozen"), noise("frozen", epoch=7))
    assert not torch.equal(noise("frozen"), noise("frozen", row_id="s"))
    assert equal([noise_unit("frozen"), trained("noise", "x")], State({"a": torch.zeros(8)}))


def test_a_frozen_draw_in_place_of_a_fresh_one_shows():
    fresh, frozen = ([noise_unit(kind), trained("noise", "x")] for kind in ("per_epoch", "frozen"))
    state, models = State({"a": torch.zeros(8)}), {"m": Scale(2.0)}
    assert not same_bits(run_unsplit(fresh, state, DRAWS, models), run_unsplit(frozen, state, DRAWS, models))


@pytest.mark.parametrize("splitter", ["replay", "ordered"])
def test_a_name_of_the_data_that_is_overwritten_later(splitter):
    graph = [trained("image", "before"), plain("image", "image"), trained("image", "after")]
    state, models = State({"image": torch.ones(2)}), {"m": Scale(2.0)}
    unsplit = run_unsplit(graph, state, DRAWS, models)
    assert [unsplit.shared[name][0].item() for name in ("before", "image", "after")] == [2, 2, 4]
    assert split("replay", graph, {"m"}).live == (0, 2)
    assert split("ordered", graph, {"m"}).live == (0, 1, 2)
    assert equal(graph, state, splitter)


def test_a_model_under_another_name_than_its_declared_one_is_refused():
    used = Unit(name="encode", input_params=("a",), output_params=("e",), onload_model_names=("text_encoder",),
                process=lambda ctx, a: {"e": ctx.models["text_encoder_2"](a)})  # fmt: skip
    models = {"text_encoder": Scale(1.0), "text_encoder_2": Scale(1.0)}
    with pytest.raises(UndeclaredEffect, match="unit encode calls the model 'text_encoder_2'; add it to onload_model"):
        run_unsplit([used], State({"a": torch.ones(2)}), DRAWS, models)


def test_a_record_without_what_was_not_kept_is_enough():
    both = Unit(name="both", input_params=("a",), output_params=("big", "small"),
                process=lambda ctx, a: {"big": a.expand(1000, 2), "small": a})  # fmt: skip
    parts = split("replay", [both, trained("small", "y")], {"m"}, live_out=["y"])
    assert parts.kept == {0: (("shared", "small"),)}
    record = Executor([both], {}).run_recorded((State({"a": torch.ones(2)}), DRAWS, {}), (0,))[0]
    assert set(cut(record, parts.kept[0]).values) == {("shared", "small")}
