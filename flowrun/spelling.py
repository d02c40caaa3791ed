"""Near names for an error message. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: str, choices: Iterable[str], most: int = 5) -> str:
    """The choices that look like `name`, nearest first, or all of them when none does; comma-separated."""
    names = sorted(set(choices))
    return ", ".join(difflib.get_close_matches(name, names, most, cutoff=0.5) or names) or "none at all"
