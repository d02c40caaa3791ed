"""Small random unit lists, and a symbolic executor for them that shares no code with the product.

A toy says what a unit declares; `unit` turns it into the product's form. What a toy computes is a symbol: the unit, the
output and the symbols of its inputs. A pattern fixes, for everything that may be written, whether it is.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from flowrun.graph import Unit

SCOPES = ("shared", "posi", "nega")
NAMES = "abcde"
UNIVERSE = [(scope, name) for scope in SCOPES for name in NAMES]
RETURNS, KEEPS, DELETES = "returns", "keeps", "deletes"

bounded = settings(
    derandomize=True, database=None, deadline=None, max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip

Param = tuple[str, str]
Pattern = Mapping[tuple[int, Param], str]


@dataclass(frozen=True)
class Toy:
    """kind: plain | cfg (runs per side, posi and nega equally long) | take (declared take-over) | barrier."""

    kind: str = "plain"
    shared: tuple[str, ...] = ()
    posi: tuple[str, ...] = ()
    nega: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    trained: bool = False
    may: bool = False
    random: str = "none"

    @property
    def starts(self) -> bool:
        return self.trained or self.random == "per_epoch"

    @cached_property
    def reads_at(self) -> list[Param]:
        if self.kind == "barrier":
            return UNIVERSE
        if self.kind == "take":
            return [(scope, name) for scope in SCOPES for name in sorted({*self.shared, *self.posi, *self.nega})]
        sides = {"shared": self.shared, "posi": self.posi, "nega": self.nega}
        return [(scope, name) for scope, names in sides.items() for name in names]

    @cached_property
    def writes_at(self) -> list[Param]:
        if self.kind == "barrier":
            return UNIVERSE
        scopes = {"plain": ("shared",), "cfg": ("posi", "nega"), "take": SCOPES}[self.kind]
        return [(scope, name) for scope in scopes for name in self.writes]

    def options(self, param: Param) -> list[str]:
        """What can happen to an output."""
        if self.kind in ("take", "barrier"):
            return [RETURNS, KEEPS, *([DELETES] if param in self.reads_at else [])]
        return [RETURNS, KEEPS] if self.may else [RETURNS]


def unit(i: int, toy: Toy, process: Any = None) -> Unit:
    """The toy as the product declares it. Argument names say where a value comes from; both sides of cfg share them."""
    posi, nega = ("side", "side") if toy.kind == "cfg" else ("posi", "nega")
    return Unit(
        name=f"u{i}",
        input_params=toy.shared,
        input_params_posi={f"{posi}{k}": name for k, name in enumerate(toy.posi)},
        input_params_nega={f"{nega}{k}": name for k, name in enumerate(toy.nega)},
        output_params=toy.writes,
        onload_model_names=("m",) if toy.trained else (),
        separate_cfg=toy.kind == "cfg",
        take_over=toy.kind in ("take", "barrier"),
        may_write=toy.may,
        random=toy.random,
        process=process,
    )


def units(toys: Sequence[Toy]) -> list[Unit]:
    return [unit(i, toy) for i, toy in enumerate(toys)]


def patterns(toys: Sequence[Toy], limit: int) -> list[Pattern]:
    """All patterns when there are at most `limit`, else as many, chosen by a fixed seed."""
    places = {(i, p): toy.options(p) for i, toy in enumerate(toys) for p in toy.writes_at}
    count = 1
    for options in places.values():
        count *= len(options)
    if count <= limit:
        return [dict(zip(places, choice, strict=True)) for choice in product(*places.values())]
    chance = random.Random(0)
    return [{place: chance.choice(options) for place, options in places.items()} for _ in range(limit)]


def all_patterns(toys: Sequence[Toy], limit: int) -> list[Pattern] | None:
    """Every pattern, or None when there are more than `limit`."""
    found = patterns(toys, limit + 1)
    return found if len(found) <= limit else None


class Symbols:
    """Symbols as whole numbers, so that comparing two is cheap however deep they are. ABSENT has no value."""

    ABSENT = -1

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, *what: Any) -> int:
        return self._known.setdefault(what, len(self._known))


@dataclass
class Walk:
    """What one walk over the units did. records: unit -> parameter -> symbol. edges: (writer, reader, parameter) that
    happened, the writer of what is there at the end included under the reader len(toys)."""

    state: dict[Param, int]
    records: dict[int, dict[Param, int]]
    edges: set[tuple[int, int, Param]]


def walk(
    symbols: Symbols,
    toys: Sequence[Toy],
    pattern: Pattern,
    weights: int,
    *,
    run: Collection[int] | None = None,
    records: Mapping[int, Mapping[Param, int]] | None = None,
    state: Mapping[Param, int] | None = None,
) -> Walk:
    """Run the toys of `run` (None: all) in order; re-apply `records` of others. weights: stands for the trained models'
    state and the epoch."""
    read = {param for toy in toys for param in [*toy.reads_at, *toy.writes_at]}
    now = dict(state) if state is not None else {param: symbols.of("data", param) for param in {*UNIVERSE, *read}}
    source: dict[Param, int] = {}
    done = Walk(now, {}, set())
    for i, toy in enumerate(toys):
        if run is None or i in run:
            done.edges |= {(source[p], i, p) for p in toy.reads_at if p in source}
            wrote = _compute(symbols, i, toy, pattern, weights, now)
            done.records[i] = wrote
        else:
            wrote = (records or {}).get(i, {})
        for param, symbol in wrote.items():
            now[param], source[param] = symbol, i
    done.edges |= {(writer, len(toys), param) for param, writer in source.items()}
    return done


def _compute(
    symbols: Symbols, i: int, toy: Toy, pattern: Pattern, weights: int, now: Mapping[Param, int]
) -> dict[Param, int]:
    def seen(params: Sequence[Param]) -> tuple[int, ...]:
        return tuple(now.get(param, Symbols.ABSENT) for param in params)

    stamp = weights if toy.starts else None
    wrote = {}
    for param in toy.writes_at:
        choice, (scope, name) = pattern[i, param], param
        if choice == DELETES:
            wrote[param] = Symbols.ABSENT
        if choice != RETURNS:
            continue
        if toy.kind == "cfg":
            side = [(scope, n) for n in (toy.posi if scope == "posi" else toy.nega)]
            wrote[param] = symbols.of(i, name, stamp, seen([("shared", n) for n in toy.shared]), seen(side))
        else:
            wrote[param] = symbols.of(i, param, stamp, seen(toy.reads_at))
    return wrote


def two_stages(
    symbols: Symbols,
    toys: Sequence[Toy],
    pattern: Pattern,
    live: Collection[int],
    needed: Collection[int],
    kept: Mapping[int, Collection[Param]],
) -> dict[Param, int]:
    """Stage 1 under old weights runs `needed` and stores `kept`; stage 2 under new ones walks the order and replays."""
    first = walk(symbols, toys, pattern, 0, run=needed)
    stored = {
        i: {p: s for p, s in wrote.items() if p in kept.get(i, ()) or ("*", "*") in kept.get(i, ())}
        for i, wrote in first.records.items()
    }
    return walk(symbols, toys, pattern, 1, run=live, records=stored).state


def cached_then_live(
    symbols: Symbols, toys: Sequence[Toy], pattern: Pattern, live: Collection[int]
) -> dict[Param, int]:
    """Plain execution: all cached units under old weights, then all live ones on what they left."""
    cached = [i for i in range(len(toys)) if i not in live]
    first = walk(symbols, toys, pattern, 0, run=cached)
    return walk(symbols, toys, pattern, 1, run=live, state=first.state).state


def same(one: Mapping[Param, int], other: Mapping[Param, int], wanted: Collection[Param] | None) -> bool:
    params = {*one, *other} if wanted is None else wanted
    return all(one.get(p, Symbols.ABSENT) == other.get(p, Symbols.ABSENT) for p in params)


def equal_under_all(
    toys: Sequence[Toy],
    live: Collection[int],
    needed: Collection[int],
    kept: Mapping[int, Collection[Param]],
    wanted: Collection[Param] | None,
    limit: int = 64,
) -> bool:
    """Two stages with replay against the unsplit run, for every pattern (a choice of them when there are many)."""
    symbols = Symbols()
    return all(
        same(walk(symbols, toys, pattern, 1).state, two_stages(symbols, toys, pattern, live, needed, kept), wanted)
        for pattern in patterns(toys, limit)
    )


def equal_without_replay(toys: Sequence[Toy], live: Collection[int], limit: int = 64) -> bool:
    symbols = Symbols()
    return all(
        same(walk(symbols, toys, pattern, 1).state, cached_then_live(symbols, toys, pattern, live), None)
        for pattern in patterns(toys, limit)
    )


def _subsets(*sizes: int) -> list[tuple[str, ...]]:
    return [names for size in sizes for names in permutations(NAMES, size) if size < 2 or names[0] < names[1]]


STARTS = ({}, {}, {}, {"trained": True}, {"random": "per_epoch"}, {"random": "frozen"})


@st.composite
def toy(draw: st.DrawFn, kinds: Sequence[str]) -> Toy:
    """Few draws each: they are what a property test spends its time on."""
    kind, effect = draw(st.sampled_from(kinds)), draw(st.sampled_from(STARTS))
    if kind == "barrier":
        return Toy(kind, **effect)
    few = st.sampled_from(_subsets(0, 1) if kind == "take" else _subsets(0, 1, 2))
    shared, posi, writes = draw(few), draw(st.sampled_from(_subsets(0, 1, 2))), draw(few)
    nega = draw(st.sampled_from([*permutations(NAMES, len(posi))] if kind == "cfg" else _subsets(0, 1)))
    if kind == "take":
        return Toy(kind, shared if shared or posi or nega or writes else ("a",), posi, nega, writes, **effect)
    return Toy(kind, shared, posi, nega, writes, may=draw(st.booleans()), **effect)


def toy_lists(barriers: bool = True) -> st.SearchStrategy[list[Toy]]:
    """Up to 8 toys over 5 names in 3 scopes."""
    kinds = ("plain", "plain", "plain", "plain", "cfg", "cfg", "take", *(("barrier",) if barriers else ()))
    return st.lists(toy(kinds), min_size=1, max_size=8)


def wanted_sets() -> st.SearchStrategy[Collection[Param] | None]:
    """What is read at the end: everything, or some parameters."""
    return st.none() | st.sets(st.sampled_from(UNIVERSE), max_size=4)


def starts(toys: Sequence[Toy]) -> set[int]:
    return {i for i, toy in enumerate(toys) if toy.starts}
