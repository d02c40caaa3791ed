"""Noise and the latents that a teacher made from it, one pair per row: what `python -m flowrun.teacher` writes."""

from __future__ import annotations

import csv
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from flowrun.cache.key import digest
from flowrun.config import ConfigError, DataError
from flowrun.data import Row, Source
from flowrun.files import HashFile
from flowrun.pairs import COLUMNS, FRAMES, TABLE


class Teacher(Source):
    """Gives `teacher_noise` and `teacher_latents` beside the prompt, and no picture."""

    names = ("prompt", "teacher_noise", "teacher_latents")

    @dataclass(kw_only=True, slots=True)
    class Config:
        source: str
        path: str | None  # the folder that `python -m flowrun.teacher` wrote; relative to the shell

    def rows(self) -> list[Row]:
        table = self._root() / TABLE
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if lacking := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise ConfigError("data.path", f"{table} has no column {', '.join(lacking)}",
                                  "a target is of use only with the noise that it was made from")  # fmt: skip
            found = list(reader)
        faults = [f"{table}, row {row['id']}: there is no {self._file(row['id'])}" for row in found
                  if not self._file(row["id"]).is_file()]  # fmt: skip
        if faults:
            raise DataError(faults, "make them again: python -m flowrun.teacher goes on where it stopped")
        if not found:
            raise ConfigError("data.path", f"{table} lists no row", "make some with python -m flowrun.teacher")
        return [Row(id=row["id"], prompt=row["prompt"], size=(int(row["height"]), int(row["width"])),
                    frames=int(row[FRAMES]) if FRAMES in row else None, source=self._file(row["id"]),
                    extra={"seed": int(row["seed"])}) for row in found]  # fmt: skip

    def place(self) -> str:
        return "" if self.config.path is None else str(Path(self.config.path).resolve())

    def gone(self) -> bool:
        return self.config.path is not None and not Path(self.place()).exists()

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted = set(self.names if names is None else names)
        inputs: dict[str, Any] = {"prompt": row.prompt} if "prompt" in wanted else {}
        if wanted - {"prompt"}:
            try:
                pair = load_file(row.source)
            except (OSError, SafetensorError) as error:
                raise DataError([f"row {row.id}: {row.source} cannot be read ({error})"],
                                "remove the file and run python -m flowrun.teacher again") from error  # fmt: skip
            given = {"teacher_noise": pair["noise"], "teacher_latents": pair["latents"]}
            inputs |= {name: value for name, value in given.items() if name in wanted}
        return inputs

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        pair = hash_file(row.source)
        return {"prompt": digest("prompt", row.prompt),
                **{name: digest("teacher", name, pair) for name in self.names[1:]}}  # fmt: skip

    def _root(self) -> Path:
        if self.config.path is None:
            raise ConfigError("data.path", "names no folder", "give the one that python -m flowrun.teacher wrote")
        root = Path(self.config.path).absolute()
        if not (root / TABLE).is_file():
            raise ConfigError("data.path", f"{root} holds no {TABLE}", "give the one that python -m flowrun.teacher wrote")
        return root

    def _file(self, row_id: str) -> Path:
        return Path(self.config.path).absolute() / f"{row_id}.safetensors"
