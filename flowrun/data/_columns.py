"""Which columns of a table hold what, and what sources of such tables share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.config import ConfigError
from flowrun.data._captions import Lines
from flowrun.data._pictures import Pictures
from flowrun.spelling import suggest


@dataclass(kw_only=True, slots=True)
class Columns:
    id: str | None
    caption: str
    pictures: dict[str, str]  # input name -> column with the picture, or its path

    def __post_init__(self) -> None:
        if not self.pictures:
            raise ConfigError("data.columns.pictures", "is empty", "name at least image: COLUMN")
        if "prompt" in self.pictures:
            raise ConfigError("data.columns.pictures.prompt", "is the caption's name", "choose another name")

    def check(self, table: str, there: Sequence[str]) -> None:
        """A column that is not there at all is a wrong setting, not a fault of every line. Raises ConfigError."""
        asked = {"caption": self.caption, **{f"pictures.{name}": column for name, column in self.pictures.items()}}
        if self.id is not None:
            asked["id"] = self.id
        for name, column in asked.items():
            if column not in there:
                what = f"{table} has no column {column!r}, only {', '.join(there)}"
                raise ConfigError(f"data.columns.{name}", what, suggest(column, there))


class InColumns(Pictures):
    """Each picture that a column names is an input of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Pictures.Config):
        columns: Columns
        lines: Lines

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.names = (*config.columns.pictures, "prompt")
