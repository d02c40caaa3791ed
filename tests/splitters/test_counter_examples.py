"""Unit lists on which the published conditions are not enough, and the right answer for each, run for real."""

from __future__ import annotations

import pytest
from executable import Weights, data, executable, run_split, run_unsplit, same_bits
from hypothesis import given, settings
from published import published_split
from toys import Toy, bounded, equal_without_replay, patterns, toy_lists, units, wanted_sets

from flowrun.config import ConfigError
from flowrun.graph import Draws, UnitGraph
from flowrun.splitters import split
from flowrun.splitters.closure import Closure

# id -> units [reads, writes, uses the trained model, may write]; live by closure, ordered, replay; does closure's split
# equal the unsplit run when the cached units simply run first
CASES = {
    "H1": ((("x", "y", 1), ("z", "x", 0)), [0], [0, 1], [0], False),
    "H2": ((("p", "q", 1), ("pq", "p", 0), ("r", "p", 0)), [0, 1], [0, 1, 2], [0, 1], False),
    "H2c": ((("p", "p", 1), ("r", "p", 0)), [0, 1], [0, 1], [0], True),
    "H3": ((("s", "p", 1), ("t", "p", 0)), [0], [0, 1], [0], False),
    "H4": ((("s", "p", 1), ("t", "p", 0, 1), ("p", "q", 0)), [0], [0, 1, 2], [0, 2], False),
    "M1": ((("p", "s", 0), ("p", "p", 1), ("r", "p", 0)), [1, 2], [1, 2], [1], True),
    "M2": ((("k", "s", 1), ("sp", "t", 0), ("p", "p", 1), ("r", "p", 0)), [0, 1, 2], [0, 1, 2, 3], [0, 1, 2], False),
    "M3": ((("q", "qr", 1), ("", "qs", 0), ("sp", "t", 0), ("rp", "p", 0), ("", "p", 0)),
           [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 3], True),
}  # fmt: skip


def toys(name: str) -> list[Toy]:
    listed = CASES[name][0]
    return [Toy(shared=tuple(r), writes=tuple(w), trained=bool(m), may=bool(may)) for r, w, m, *may in listed]


@pytest.mark.parametrize("name", CASES)
def test_live_units(name):
    _, closure, ordered, replay, _ = CASES[name]
    graph = units(toys(name))
    live = {s: list(split(s, graph, {"m"}, on_hazard="report").live) for s in ("closure", "ordered", "replay", "none")}
    assert live == {"closure": closure, "ordered": ordered, "replay": replay, "none": list(range(len(graph)))}


@pytest.mark.parametrize("name", CASES)
def test_closure_is_refused_where_running_the_cached_units_first_gives_other_results(name):
    *_, equal = CASES[name]
    parts = split("closure", units(toys(name)), {"m"}, on_hazard="report")
    assert equal_without_replay(toys(name), parts.live) == equal == (not parts.hazards)
    if not equal:
        with pytest.raises(ConfigError, match=r"task\.splitter=replay"):
            split("closure", units(toys(name)), {"m"})


@pytest.mark.parametrize("splitter", ["replay", "ordered", "none"])
@pytest.mark.parametrize("name", CASES)
def test_split_run_equals_unsplit_run(name, splitter):
    for pattern in patterns(toys(name), 64):
        graph, state = executable(toys(name), pattern), data("pqrstxyzk")
        draws, models = Draws(0, "row", 3), {"m": Weights(5)}
        unsplit = run_unsplit(graph, state, draws, models)
        assert same_bits(unsplit, run_split(split(splitter, graph, {"m"}), state, draws, models))


def test_the_published_operator_is_not_monotone():
    graph = UnitGraph(units(toys("M1")))
    assert Closure().live(graph, {1}) == {1, 2}
    assert Closure().live(graph, {0, 1}) == {0, 1}


def test_a_smaller_closed_set_may_exist():
    graph = UnitGraph(units(toys("M3")))
    assert Closure().live(graph, {0}) == {0, 1, 2, 3, 4}
    assert Closure().live(graph, {0, 1, 2, 3}) == {0, 1, 2, 3}


def test_a_later_round_may_find_an_earlier_first_consumer():
    """Unit 1 becomes related in the second round, consumes q before unit 3 does and updates it, so unit 2 follows."""
    listed = (("r", "r", True), ("q", "qr", False), ("", "q", False), ("q", "z", True))
    graph = units([Toy(shared=tuple(r), writes=tuple(w), trained=trained) for r, w, trained in listed])
    assert published_split(graph, {0, 3}) == {0, 1, 2, 3}
    assert split("closure", graph, {"m"}, on_hazard="report").live == (0, 1, 2, 3)


@pytest.mark.parametrize("splitter", ["replay", "ordered"])
@settings(bounded, max_examples=40)
@given(listed=toy_lists(), wanted=wanted_sets())
def test_split_run_of_a_random_list_equals_unsplit_run(splitter, listed, wanted):
    for pattern in patterns(listed, 2):
        graph, draws, models = executable(listed, pattern), Draws(1, "row", 2), {"m": Weights(7)}
        parts = split(splitter, graph, {"m"}, live_out=wanted)
        unsplit = run_unsplit(graph, data(), draws, models)
        assert same_bits(unsplit, run_split(parts, data(), draws, models), wanted)
