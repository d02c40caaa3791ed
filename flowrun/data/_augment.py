"""How a row's pictures and caption vary: N variants of each row, every one fixed by (row id, number).

A visit of a row takes one of them at random, so that training sees change while the cache holds N honest values; with
one variant only, a single draw would be frozen into the cache for ever, which is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flowrun.config import ConfigError
from flowrun.graph import seed_of

CENTRE = (0.5, 0.5)


class Several(Enum):
    rows = "rows"  # each caption of a picture makes a row of its own
    random = "random"  # one of them, drawn for each variant


@dataclass(kw_only=True, slots=True)
class CaptionAugment:
    several: Several
    shuffle: bool
    keep: int
    drop: float
    separator: str

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ConfigError("data.augment.caption.drop", f"is {self.drop}", "a chance in [0, 1)")
        if self.keep < 0:
            raise ConfigError("data.augment.caption.keep", f"is {self.keep}", "give 0 or more")
        if not self.separator:
            raise ConfigError("data.augment.caption.separator", "is empty", "give what stands between tags, e.g. ','")

    @property
    def on(self) -> bool:
        return self.several is Several.random or self.shuffle or self.drop > 0


@dataclass(kw_only=True, slots=True)
class Augment:
    variants: int
    flip: float
    crop: bool
    caption: CaptionAugment

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ConfigError("data.augment.flip", f"is {self.flip}", "a chance in [0, 1]")
        on = [name for name, is_on in (("flip", self.flip > 0), ("crop", self.crop), ("caption", self.caption.on)) if is_on]
        if self.variants < 1:
            raise ConfigError("data.augment.variants", f"is {self.variants}", "give 1 for none, or how many")
        if self.variants == 1 and on:
            what = f"is 1, so that {', '.join(on)} would be drawn once and stay for ever"
            raise ConfigError("data.augment.variants", what, "give 2 or more, e.g. 8: each visit takes one of them")
        if self.variants > 1 and not on:
            what = f"is {self.variants}, but nothing varies"
            raise ConfigError("data.augment.variants", what, "give 1, or set flip, crop or caption")

    def look(self, row_id: str, number: int, captions: Sequence[str]) -> Look:
        """What variant `number` of the row sees."""
        if self.variants == 1:
            return Look(captions[0])
        draws = random.Random(seed_of("augment", row_id, number))
        flipped, at = draws.random() < self.flip, (draws.random(), draws.random())
        caption = captions[draws.randrange(len(captions))] if self.caption.several is Several.random else captions[0]
        return Look(self._tags(caption, draws), flipped, at if self.crop else CENTRE)

    def _tags(self, caption: str, draws: random.Random) -> str:
        """Tags shuffled and dropped, but for the first `keep`; of the others one stays at least."""
        rule = self.caption
        if not rule.shuffle and not rule.drop:
            return caption
        tags = [tag.strip() for tag in caption.split(rule.separator)]
        kept, rest = tags[: rule.keep], tags[rule.keep :]
        if rule.shuffle:
            draws.shuffle(rest)
        rest = [tag for tag in rest if draws.random() >= rule.drop] or rest[: 0 if kept else 1]
        return f"{rule.separator} ".join([*kept, *rest])


@dataclass(frozen=True, slots=True)
class Look:
    """at: where the cut lies in what is cut away, (left to right, top to bottom) in [0, 1]."""

    caption: str
    flipped: bool = False
    at: tuple[float, float] = CENTRE
