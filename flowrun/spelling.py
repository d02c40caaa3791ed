"""Near names for an error message. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST = 3  # near names shown
LISTED = 12  # names shown when none is near
LIKE = 0.6  # least similarity of a near name, as difflib counts it


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that look like `name`, nearest first."""
    return get_close_matches(name, sorted({str(k) for k in known}), n=MOST, cutoff=LIKE)


def suggest(name: str, known: Iterable[str], before: str = "") -> str:
    """What would be right instead of `name`: near names if there are any, else the known ones, the first of many.

    before: is put in front of each near name."""
    names = sorted({str(k) for k in known})
    if found := near(name, names):
        return f"did you mean {' or '.join(before + n for n in found)}?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED]) or 'none'}{more}"
