"""From groups and overrides to a typed `Run`: where the options are, and Hydra's errors in one line each. No torch."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from flowrun import overrides
from flowrun.config import ConfigError, Run
from flowrun.entries import normalised
from flowrun.wording import check_fields, check_finite, from_omegaconf, suggest

HERE = Path(__file__).resolve().parent
CONF = next(path for path in (HERE / "conf", HERE.parent / "conf") if path.is_dir())  # in a wheel; in a checkout
# Options that people ask for and that cannot be, and why.
ABSENT = {("model", "bagel"): "neither diffusers nor transformers has BAGEL's network; model=qwen_image_edit_2511 changes pictures, too"}
MISSING_FOLDER = r"provider=.*, path=(.*) is not available"  # Hydra goes on with a warning

ConfigStore.instance().store("run_schema", Run)


def compose(texts: Sequence[str] = ()) -> Run:
    """The run that `python -m flowrun <texts>` would do. For notebooks and tests; takes no Hydra flags.

    Raises ConfigError."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    folders = option_folders()
    overrides.check(texts, option_names(folders))
    with reworded(folders), initialize_config_dir(str(CONF), version_base="1.3"):
        return to_run(hydra_compose("config", overrides=list(texts)))


def to_run(cfg: DictConfig) -> Run:
    """Types and rules across fields, and no key that the schema does not have. Raises ConfigError."""
    try:
        check_fields(cfg)
        check_finite(OmegaConf.to_container(cfg, resolve=True))
        run = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise from_omegaconf(error) from error
    for slot in ("shared", "rollout"):
        setattr(run.acceleration, slot, normalised(slot, getattr(run.acceleration, slot), CONF))
    return run


