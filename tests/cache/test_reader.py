"""pytest tests/cache/test_reader.py: what cached units returned comes back from disk so that a run cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_samples import fill, flip, key_of, same, shard_files, value_of
from torch import Tensor

from flowrun.cache.catalog import DamagedValue, MissingValue
from flowrun.cache.keyplan import KeyPlan
from flowrun.cache.reader import Reader, put_record
from flowrun.cache.store import Store
from flowrun.graph import Draws, Executor, Record, State, Unit
from flowrun.splitters import split


def encode(ctx: Any, prompt: str) -> dict[str, Any]:
    return {"embeds": torch.tensor([[float(ord(c))] * 3 for c in prompt]).bfloat16(), "words": prompt.split()}


def override(ctx: Any, prompt: str) -> dict[str, Any] | None:
    return {"words": ["rare"]} if prompt.startswith("!") else None


def draw(ctx: Any, embeds: Tensor) -> dict[str, Any]:
    return {"noise": torch.randn(embeds.shape, generator=ctx.generator)}


def sides(ctx: Any, size: int, prompt: str) -> dict[str, Any]:
    return {"text": torch.full((size, 2), float(len(prompt)))}


def clear(ctx: Any, shared: Any, posi: Any, nega: Any) -> Any:
    if posi["text"].sum() > 30:
        posi = {name: value for name, value in posi.items() if name != "text"}
    return shared, posi, nega


def everything(ctx: Any, shared: Any, posi: Any, nega: Any) -> Any:
    return {**shared, "count": len(shared), "pair": (1, None)}, {}, {"text": nega["text"] + 1, "new": torch.tensor(2)}


def live(ctx: Any, **inputs: Any) -> dict[str, Any]:
    return {
        "out": torch.randn(3, generator=ctx.generator)
        + sum(v.float().sum() for v in inputs.values() if isinstance(v, Tensor))
    }


def unit(name: str, process: Any, reads: str = "", writes: str = "", **more: Any) -> Unit:
    return Unit(
        name=name, process=process, input_params=tuple(reads.split()), output_params=tuple(writes.split()), **more
    )


PLAIN = [
    unit("encode", encode, "prompt", "embeds words"),
    unit("override", override, "prompt", "words", may_write=True),
    unit("draw", draw, "embeds", "noise", random="frozen"),
]
PROMPT = {"prompt": "prompt"}
SIDES = unit("sides", sides, "size", "text", separate_cfg=True, input_params_posi=PROMPT, input_params_nega=PROMPT)
CLEAR = unit("clear", clear, "text", "text", take_over=True)
LIVE = unit("live", live, "embeds noise", "out", random="per_epoch")
TEXTS = unit(
    "live", live, "", "out", random="per_epoch", input_params_posi={"a": "text"}, input_params_nega={"b": "text"}
)
SIZE = unit("live", live, "size", "out", random="per_epoch")
GRAPHS = {
    "plain": [*PLAIN, LIVE],
    "sides": [SIDES, TEXTS],
    "deleting": [SIDES, CLEAR, SIZE],
    "barrier": [*PLAIN, SIDES, unit("everything", everything, take_over=True), LIVE],
}
PROMPTS = ["a cat", "! a very long prompt", ""]


def state(prompt: str) -> State:
    return State({"prompt": prompt, "size": 2}, {"prompt": prompt}, {"prompt": "bad"})


def inputs_of(prompt: str) -> dict[tuple[str, str], bytes]:
    key = prompt.encode().ljust(16, b".")[:16]
    return {
        ("shared", "prompt"): key,
        ("posi", "prompt"): key,
        ("nega", "prompt"): b"b" * 16,
        ("shared", "size"): b"s" * 16,
    }


class Run:
    """Stage one over PROMPTS, as a cache stage does it: run the needed units in order, store what is kept."""

    def __init__(self, root: Path, units: Sequence[Unit]) -> None:
        self.split, self.executor, self.store = split("replay", units, set()), Executor(units, {}), Store(root)
        plan = KeyPlan(self.split, {}, b"", 0)
        self.keys = [plan.keys(inputs_of(prompt), prompt) for prompt in PROMPTS]
        self.new = 0
        with self.store.writer(64, 30) as writer:
            for prompt, keys in zip(PROMPTS, self.keys, strict=True):
                at = state(prompt)
                for i in self.split.needed:
                    record = self.executor.run_unit(i, at, Draws(0, prompt, -1))
                    self.new += put_record(writer, keys, i, units[i], record, prompt)

    def reader(self) -> Reader:
        return Reader(Store(self.store.catalog.layout.root), self.split.units, lambda row, variant: self.keys[row])


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_run_from_records_equals_a_run_of_all_units(root: Path, graph: str) -> None:
    run = Run(root, GRAPHS[graph])
    assert run.split.cached and run.split.live and run.new
    reader = run.reader()
    for row, prompt in enumerate(PROMPTS):
        for epoch in (0, 1):
            whole = run.executor.run(state(prompt), Draws(0, prompt, epoch))
            halves = run.executor.run(state(prompt), Draws(0, prompt, epoch), run.split.live, reader.records(row, 0))
            for scope in ("shared", "posi", "nega"):
                a, b = getattr(whole, scope), getattr(halves, scope)
                assert a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_not_returned_and_deleted_are_told_apart_from_values(root: Path) -> None:
    plain, deleting = Run(root, GRAPHS["plain"]).reader(), Run(root, GRAPHS["deleting"]).reader()
    words = ("shared", "words")
    assert [records[1].values for records in plain.batch([(0, 0), (1, 0)])] == [{}, {words: ["rare"]}]
    assert [records[1].deleted for records in deleting.batch([(0, 0), (1, 0)])] == [
        frozenset(),
        frozenset({("posi", "text")}),
    ]


def test_a_second_run_stores_nothing_new_and_a_changed_unit_stores_its_own_outputs_only(root: Path) -> None:
    first = Run(root, GRAPHS["plain"])
    assert Run(root, GRAPHS["plain"]).new == 0
    edited = [
        GRAPHS["plain"][0],
        unit("override", override, "prompt", "words", may_write=True, version=2),
        *GRAPHS["plain"][2:],
    ]
    assert first.new == 3 * 4 and Run(root, edited).new == 3


def test_a_batch_is_its_rows_records(root: Path) -> None:
    reader = Run(root, GRAPHS["plain"]).reader()
    visits = [(2, 0), (0, 0), (2, 0)]
    reader.ahead(visits)
    for (row, variant), records in zip(visits, reader.batch(visits), strict=True):
        alone = reader.records(row, variant)
        assert alone.keys() == records.keys() and all(
            same(dict(alone[i].values), dict(records[i].values)) for i in alone
        )
    assert reader.batch([]) == []


def stacks(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Reader, list[list[bytes]]]:
    """A reader of the values 0 to 3, and the keys of each batch that it asked the store for."""
    store, asked = fill(root, range(4), per_shard=4), []
    stack = store.stack
    monkeypatch.setattr(store, "stack", lambda keys: (asked.append(list(keys)), stack(keys))[1])
    return Reader(store, [], lambda row, variant: {}), asked


def test_what_stays_in_memory_is_not_what_was_given_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = stacks(root, monkeypatch)
    wanted = torch.stack([value_of(0), value_of(1)])
    for _ in range(3):
        batch = reader.stacked([key_of(0), key_of(1)])
        assert same(batch, wanted)
        batch.zero_()
    assert len(asked) == 1


def test_more_values_than_memory_is_for_are_read_each_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.cache.reader.HELD_BYTES", 3 * value_of(0).nbytes)
    reader, asked = stacks(root, monkeypatch)
    first, second = [key_of(0), key_of(1)], [key_of(2), key_of(3)]
    for keys in (first, second, first, first):
        reader.stacked(keys)
    assert asked == [first, second, first, first]


def test_records_of_one_row_share_no_memory(root: Path) -> None:
    reader = Run(root, GRAPHS["plain"]).reader()
    first = reader.records(0, 0)[0].values["shared", "embeds"]
    first.zero_()
    assert reader.records(0, 0)[0].values["shared", "embeds"].any()


def test_what_is_missing_or_damaged_is_an_error_and_never_an_empty_record(root: Path) -> None:
    run = Run(root, GRAPHS["plain"])
    (path,) = shard_files(root)
    embeds = encode(None, "! a very long prompt")["embeds"].view(torch.uint8).numpy().tobytes()
    flip(path, path.read_bytes().index(embeds))
    with pytest.raises(DamagedValue, match="row '! a very long prompt'"):
        run.reader().records(1, 0)
    path.unlink()
    with pytest.raises(MissingValue, match="stage=cache"):
        run.reader().records(0, 0)


def test_only_outputs_that_have_a_key_are_stored(root: Path) -> None:
    store = Store(root)
    record = Record({("shared", "a"): torch.zeros(2), ("shared", "b"): torch.ones(2)})
    with store.writer(64, 30) as writer:
        keys = {(3, ("shared", "b")): b"b" * 16, (4, ("shared", "a")): b"a" * 16}
        assert put_record(writer, keys, 3, unit("u", encode), record, "row") == 1
    assert store.missing(list(keys.values())) == [b"a" * 16] and same(store.get(b"b" * 16), torch.ones(2))
