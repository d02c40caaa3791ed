"""What the command line says, looked at before Hydra: mistakes that Hydra accepts, or answers with a parser's message.

No torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from flowrun.config import ConfigError
from flowrun.wording import refuse_removed

LISTS = ("acceleration/rollout", "acceleration/shared", "reward", "tracker")  # groups that take several options, as a list
PAIRS = {"[": "]", "{": "}", "(": ")"}


def check(texts: Sequence[str], groups: Collection[str]) -> list[Override]:
    """The overrides, parsed. `groups`: names of all groups. Raises ConfigError."""
    for text in texts:
        refuse_removed(text.partition("=")[0].lstrip("+~"))
    parser = OverridesParser.create()
    parsed = [_parse(parser, texts, index) for index in range(len(texts))]
    for override in parsed:
        if override.key_or_group in groups and not override.is_delete():
            _check_choice(override.key_or_group, override)
    _refuse_twice(parsed)
    chosen = {override.key_or_group for override in parsed if "/" in override.key_or_group}
    for override in parsed:
        key = override.key_or_group
        if "/" not in key and key.replace(".", "/") in chosen & set(groups):
            group = key.replace(".", "/")
            raise ConfigError(key, f"is set as a value while {group} chooses its options",
                              f"choose with {group}=[NAME,...] and set fields with {key}.NAME.FIELD=...")  # fmt: skip
    return parsed


def swept(parsed: Sequence[Override]) -> list[str]:
    """Keys that take several values with -m."""
    return [override.get_key_element().lstrip("+") for override in parsed if override.is_sweep_override()]


def _values(override: Override) -> Iterator[Any]:
    """The value, or each value of a sweep."""
    value = override.value()
    if override.is_choice_sweep():
        yield from value.list
    elif not override.is_sweep_override():
        yield value


def _refuse_twice(parsed: Sequence[Override]) -> None:
    """An option that is chosen in one argument and appended in another is merged by Hydra without a word."""
    for group in LISTS:
        given = [o for o in parsed if o.key_or_group == group and not o.is_delete() and not o.is_sweep_override()]
        names = [str(name) for o in given for name in (o.value() if isinstance(o.value(), list) else [o.value()])]
        if any(o.is_add() for o in given) and (twice := sorted({name for name in names if names.count(name) > 1})):
            raise ConfigError(group, f"{', '.join(twice)} is chosen twice", "name each option once")


def _check_choice(group: str, override: Override) -> None:
    several = group in LISTS
    right = f"'{group}=[NAME,...]'" if several else f"{group}=NAME"
    for value in _values(override):
        if value is None:
            none = f"{group}=[] chooses none" if several else f"choose an option, {right}, or leave it out"
            raise ConfigError(group, "null is no option", none)
        if isinstance(value, list):
            names = [str(name) for name in value]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(group, f"{', '.join(twice)} is chosen twice", "name each option once")
            if not several:
                raise ConfigError(group, "takes one option, not a list", f"write {right}")
        elif not isinstance(value, str) and type(value).__name__ != "QuotedString":
            shown = override.get_value_string()
            fix = f"choose with {right}; a value is set with {group}.FIELD=..."
            raise ConfigError(group, f"{shown} is no option's name", fix)


def _parse(parser: OverridesParser, texts: Sequence[str], index: int) -> Override:
    text = texts[index]
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        raise ConfigError(text, "has no value", f"write {text}=VALUE")
    if not key.strip("+~"):
        raise ConfigError(text, "has no key", f"write KEY{text}")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        raise ConfigError(key, *_quoting(parser, key, value, texts[index + 1 :])) from error


def _quoting(parser: OverridesParser, key: str, value: str, rest: Sequence[str]) -> tuple[str, str]:
    """(what, fix) for a value that the parser cannot read: the way to write it that it can."""
    joined = _until_closed(value, rest)
    if joined != value:
        whole = f"{key}={joined}"
        written = whole if _readable(parser, whole) else f"{key}={_quoted(parser, joined)}"
        return "the shell split the value at its spaces", f"quote the whole argument: {shlex.quote(written)}"
    what, written = f"the value {value!r} cannot be read", f"{key}={_quoted(parser, value)}"
    if _readable(parser, written):
        return what, f"quote it twice, for the shell and inside: {shlex.quote(written)}"
    return what, "write it in a file of your own, --config-dir DIR, or see Hydra's override grammar"


def _until_closed(value: str, rest: Sequence[str]) -> str:
    """`value` with as many of the arguments after it as its brackets need."""
    for more in (*rest, ""):
        if all(value.count(left) <= value.count(right) for left, right in PAIRS.items()):
            break
        value = f"{value} {more}".rstrip()
    return value


def _quoted(parser: OverridesParser, value: str) -> str:
    """`value` in double quotes, or, for a list, each of its parts that needs them."""
    if value.startswith("[") and value.endswith("]"):
        parts = [part.strip() for part in value[1:-1].split(",")]
        return "[" + ",".join(part if _readable(parser, f"x={part}") else _double(part) for part in parts) + "]"
    return _double(value)


def _double(text: str) -> str:
    return '"' + text.strip("\"'").replace('"', '\\"') + '"'


def _readable(parser: OverridesParser, text: str) -> bool:
    try:
        parser.parse_override(text)
    except HydraException:
        return False
    return True
