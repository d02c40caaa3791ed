"""Splits of random unit lists, checked by walking over them symbolically, with brute force over what is written."""

from __future__ import annotations

import pytest
from hypothesis import Phase, assume, find, given, settings
from published import published_split
from toys import (
    Symbols,
    Toy,
    all_patterns,
    bounded,
    equal_under_all,
    equal_without_replay,
    same,
    starts,
    toy_lists,
    two_stages,
    units,
    walk,
    wanted_sets,
)  # fmt: skip

from flowrun.config import ConfigError
from flowrun.graph import UnitGraph
from flowrun.splitters import split

# Controls: the same number of examples has to be enough; no shrinking of what was found.
first_found = settings(bounded, phases=[Phase.generate])


def splits_equally(name: str, toys: list[Toy], wanted) -> bool:
    parts = split(name, units(toys), {"m"}, live_out=wanted)
    return equal_under_all(toys, parts.live, parts.needed, parts.kept, wanted)


@pytest.mark.parametrize("name", ["replay", "ordered", "none"])
@bounded
@given(toys=toy_lists(), wanted=wanted_sets())
def test_split_execution_equals_unsplit_execution(name, toys, wanted):
    assert splits_equally(name, toys, wanted)


@bounded
@given(toys=toy_lists())
def test_ordered_needs_no_replay(toys):
    assert equal_without_replay(toys, split("ordered", units(toys), {"m"}).live)


@bounded
@given(toys=toy_lists())
def test_live_units_are_exactly_those_that_some_run_makes_depend_on_a_start(toys):
    every = all_patterns([t for t in toys if t.kind != "barrier"], 128)
    assume(every is not None)
    toys = [t for t in toys if t.kind != "barrier"]
    live = smallest_live(toys, every)
    assert set(split("replay", units(toys), {"m"}).live) == live


def smallest_live(toys, every) -> set[int]:
    """Brute force: what reads, in some run, a value that a live unit has written (or removed)."""
    edges = {(writer, reader) for pattern in every for writer, reader, _ in walk(Symbols(), toys, pattern, 1).edges}
    live = starts(toys)
    for reader in range(len(toys)):
        if any((writer, reader) in edges for writer in live):
            live.add(reader)
    return live


@bounded
@given(toys=toy_lists(barriers=False))
def test_no_unit_can_be_left_out_of_replay(toys):
    every = all_patterns(toys, 128)
    assume(every is not None)
    graph, live = units(toys), set(split("replay", units(toys), {"m"}).live)
    for i in live - starts(toys):
        smaller = live - {i}
        kept = {j: graph[j].writes for j in range(len(toys)) if j not in smaller}
        assert any(breaks(toys, pattern, i, smaller, kept) for pattern in every)


def breaks(toys, pattern, i, live, kept) -> bool:
    """Whether caching unit `i` is wrong: it reads what a live unit writes, or the results differ."""
    symbols = Symbols()
    unsplit = walk(symbols, toys, pattern, 1)
    if any(reader == i and writer in live for writer, reader, _ in unsplit.edges):
        return True
    return not same(unsplit.state, two_stages(symbols, toys, pattern, live, kept, kept), None)


@bounded
@given(toys=toy_lists(barriers=False), wanted=wanted_sets())
def test_stored_and_run_is_exactly_what_some_run_reads_later(toys, wanted):
    every = all_patterns(toys, 128)
    assume(every is not None)
    parts = split("replay", units(toys), {"m"}, live_out=wanted)
    edges = {edge for pattern in every for edge in walk(Symbols(), toys, pattern, 1).edges}
    end = len(toys)
    later = {(w, p) for w, r, p in edges if r in parts.live or (r == end and (wanted is None or p in wanted))}
    kept = {(w, p) for w, p in later if w in parts.cached}
    assert {(i, p) for i, params in parts.kept.items() for p in params} == kept
    needed = {w for w, _ in kept}
    for i in reversed(range(end)):
        if any(w == i and r in needed for w, r, _ in edges):
            needed.add(i)
    assert set(parts.needed) == needed


