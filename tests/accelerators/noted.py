"""Accelerators that do nothing but write down what happens to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flowrun.accelerators import Accelerator
from flowrun.config import ConfigError


class Noted(Accelerator):
    """Writes down what happens to it."""

    stage, safety = "both", "lossless"
    notes: list[str] = []

    @dataclass(kw_only=True, slots=True)
    class Config:
        k: int

    def setup(self, pipeline: Any) -> Any:
        self.notes.append(f"+{self.config.k}")
        if self.config.k < 0:
            raise ConfigError("k", "is negative")
        return lambda: self.notes.append(f"-{self.config.k}")

    def report(self) -> dict[str, float]:
        return {"k": self.config.k}


class Sampled(Noted):
    stage, notes = "rollout", Noted.notes

    @contextmanager
    def rollout_context(self, pipeline: Any) -> Iterator[None]:
        self.notes.append(f"({self.config.k}")
        try:
            yield
        finally:
            self.notes.append(f"{self.config.k})")


class Cautious(Noted):
    conflicts = ("Noted",)


class Circling(Noted):
    before, after = ("Noted",), ("Noted",)
