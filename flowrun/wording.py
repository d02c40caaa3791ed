"""What omegaconf says about a configuration, in our own words: `<key>: <what is wrong>; <what would be right>`.

omegaconf's errors have several lines and name its own and our classes. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from flowrun.config import ConfigError
from flowrun.spelling import near, suggest

# Settings that exist no longer: where they went and how to choose them there.
REMOVED = {
    "model.attn_backend": ("was moved to acceleration.shared.attention_backend",
                           "write 'acceleration/shared=[attention_backend]' acceleration.shared.attention_backend.backend=NAME"),
}  # fmt: skip

KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "String": "text",
    "Path": "a path",
}


def refuse_removed(key: str) -> None:
    if key in REMOVED:
        raise ConfigError(key, *REMOVED[key])


def unknown(key: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> ConfigError:
    """A key that no section has. known: names beside it; elsewhere: full keys of other sections, e.g. optimizer.lr."""
    if key in REMOVED:
        return ConfigError(key, *REMOVED[key])
    section, _, name = key.rpartition(".")
    known, prefix = list(known), f"{section}." if section else ""
    same = [other for other in elsewhere if other.rpartition(".")[2] == name and other != key]
    if same and not near(name, known):
        return ConfigError(key, "is no setting", f"did you mean {' or '.join(same[:3])}?")
    return ConfigError(key, "is no setting", suggest(name, known, prefix))


def field_names(schema: Any) -> list[str]:
    return [f.name for f in fields(schema)]


def leaves(node: Any, key: str = "") -> Iterator[str]:
    """Full keys of all values below `node`; lists count as values."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        yield key
        return
    for name in node:
        yield from leaves(node._get_node(name), f"{key}.{name}" if key else str(name))


def check_finite(node: Any, key: str = "") -> None:
    """No number below `node` (plain data) is nan or infinite. Raises ConfigError."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        check_finite(value, f"{key}.{name}" if key else str(name))
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(key, f"is {node}", "give a finite number")


def check_fields(node: Container, key: str = "") -> None:
    """Typed sections have exactly their schema's fields, also after `+key=value` and `~key`, and nothing is `???`.

    Raises ConfigError."""
    _refuse_strangers(node, key)
    absent = sorted(f"{key}.{name}" if key else name for name in {*OmegaConf.missing_keys(node), *_removed(node)})
    if absent:
        what = "is not given" if len(absent) == 1 else "are not given"
        raise ConfigError(", ".join(absent), what, f"write {absent[0]}=VALUE or put it into the option's file")


def _sections(node: Container, key: str) -> Iterator[tuple[DictConfig, str]]:
    """`node` and all mappings below it, with their full keys."""
    if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
        yield node, key
        for name in node:
            yield from _sections(node._get_node(name), f"{key}.{name}" if key else str(name))


def _refuse_strangers(node: Container, key: str) -> None:
    for section, full in _sections(node, key):
        schema = OmegaConf.get_type(section)
        for name in section if is_dataclass(schema) else ():
            if name not in field_names(schema):
                raise unknown(f"{full}.{name}" if full else str(name), field_names(schema), leaves(section._get_root()))


def _removed(node: Container) -> Iterator[str]:
    for section, full in _sections(node, ""):
        schema = OmegaConf.get_type(section)
        for name in field_names(schema) if is_dataclass(schema) else ():
            if name not in section._content:
                yield f"{full}.{name}" if full else name


def from_omegaconf(error: OmegaConfBaseException, key: str = "", name: str = "", where: str = "") -> ConfigError:
    """key: the section that was checked, when it is not the root. name: the setting in it, for errors that do not say.
    where: the file it stands in, as ` (in x.yaml)`."""
    full = ".".join(part for part in (key, str(error.full_key or name)) if part) or "configuration"
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        parent = error.parent_node
        known = [] if parent is None else list(parent.keys())
        found = unknown(full, known, leaves(parent._get_root()) if parent is not None and not key else ())
        if parent is not None and get_origin(parent._metadata.ref_type) is dict:  # any names may be in it
            found = ConfigError(full, "is not there yet", f"add it with +{full}=VALUE")
    elif isinstance(error, InterpolationKeyError):
        missing = re.search(r"Interpolation key '(.*?)'", str(error))
        what = f"refers to ${{{missing[1] if missing else ''}}}, which does not exist"
        found = ConfigError(full, what, "name an existing key")
    else:
        found = ConfigError(full, *_value(str(error).partition("\n")[0], full))
    return ConfigError(found.key, found.what + where, found.fix)


WRONG_VALUE = (  # omegaconf's message -> (what, fix)
    (
        r"Value '(?P<v>.*)' of type '.*' could not be converted to (?P<kind>\w+)",
        "{v!r} has the wrong type",
        "give {kind}",
    ),
    (r"Value '(?P<v>.*)' is not a valid bool", "{v!r} has the wrong type", "give true or false"),
    (r"Cannot convert '\w+' to string: '(?P<v>.*)'$", "{v} has the wrong type", "give text"),
    (r".*(not Optional|Non optional|Incompatible value 'None')", "is null", "give a value"),
    (r".*(not a ListConfig|to List)", "is no list", "give a list, [a,b]"),
    (
        r"Cannot merge DictConfig with ListConfig",
        "is a mapping where a list is needed, or a list for a mapping",
        "change it",
    ),
    (r"Cannot assign (?P<v>\w+) to Dict", "is of type {v}", "give a mapping, {{name: value}}"),
    (
        r".* is not a subclass of (str|int|float|bool)\. value: (?P<v>.*)",
        "{v} has the wrong type",
        "give another value",
    ),
    (r".* is not a subclass of \w+\. value: (?P<v>.*)", "is {v}, not a section", "give its fields, {key}.FIELD=VALUE"),
    (r".* does not support deletion", "cannot be removed", "give a value, or null where the setting admits it"),
    (r".* is not a subclass of ", "is no section", "give its fields, {key}.FIELD=VALUE"),
    (r".*Environment variable '(?P<v>.*)' not found", "needs the environment variable {v}, which is not set", "set it"),
)


def _value(message: str, key: str) -> tuple[str, str]:
    """(what, fix) of a value of the wrong type."""
    if match := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", message, re.DOTALL):
        return f"there is no {match[1]!r}", suggest(match[1], match[2].split(", "))
    for pattern, what, fix in WRONG_VALUE:
        if match := re.match(pattern, message, re.DOTALL):
            found = match.groupdict()
            found["kind"] = KINDS.get(found.get("kind", ""), "another value")
            return what.format(**found), fix.format(**found, key=key)
    return message, "see omegaconf's documentation"


def first_line(error: BaseException) -> str:
    """What a library says, in one line."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
