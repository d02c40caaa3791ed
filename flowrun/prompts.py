"""Prompts to sample from, as rows without pictures: encoded by the same units, cached under the same keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flowrun.cache.key import digest
from flowrun.data import Row, Source
from flowrun.files import HashFile
from flowrun.graph import Draws, Executor, Record, State
from flowrun.splitters import Split

NO_PICTURE = (0, 0)  # the size of a row that is only sampled from


class Prompts(Source):
    """One row per different prompt; guidance subtracts the empty one."""

    names = ("prompt",)

    def __init__(self, prompts: Sequence[str], guided: bool) -> None:
        self.prompts = list(dict.fromkeys([*prompts, *([""] if guided else [])])) if prompts else []
        self.skipped, self.ignored = [], 0

    def rows(self) -> list[Row]:
        return [Row(id=f"prompt/{prompt}", prompt=prompt, size=NO_PICTURE) for prompt in self.prompts]

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        return {"prompt": row.prompt} if names is None or "prompt" in names else {}

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        return {"prompt": digest("prompt", row.prompt)}


def encode(
    rows: Sequence[Row],
    split: Split,
    executor: Executor,
    records: Sequence[Mapping[int, Record]],
    names: Sequence[str],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Prompt -> the values of `names` for it. records: of each row's cached units."""
    jobs = [
        (State(shared={"prompt": row.prompt}), Draws(seed, row.id, 0), kept)
        for row, kept in zip(rows, records, strict=True)
    ]
    states = executor.run_batch(jobs, live=split.live)
    return {row.prompt: {name: state.shared[name] for name in names} for row, state in zip(rows, states, strict=True)}