@bounded
@given(toys=toy_lists())
def test_declared_dependences_are_those_that_can_happen(toys):
    toys = [t for t in toys if t.kind != "barrier"]
    every = all_patterns(toys, 128)
    assume(every is not None)
    happened = {edge for pattern in every for edge in walk(Symbols(), toys, pattern, 1).edges if edge[1] < len(toys)}
    assert set(UnitGraph(units(toys)).edges) == happened


@bounded
@given(toys=toy_lists())
def test_closure_follows_the_published_pseudo_code(toys):
    graph = units(toys)
    assert set(split("closure", graph, {"m"}, on_hazard="report").live) == published_split(graph, starts(toys))


@settings(bounded, max_examples=200)
@given(toys=toy_lists())
def test_closure_accepts_no_unsound_split(toys):
    parts = split("closure", units(toys), {"m"}, on_hazard="report")
    if parts.hazards:
        with pytest.raises(ConfigError, match="task.splitter=replay"):
            split("closure", units(toys), {"m"})
    else:
        assert split("closure", units(toys), {"m"}) == parts
        assert equal_without_replay(toys, parts.live)


@bounded
@given(toys=toy_lists())
def test_replay_is_smallest_and_hazards_are_what_ordered_avoids(toys):
    graph = units(toys)
    live = {name: set(split(name, graph, {"m"}).live) for name in ("replay", "ordered", "none")}
    assert starts(toys) <= live["replay"] <= live["ordered"] <= live["none"] == set(range(len(toys)))
    for one, other in brute_conflicts(toys):
        assert not (one in live["ordered"] and other not in live["ordered"])


def brute_conflicts(toys) -> set[tuple[int, int]]:
    found = set()
    for j, later in enumerate(toys):
        for i, earlier in enumerate(toys[:j]):
            reads, writes = set(earlier.reads_at), set(earlier.writes_at)
            if writes & {*later.reads_at, *later.writes_at} or reads & set(later.writes_at):
                found.add((i, j))
    return found


@bounded
@given(toys=toy_lists())
def test_conflicts_are_all_pairs_that_must_not_change_places(toys):
    assert {(c.first, c.second) for c in UnitGraph(units(toys)).conflicts} == brute_conflicts(toys)


@pytest.mark.parametrize("mutant", ["LatestWriterOnly", "NoMayWrites"])
def test_the_check_of_equality_finds_a_wrong_splitter(mutant):
    find(toy_lists(), lambda toys: not splits_equally(f"mutants:{mutant}", toys, None), settings=first_found)


def test_the_check_of_equality_finds_that_true_dependences_need_replay():
    find(toy_lists(), lambda toys: not equal_without_replay(toys, split("replay", units(toys), {"m"}).live),
         settings=first_found)


def test_the_check_of_equality_finds_a_value_that_was_not_stored():
    def wrong(toys):
        parts = split("replay", units(toys), {"m"})
        less = {i: params[1:] for i, params in parts.kept.items()}
        return not equal_under_all(toys, parts.live, parts.needed, less, None)

    find(toy_lists(), wrong, settings=first_found)


def test_the_check_of_equality_finds_a_unit_that_was_not_run():
    def wrong(toys):
        parts = split("replay", units(toys), {"m"})
        return not equal_under_all(toys, parts.live, set(parts.kept) - {min(parts.kept, default=0)}, parts.kept, None)

    find(toy_lists(), wrong, settings=first_found)


def test_the_check_of_size_finds_a_splitter_that_runs_too_much():
    def larger(toys):
        every = all_patterns(toys, 64)
        live = set(split("mutants:TooMuch", units(toys), {"m"}).live)
        return every is not None and live != smallest_live(toys, every)

    find(toy_lists(barriers=False), larger, settings=first_found)
