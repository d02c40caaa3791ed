"""Unit lists of public pipelines, with the splits that a public implementation and brute force found for them.

Declarations there are what the public code made of them: None for nothing, and models as a text in which names are
looked for. `random` says only that the public unit draws numbers. Trained sets with an empty or a dotted name follow
exact comparison there and are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published import build_edges, forward_reachable
from toys import Symbols, Toy, cached_then_live, patterns, same, two_stages, units, walk

from flowrun.config import ConfigError
from flowrun.graph import Unit, UnitGraph
from flowrun.splitters import split

CASES = Path(__file__).parent.parent / "cases" / "unit_graphs.json"


def load() -> list[tuple[list[Unit], list[Toy], dict]]:
    found = []
    for graph in json.loads(CASES.read_text(encoding="utf-8")):
        for case in graph["splits"]:
            if all(name and "." not in name for name in case["trainable"]):
                listed, trained = graph["units"], case["trainable"]
                found.append(([to_unit(u, trained) for u in listed], [to_toy(u, trained) for u in listed], case))
    return found


def models(declared: dict, trained: list[str]) -> tuple[str, ...]:
    names = declared["onload_model_names"] or ()
    return tuple(name for name in trained if name in names) if isinstance(names, str) else tuple(names)


def to_unit(declared: dict, trained: list[str]) -> Unit:
    return Unit(
        name=declared["name"],
        input_params=tuple(declared["input_params"] or ()),
        input_params_posi=declared["input_params_posi"] or {},
        input_params_nega=declared["input_params_nega"] or {},
        output_params=tuple(declared["output_params"]),
        onload_model_names=models(declared, trained),
        separate_cfg=declared["separate_cfg"],
        take_over=declared["take_over"],
        may_write=declared["may_write"],
    )


def to_toy(declared: dict, trained: list[str]) -> Toy:
    return Toy(
        "take" if declared["take_over"] else "cfg" if declared["separate_cfg"] else "plain",
        tuple(declared["input_params"] or ()),
        tuple((declared["input_params_posi"] or {}).values()),
        tuple((declared["input_params_nega"] or {}).values()),
        tuple(declared["output_params"]),
        trained=any(name in models(declared, trained) for name in trained),
        may=declared["may_write"],
    )


@pytest.fixture(scope="module")
def cases() -> list[tuple[list[Unit], list[Toy], dict]]:
    return load()


def test_there_are_433_splits_of_17_lists(cases):
    assert len(cases) == 433
    assert len(json.loads(CASES.read_text(encoding="utf-8"))) == 17


@pytest.mark.parametrize("name", ["closure", "ordered", "replay"])
def test_live_units_are_the_expected_ones(cases, name):
    for graph, _, case in cases:
        parts = split(name, graph, case["trainable"], on_hazard="report")
        assert list(parts.live) == case[name]
        assert sorted(parts.live + parts.cached) == list(range(len(graph)))


def test_directly_related_units_and_those_that_updating_adds_are_the_expected_ones(cases):
    for graph, _, case in cases:
        direct = UnitGraph(graph).related(case["trainable"])
        assert sorted(direct) == case["direct"]
        reached = forward_reachable(build_edges(graph), set(direct))
        closure = split("closure", graph, case["trainable"], on_hazard="report").live
        assert sorted(set(closure) - reached) == case["added_by_c2"]


def test_hazards_are_the_expected_ones_and_are_refused(cases):
    refused = 0
    for graph, _, case in cases:
        hazards = split("closure", graph, case["trainable"], on_hazard="report").hazards
        assert sorted(map(str, hazards)) == sorted(case["hazards"])
        assert bool(hazards) != case["closure_is_sound"]
        if hazards:
            refused += 1
            with pytest.raises(ConfigError) as error:
                split("closure", graph, case["trainable"])
            first, second = graph[hazards[0].first].name, graph[hazards[0].second].name
            parts = (first, second, hazards[0].kind, ".".join(hazards[0].param), "task.splitter=replay")
            assert all(part in str(error.value) for part in parts)
    assert refused == 106


def test_closure_is_refused_exactly_where_plain_execution_gives_other_results(cases):
    for _, toys, case in cases:
        chosen = some_patterns(toys)
        equal = all(equal_in_order(toys, pattern, case["closure"]) for pattern in chosen)
        assert equal == case["closure_is_sound"] == (not case["hazards"])


def test_replay_gives_the_results_of_the_unsplit_run(cases):
    for graph, toys, case in cases[::5]:
        parts = split("replay", graph, case["trainable"])
        for pattern in some_patterns(toys)[:4]:
            symbols = Symbols()
            unsplit = walk(symbols, toys, pattern, 1).state
            assert same(unsplit, two_stages(symbols, toys, pattern, parts.live, parts.needed, parts.kept), unsplit)


def some_patterns(toys: list[Toy]) -> list:
    """Everything written, as little as possible, and mixtures."""
    places = {(i, param): toy.options(param) for i, toy in enumerate(toys) for param in toy.writes_at}
    most = {place: options[0] for place, options in places.items()}
    least = {place: options[min(1, len(options) - 1)] for place, options in places.items()}
    return [most, least, *patterns(toys, 12)]


def equal_in_order(toys: list[Toy], pattern: dict, live: list[int]) -> bool:
    symbols = Symbols()
    unsplit = walk(symbols, toys, pattern, 1).state
    return same(unsplit, cached_then_live(symbols, toys, pattern, live), unsplit)


def test_units_of_the_toys_declare_what_the_list_does(cases):
    for graph, toys, _ in cases[::40]:
        for one, other in zip(graph, units(toys), strict=True):
            assert (one.reads, one.writes, one.certain_writes) == (other.reads, other.writes, other.certain_writes)