def changed(section: str, value: Mapping[str, Any]) -> list[str]:
    """Full keys below a section of a run that are not as conf/config.yaml has them: somebody set them, by whatever way."""
    general, found = _flat(OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml")[section]), section), _flat(value, section)
    removed = [key for key in general if not any(name == key or name.startswith(f"{key}.") for name in found)]
    return [*(key for key in found if key not in general or found[key] != general[key]), *removed]


def _flat(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Full key -> value, of all values that are no mappings."""
    flat: dict[str, Any] = {}
    for name, value in node.items():
        flat |= _flat(value, f"{key}.{name}") if isinstance(value, Mapping) else {f"{key}.{name}": value}
    return flat


def option_folders(config_dir: str | None = None) -> list[Path]:
    """Our own folder of options and the user's: --config-dir and FLOWRUN_CONF. Raises ConfigError for a missing one."""
    folders = [CONF]
    for key, name in (("--config-dir", config_dir), ("FLOWRUN_CONF", os.environ.get("FLOWRUN_CONF"))):
        if name is None or name.startswith("pkg://"):
            continue
        folder = Path(name.removeprefix("file://")).absolute()
        if not folder.is_dir():
            raise ConfigError(key, f"{folder} is no folder", "give a folder with options in it, GROUP/NAME.yaml")
        folders.append(folder)
    return folders


def option_names(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> the options that these folders hold; a name that begins with `_` is a part of others."""
    found: dict[str, set[str]] = {group: set() for group in overrides.LISTS}
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            if group != "." and not group.startswith("hydra") and not file.stem.startswith("_"):
                found.setdefault(group, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


@contextmanager
def reworded(folders: Sequence[Path]) -> Iterator[None]:
    """Errors of Hydra while it composes leave as ConfigError; any other error leaves as it is."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=MISSING_FOLDER)
            yield
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise _not_utf8(folders) from error
    except Exception as error:
        found = _from_hydra(error, option_names(folders))
        if found is None:
            raise
        raise found from error


def _from_yaml(error: MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark
    place = f"{mark.name}, line {mark.line + 1}" if mark else "a configuration file"
    what = f"is no valid YAML ({error.problem or error.context})"
    return ConfigError(place, what, "repair this line or the one before it")


def _from_hydra(error: Exception, options: dict[str, list[str]]) -> ConfigError | None:
    """Hydra's error while composing, or None when it is none of a user's. options: option names by group."""
    if isinstance(error, UserWarning) and (match := re.match(MISSING_FOLDER, str(error))):
        fix = "give a folder, or pkg://PACKAGE with an __init__.py"
        return ConfigError("hydra.searchpath", f"{match[1]} is not there", fix)
    if isinstance(error, ValueError) and re.match(r"Only one of --run|The --resolve flag|Expecting one subcommand", str(error)):
        return ConfigError("command line", str(error).rstrip("."), "--help lists the flags")
    if isinstance(error, MarkedYAMLError):
        return _from_yaml(error)
    if isinstance(error, OmegaConfBaseException):
        return from_omegaconf(error)
    if isinstance(error, MissingConfigException):
        return _missing_option(error, options)
    if isinstance(error, SearchPathException):
        what = str(error).removeprefix("Additional config directory ")
        return ConfigError("--config-dir", what, "give an existing folder")
    if isinstance(error, OverrideParseException):
        return ConfigError(error.override, "cannot be read", "write key=value, quoted for the shell: 'key=\"value\"'")
    return _composition(error, options) if isinstance(error, HydraException) else None


def _missing_option(error: MissingConfigException, options: dict[str, list[str]]) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return ConfigError("--config-name", f"there is no {name}.yaml", "leave it out, or name a file of --config-dir")
    known = error.options or options.get(group, [])
    return ConfigError(group, f"there is no option {name!r}", ABSENT.get((group, name.lower())) or _instead(name, known))


def _instead(name: str, options: Sequence[str]) -> str:
    """Those that hold the name, whatever stands between its letters and digits: sd3.5 is in sd3_5_medium. Else near ones and all."""
    if (bare := _bare(name)) and (holding := [option for option in options if bare in _bare(option)]):
        return f"did you mean {' or '.join(holding)}?"
    fix = suggest(name, options)
    if not fix.startswith("did"):
        return f"known: {', '.join(options)}" if options else fix
    return fix if set(options) == set(get_close_matches(name, options)) else f"{fix} options: {', '.join(options)}"


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _composition(error: Exception, options: dict[str, list[str]]) -> ConfigError:
    message = str(error)
    file = re.match(r"In '(.*?)': ", message)
    where = f" (in {file[1]}.yaml)" if file else ""
    inner = error.__cause__ or error.__context__
    if isinstance(inner, OmegaConfBaseException):
        override = re.match(r"Error merging override [+~]*(.*?)=", message)
        found = from_omegaconf(inner, name=override[1] if override else "", where=where)
        if file and found.key == file[1].partition("/")[0]:
            return ConfigError(f"{file[1]}.yaml", "does not say where its keys belong",
                               "its first line must be `# @package _global_`, and its keys those of a run")  # fmt: skip
        return _not_a_group(found, options) if "/" in found.key else found
    rest = message[file.end():] if file else message  # fmt: skip
    if match := re.match(r"Could not override '(.*?)'\. No match in the defaults list", rest):
        return ConfigError(match[1], "is no group" + where, suggest(match[1], options))
    if match := re.match(r"Multiple values for (\S+?)\.", rest):
        return ConfigError(match[1], "is chosen twice" + where, f"write {match[1]}=OPTION once, without +")
    if match := re.match(r"Could not append to config\. An item is already at '(.*?)'", rest):
        return ConfigError(match[1], "exists already", f"write {match[1]}=VALUE without +")
    if match := re.match(r"Could not delete from config\. '(.*?)' does not exist", rest):
        return ConfigError(f"~{match[1]}", "there is nothing to remove", suggest(match[1], options))
    if match := re.match(r"Ambiguous value for argument '(.*?)=(.*)'\n", rest):
        return ConfigError(match[1], "has several values, separated by commas",
                           f"add -m to sweep over them, or quote one value: '{match[1]}=\"{match[2]}\"'")  # fmt: skip
    return ConfigError("configuration", " ".join(message.split()), "see --help")


def _not_a_group(found: ConfigError, options: dict[str, list[str]]) -> ConfigError:
    """Slashes choose an option of a group, dots set a value."""
    if found.key in options:
        fix = f"put one into a folder of yours, --config-dir DIR, as {found.key}/NAME.yaml"
        return ConfigError(found.key, "has no options here", fix)
    dotted = found.key.replace("/", ".")
    near = get_close_matches(found.key, options, n=1)
    fix = (
        f"did you mean {near[0]}?" if near else f"groups: {', '.join(options)}; a value is set with dots, {dotted}=..."
    )
    return ConfigError(found.key, "there is no such group", fix)


def _not_utf8(folders: Sequence[Path]) -> ConfigError:
    """Which option file cannot be decoded; Hydra's error does not say."""
    for path in (p for folder in folders for p in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return ConfigError(str(path), f"is not UTF-8 ({error.reason} at byte {error.start})", "save it as UTF-8")
    return ConfigError("configuration", "a file is not UTF-8", "save it as UTF-8")
