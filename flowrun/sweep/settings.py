"""The jobs of a sweep as settings that are compared: those that differ in their seed alone are one. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import yaml

from flowrun.config import Best
from flowrun.sweep.table import RESULT, Row, differs, settings

OK = "ok"
SEED = "seed"
SLOTS = "acceleration"  # what the keys of accelerators begin with
CHECKS = ("acceleration.probe", "acceleration.bound")  # and those that make nothing faster
FIGURES = (
    ("samples_reward", Best.greatest),
    ("reward", Best.greatest),
    ("loss_mean", Best.least),
)  # the first that there is
SPEEDS = {"s_per_epoch": "an epoch", "s_per_step": "a step"}


@dataclass(frozen=True)
class Figure:
    name: str
    best: Best


@dataclass(frozen=True)
class Setting:
    """values: what is swept, without the seed, as text. rows: of its jobs that ended well, one for each seed."""

    values: dict[str, str]
    rows: Sequence[Row]

    def each(self, name: str) -> list[float]:
        """A figure of result.json, of each job that has it."""
        found = (number(row.get(RESULT + name)) for row in self.rows)
        return [value for value in found if value is not None]

    def mean(self, name: str) -> float | None:
        found = self.each(name)
        return fmean(found) if found else None

    def greatest(self, name: str) -> float | None:
        return max(self.each(name), default=None)

    @property
    def label(self) -> str:
        """Accelerators by their names, other settings as key=value."""
        fast = [name for key, value in self.values.items() if is_group(key) for name in accelerators(value)]
        rest = [f"{short(key)}={_rounded(value)}" for key, value in self.values.items() if value and not is_group(key)]
        named = [" + ".join(fast) or "none"] if any(map(is_group, self.values)) else []
        return ", ".join([*named, *rest])


def number(text: str | None) -> float | None:
    """None for what is no finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def swept(rows: Sequence[Row]) -> list[str]:
    """What differs between jobs, the seed included."""
    return [name for name in settings(rows) if differs(rows, name)]


def compared(rows: Sequence[Row]) -> list[Setting]:
    """In the order of their first jobs; without those of which no job ended well."""
    keys = [key for key in swept(rows) if key != SEED]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == OK:
            groups.setdefault(tuple(row.get(key) or "" for key in keys), []).append(row)
    return [Setting(dict(zip(keys, values, strict=True)), members) for values, members in groups.items()]


def figure_of(rows: Sequence[Row], name: str | None = None, best: Best | None = None) -> Figure | None:
    """The one asked for, or the first of FIGURES that a job has; None when no job has it."""
    wanted = FIGURES if name is None else ((name, best),)
    there = (Figure(*one) for one in wanted if any(number(row.get(RESULT + one[0])) is not None for row in rows))
    return next(there, None)


def is_acceleration(rows: Sequence[Row]) -> bool:
    """Whether accelerators, or how they work, are swept."""
    return any(key.startswith(SLOTS) and key not in CHECKS for key in swept(rows))


def is_group(key: str) -> bool:
    """Whether the values are lists of accelerators."""
    return key.lstrip("+").replace("/", ".") in (f"{SLOTS}.shared", f"{SLOTS}.rollout")


def accelerators(value: str) -> list[str]:
    """[a,b] or entries [{name: a, params: {k: 1}}] -> their names, with what is set in brackets."""
    try:
        entries = yaml.safe_load(value or "[]") or []
    except yaml.YAMLError:
        return [value]
    entries = entries if isinstance(entries, list) else [entries]
    return [_entry(entry) for entry in entries]


def short(key: str) -> str:
    """The last part of a setting's name."""
    return key.replace("/", ".").rpartition(".")[2].lstrip("+~")


def _rounded(value: str) -> str:
    """What a sweeper drew has more digits than one reads."""
    return f"{float(value):.6g}" if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", value) else value


def _entry(entry: object) -> str:
    if not isinstance(entry, dict) or "name" not in entry:
        return str(entry)
    params = ", ".join(_leaves(entry.get("params") or {}))
    return f"{entry['name']}({params})" if params else str(entry["name"])


def _leaves(params: Mapping[str, object]) -> Iterator[str]:
    """key=value at any depth, by the last key."""
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield f"{name}={value}"
