"""Random numbers keyed by what they are for."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product

import pytest
import torch
from declared import unit

from flowrun.graph import Draws, Executor, State, seed_of


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((0, "row", "noise", 3), b"int:0\x1fstr:row\x1fstr:noise\x1fint:3"),
        ((7, "ärger/🙂.png", "noise", -1), "int:7\x1fstr:ärger/🙂.png\x1fstr:noise\x1fint:-1".encode()),
        ((), b""),
        (("",), b"str:"),
        ((2**80,), b"int:1208925819614629174706176"),
    ],
)
def test_a_seed_is_the_upper_63_bits_of_a_hash(parts, text):
    assert seed_of(*parts) == int(blake2b(text, digest_size=8).hexdigest(), 16) // 2


def test_seeds_differ_by_every_part_its_type_and_its_place():
    keys = [
        *product((0, 1), ("a", "b"), ("u", "v"), (-1, 0, 1)),
        ("0", "a", "u", 0), (0, "a", "u", "0"), (0, "u", "a", 0), (0, "au", 0), (0, "a", "u", 0, ""),
    ]  # fmt: skip
    seeds = {seed_of(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def noise(name: str, random: str):
    def process(ctx):
        return {name: torch.rand(4, generator=ctx.generator)}

    return unit(name, [], [name], process, random=random)


def drawn(units, draws: Draws, names) -> dict[str, list[float]]:
    state = Executor(units, {}).run(State(), draws)
    return {name: state.shared[name].tolist() for name in names}


def test_draws_are_those_of_torch_under_the_keyed_seed():
    texts = {"fresh": b"int:5\x1fstr:r\x1fstr:fresh\x1fint:2", "fixed": b"int:5\x1fstr:r\x1fstr:fixed\x1fint:-1"}
    seeds = {name: int(blake2b(text, digest_size=8).hexdigest(), 16) // 2 for name, text in texts.items()}
    want = {name: torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist() for name, seed in seeds.items()}
    assert drawn([noise("fresh", "per_epoch"), noise("fixed", "frozen")], Draws(5, "r", 2), seeds) == want


def test_draws_differ_between_epochs_unless_frozen():
    units = [noise("fresh", "per_epoch"), noise("fixed", "frozen")]
    first, again, later = (drawn(units, Draws(0, "r", epoch), ("fresh", "fixed")) for epoch in (0, 0, 1))
    assert first == again
    assert first["fresh"] != later["fresh"]
    assert first["fixed"] == later["fixed"]


@pytest.mark.parametrize("random", ["per_epoch", "frozen"])
def test_draws_differ_between_seeds_rows_and_units(random):
    units = [noise("one", random), noise("two", random)]
    found = [drawn(units, Draws(seed, row, 0), ("one", "two"))[name]
             for seed, row, name in product((0, 1), ("r", "s"), ("one", "two"))]  # fmt: skip
    assert len({tuple(values) for values in found}) == 8


def test_draws_depend_neither_on_order_nor_on_batch_size_nor_on_the_other_units():
    units = [noise("one", "per_epoch"), noise("two", "per_epoch")]
    alone = {row: drawn(units, Draws(0, row, 0), ("one", "two")) for row in "abc"}
    jobs = [(State(), Draws(0, row, 0), {}) for row in "cab"]
    together = Executor(list(reversed(units)), {}).run_batch(jobs)
    for row, state in zip("cab", together, strict=True):
        assert {name: value.tolist() for name, value in state.shared.items()} == alone[row]
    assert drawn([units[1]], Draws(0, "a", 0), ("two",))["two"] == alone["a"]["two"]


def test_a_unit_goes_on_with_its_generator_while_it_runs():
    def process(ctx):
        return {"n": torch.cat([torch.rand(1, generator=ctx.generator) for _ in range(3)])}

    values = Executor([unit("n", [], ["n"], process, random="frozen")], {}).run(State(), Draws(0, "r", 0)).shared["n"]
    seed = seed_of(0, "r", "n", -1)
    assert torch.equal(values, torch.rand(3, generator=torch.Generator().manual_seed(seed)))


def test_both_sides_of_a_drawing_unit_draw_one_after_the_other():
    def process(ctx):
        return {"n": torch.rand(2, generator=ctx.generator)}

    state = Executor([unit("n", [], ["n"], process, random="per_epoch", separate_cfg=True)], {}).run(
        State(), Draws(0, "r", 4)
    )
    generator = torch.Generator().manual_seed(seed_of(0, "r", "n", 4))
    assert torch.equal(state.posi["n"], torch.rand(2, generator=generator))
    assert torch.equal(state.nega["n"], torch.rand(2, generator=generator))
