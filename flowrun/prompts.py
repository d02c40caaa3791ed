"""What is sampled from, as rows of their own: encoded by the same units, cached under the same keys.

Models that see a caption alone draw prompts; those that also see pictures of a row draw the data's first rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from flowrun.cache.key import digest
from flowrun.data import Row, Source
from flowrun.feed import live_inputs, row_inputs
from flowrun.files import HashFile
from flowrun.graph import Draws, Executor, Record, State
from flowrun.splitters import Split

NO_PICTURE = (0, 0)  # the size of a row that is only sampled from

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Prompts that are drawn together. encoded: prompt -> its conditions; with guidance also those of the empty one.

    shape: of the pictures or videos. seen: condition pictures, uint8 [3, H, W], or videos, [F, 3, H, W]."""

    prompts: Sequence[str]
    encoded: Mapping[str, Values]
    shape: tuple[int, ...]
    seen: Sequence[Tensor] = ()


class Drawn(Source):
    """Rows that are only sampled from."""

    def __init__(self) -> None:
        self.skipped, self.ignored = [], 0

    @abstractmethod
    def asked(self, encoded: Mapping[str, Values]) -> list[Asked]:
        """What to draw. encoded: row id -> conditions."""


class Prompts(Drawn):
    """One row per different prompt; guidance subtracts the empty one. shape: of what is drawn."""

    names = ("prompt",)

    def __init__(self, prompts: Sequence[str], guided: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.prompts, self.shape = list(prompts), shape
        self._different = list(dict.fromkeys([*prompts, *([""] if guided else [])])) if prompts else []

    def rows(self) -> list[Row]:
        return [Row(id=f"prompt/{prompt}", prompt=prompt, size=NO_PICTURE) for prompt in self._different]

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        return {"prompt": row.prompt} if names is None or "prompt" in names else {}

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        return {"prompt": digest("prompt", row.prompt)}

    def asked(self, encoded: Mapping[str, Values]) -> list[Asked]:
        if not self.prompts:
            return []
        return [Asked(prompts=self.prompts, encoded={row.prompt: encoded[row.id] for row in self.rows()}, shape=self.shape)]


class Edits(Drawn):
    """Rows of the data with their own captions and condition pictures; guidance subtracts the empty caption beside the
    same pictures. seen: names of these pictures."""

    def __init__(self, source: Source, rows: Sequence[Row], seen: Sequence[str], guided: bool) -> None:
        super().__init__()
        self.names, self.source, self.seen, self.guided = source.names, source, tuple(seen), guided
        self._shown = [source.variant(row, 0) for row in rows]
        self._data = {place(row): row for row in self._shown for place in (_own, _empty)}  # by the ids of `rows`

    def rows(self) -> list[Row]:
        own = [Row(id=_own(row), prompt=row.prompt, size=NO_PICTURE) for row in self._shown]
        return own + [Row(id=_empty(row), prompt="", size=NO_PICTURE) for row in self._shown if self.guided]

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted = set(self.names if names is None else names)
        others = self.source.load(self._data[row.id], wanted - {"prompt"}) if wanted - {"prompt"} else {}
        return {**others, **({"prompt": row.prompt} if "prompt" in wanted else {})}

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        return {**self.source.fingerprints(self._data[row.id], hash_file), "prompt": digest("prompt", row.prompt)}

    def asked(self, encoded: Mapping[str, Values]) -> list[Asked]:
        found = []
        for row, seen in zip(self._shown, self._pictures, strict=True):
            empty = {"": encoded[_empty(row)]} if self.guided else {}
            found.append(Asked(prompts=[row.prompt], encoded={**empty, row.prompt: encoded[_own(row)]}, shape=row.shape, seen=seen))
        return found

    @cached_property
    def _pictures(self) -> list[list[Tensor]]:
        """Of each row; loaded when they are shown, since encoding may need none."""
        loaded = [self.source.load(row, self.seen) for row in self._shown]
        return [[inputs[name] for name in self.seen] for inputs in loaded]


def _own(row: Row) -> str:
    return f"drawn/{row.id}"


def _empty(row: Row) -> str:
    """Of the row with the empty caption."""
    return f"empty/{row.id}"


def encode(source: Source, rows: Sequence[Row], split: Split, executor: Executor, records: Sequence[Mapping[int, Record]],
           names: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Row id -> the values of `names` for it. records: of each row's cached units."""
    wanted = live_inputs(split, names, source)
    jobs = [
        (State(shared=row_inputs(source, row, {}, wanted)), Draws(seed, row.id, 0), kept)
        for row, kept in zip(rows, records, strict=True)
    ]
    states = executor.run_batch(jobs, live=split.live)
    return {row.id: {name: state.shared[name] for name in names} for row, state in zip(rows, states, strict=True)}
