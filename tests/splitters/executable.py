"""Toys with real processes: what they compute is a hash of their inputs, so a difference anywhere shows in the bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import cycle
from typing import Any

import torch
from toys import DELETES, NAMES, RETURNS, Param, Pattern, Toy, unit

from flowrun.graph import Draws, Executor, Record, State, Unit
from flowrun.splitters import Split

SCOPES = ("shared", "posi", "nega")


class Weights:
    """A trained model: what it returns depends on how far it has been trained."""

    def __init__(self, step: int) -> None:
        self.step = step


def hashed(*parts: Any) -> torch.Tensor:
    """[2], int64."""
    text = "|".join(repr(part.tolist() if isinstance(part, torch.Tensor) else part) for part in parts)
    digest = blake2b(text.encode(), digest_size=16).digest()
    return torch.tensor([int.from_bytes(digest[k : k + 8], "big", signed=True) for k in (0, 8)])


def executable(toys: Sequence[Toy], pattern: Pattern) -> list[Unit]:
    return [unit(i, toy, _process(i, toy, pattern)) for i, toy in enumerate(toys)]


def _process(i: int, toy: Toy, pattern: Pattern) -> Callable:
    scopes = cycle({"plain": ("shared",), "cfg": ("posi", "nega")}.get(toy.kind, ()))

    def stamp(ctx: Any) -> tuple:
        drawn = torch.rand((), generator=ctx.generator) if toy.random != "none" else 0
        return ctx.models["m"].step if toy.trained else 0, drawn

    def named(ctx: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        scope, of = next(scopes), stamp(ctx)  # a cfg process is called for the positive side, then for the negative one
        seen = [(name, inputs[name].tolist()) for name in sorted(inputs)]
        return {name: hashed(i, name, *of, seen) for name in toy.writes if pattern[i, (scope, name)] == RETURNS}

    def take_over(ctx: Any, shared: dict, posi: dict, nega: dict) -> tuple[dict, dict, dict]:
        given, of = {"shared": shared, "posi": posi, "nega": nega}, stamp(ctx)
        seen = [(scope, name, given[scope][name].tolist()) for scope in SCOPES for name in sorted(given[scope])]
        after = {scope: dict(values) for scope, values in given.items()}
        for scope, name in toy.writes_at:
            if pattern[i, (scope, name)] == DELETES:
                after[scope].pop(name, None)
            if pattern[i, (scope, name)] == RETURNS:
                after[scope][name] = hashed(i, scope, name, *of, seen)
        return after["shared"], after["posi"], after["nega"]

    return take_over if toy.kind in ("take", "barrier") else named


def data(names: Collection[str] = NAMES, scopes: Collection[str] = SCOPES) -> State:
    return State(**{scope: {name: hashed("data", scope, name) for name in names} for scope in scopes})


def run_unsplit(graph: Sequence[Unit], state: State, draws: Draws, models: Mapping[str, Any]) -> State:
    return Executor(graph, models, trained=models).run_batch([(state, draws, {})])[0]


def cut(record: Record, kept: Collection[Param]) -> Record:
    """What a cache keeps of a record."""
    if ("*", "*") in kept:
        return record
    return Record({p: v for p, v in record.values.items() if p in kept}, record.deleted & frozenset(kept))


def run_split(parts: Split, state: State, draws: Draws, models: Mapping[str, Any]) -> State:
    """Stage 1 with no trained model and in another epoch, stage 2 from what it kept."""
    first = Executor(parts.units, {name: models[name] for name in parts.models_cached}, trained=models)
    made = first.run_recorded((state, Draws(draws.seed, draws.row_id, -1), {}), parts.needed)
    records = {i: cut(record, parts.kept.get(i, ())) for i, record in made.items()}
    second = Executor(parts.units, {name: models[name] for name in parts.models_live}, trained=models)
    return second.run_batch([(state, draws, records)], live=parts.live)[0]


def same_bits(one: State, other: State, wanted: Collection[Param] | None = None) -> bool:
    """Names, types and every bit; wanted: of these parameters only."""
    pairs = [({(s, n): v for s in SCOPES for n, v in getattr(state, s).items()}) for state in (one, other)]
    params = {*pairs[0], *pairs[1]} if wanted is None else wanted
    return all((p in pairs[0]) == (p in pairs[1]) and _same(pairs[0].get(p), pairs[1].get(p)) for p in params)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other
