"""The reason given for each unit names a unit that really reads or wrote the value in question."""

from __future__ import annotations

from flowrun.graph import Unit
from flowrun.splitters import split


def unit(name: str, reads: str, writes: str, *models: str) -> Unit:
    """Each letter is a name."""
    return Unit(name=name, input_params=tuple(reads), output_params=tuple(writes), onload_model_names=models)


def test_a_value_that_a_cached_unit_has_replaced_makes_no_unit_live():
    graph = [unit("encode", "x", "ef", "te"), unit("replace", "x", "e"), unit("mix", "ef", "g")]
    parts = split("replay", graph, {"te"})
    assert parts.live == (0, 2)
    assert parts.why[2] == "reads f of encode"


def test_a_unit_that_is_not_run_needs_nothing():
    graph = [unit("ids", "x", "i"), unit("unused", "i", "u"), unit("embed", "i", "e")]
    parts = split("replay", graph, set(), live_out=["e"])
    assert parts.why[0] == "frozen: needed by embed"


def test_who_reads_a_later_value_of_the_name_does_not_need_this_one():
    graph = [
        unit("first", "x", "pq"),
        unit("second", "x", "p"),
        unit("of second", "p", "y"),
        unit("of first", "q", "z"),
    ]
    parts = split("replay", graph, set(), live_out=["y", "z"])
    assert parts.why[0] == "frozen: needed by of first"
