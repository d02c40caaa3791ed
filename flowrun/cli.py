"""The command line: Hydra composes, mistakes become one line; the run, its ranks or a sweep's jobs start. No torch.

Exit codes: 0 done, 1 failed, 2 the configuration or the data is wrong, 130 stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any, NoReturn

from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from flowrun import launch, overrides
from flowrun.compose import CONF, option_folders, option_names, reworded, to_run
from flowrun.config import ConfigError, Run, UserError, one_name
from flowrun.sweep import REASON, Sweep
from flowrun.sweep.stopping import Asked
from flowrun.uncollected import uncollected
from flowrun.utf8 import speak_utf8

# Flags that choose files: a sweep's jobs need them too.
FILE_FLAGS = {"config_dir": "--config-dir", "config_name": "--config-name", "config_path": "--config-path"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors that are not the user's leave as they are, with a traceback."""
    if argv is None:
        speak_utf8()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _sigterm_interrupts():
            return _command(arguments)
    except UserError as error:
        if launch.rank() == 0 or not error.by_all:
            sys.stderr.write(f"flowrun: {error}\n")
        if launch.rank() == 0 and REASON in os.environ:
            Path(os.environ[REASON]).write_text(str(error), encoding="utf-8")
        return error.exit_code
    except SystemExit as error:  # Hydra's own: --version and the like, or a --package that is not there
        return ConfigError.exit_code if error.code else 0
    except KeyboardInterrupt:
        if launch.rank() == 0:
            sys.stderr.write("flowrun: stopped\n")
        return launch.STOPPED


def _command(arguments: Sequence[str]) -> int:
    flags = _parse(arguments)
    wants_help = flags.help
    if wants_help:  # composed like a run: Hydra's own listing of the groups takes as long as all the rest
        flags.help = flags.cfg = flags.info = None
        flags.multirun, flags.overrides = False, [*flags.overrides, "hydra.mode=RUN"]
    folders = option_folders(flags.config_dir)
    options = option_names(folders)
    parsed = overrides.check(flags.overrides, options)
    sweep = _sweep(flags, parsed)
    if sweep.dry:
        flags.overrides = [*flags.overrides, f"hydra.sweep.dir={sweep.written}"]
    try:
        if flags.multirun:  # a file that asks for a sweep is seen only when the first job starts
            sweep.check()
        with reworded(folders), _environment(HYDRA_FULL_ERROR="1", FLOWRUN_RUN_ID=sweep.run_id), Asked(sweep.written) as asked:
            composed = _compose(flags, sweep, overrides.swept(parsed))
        if asked.came:
            raise KeyboardInterrupt
    finally:
        failed = sweep.finish()
    if composed is None:
        return failed
    cfg, template = composed
    if wants_help:
        sys.stdout.write(_help(cfg, template, options))
        return 0
    with _environment(FLOWRUN_RUN_ID=sweep.run_id):  # where the configuration takes its run_id from
        run = to_run(cfg)
    return _start(run, arguments)


def _compose(flags: Namespace, sweep: Sweep, swept: Sequence[str]) -> tuple[DictConfig, str] | None:
    """Let Hydra do what the flags ask for: the run and the help text's template; None when it was a sweep, whose
    jobs have run by then, or something to show (--cfg, --info)."""
    composed: list[tuple[DictConfig, str]] = []

    def task(cfg: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN:
            keys = [*swept, *(hydra.sweeper.get("params") or {})]
            found_by = [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
            return sweep.job(hydra.job.num, hydra.overrides.task, keys, found_by, OmegaConf.to_object(cfg.multirun))
        composed.append((cfg, hydra.help.template))
        return None

    version.setbase("1.3")
    parser = get_args_parser()
    _run_hydra(args=flags, args_parser=parser, task_function=task, config_path=str(CONF), config_name="config")
    return composed[0] if composed else None


def _start(run: Run, arguments: Sequence[str]) -> int:
    if launch.inside_ranks():
        run.processes = launch.world(run.processes)
        launch.quiet_torch()
    elif run.processes > 1 and not run.dry_run:
        return launch.start_ranks(run.processes, arguments, run.run_id)
    with uncollected():
        from flowrun.run import execute  # imports torch, which nothing above needs

    execute(run)
    return 0


def _parse(arguments: Sequence[str]) -> Namespace:
    """Hydra's flags; `overrides` are the settings, wherever they stand. Raises ConfigError."""
    parser = get_args_parser()
    parser.error = _refuse
    flags, rest = parser.parse_known_args(arguments)
    if any(text.startswith("-") for text in rest):
        _refuse(f"there is no flag {next(text for text in rest if text.startswith('-'))}")
    if flags.experimental_rerun is not None:
        what = "needs files that flowrun does not write"
        raise ConfigError("--experimental-rerun", what, "go on with a run by resume=DIR")
    flags.overrides = [*flags.overrides, *rest]
    return flags


def _help(cfg: DictConfig, template: str, options: Mapping[str, Sequence[str]]) -> str:
    """The text of conf/hydra/help with the groups and the composed run put in."""
    groups = "\n".join(f"{group}: {', '.join(names)}" for group, names in options.items() if names)
    return Template(template).safe_substitute(APP_CONFIG_GROUPS=groups, CONFIG=OmegaConf.to_yaml(cfg))


def _refuse(message: str) -> NoReturn:
    raise ConfigError("command line", message, "--help lists flags, groups and settings")


def _given(parsed: Sequence[Override], key: str) -> Any:
    """The last value given to `key`, None without one or when it is swept."""
    given = [override for override in parsed if override.key_or_group == key and not override.is_sweep_override()]
    return given[-1].value() if given else None


def _sweep(flags: Namespace, parsed: Sequence[Override]) -> Sweep:
    run_id = _given(parsed, "run_id")
    run_id = launch.new_run_id() if run_id is None else str(run_id)
    if "${" not in run_id:  # what it refers to is looked up later, by Hydra
        one_name("run_id", run_id)
    outputs = Path(os.environ.get("FLOWRUN_OUTPUTS", "outputs")).absolute()
    files = [(flag, getattr(flags, name)) for name, flag in FILE_FLAGS.items() if getattr(flags, name) is not None]
    dry = _given(parsed, "dry_run") is True
    return Sweep(run_id, outputs / "sweeps" / run_id, [word for pair in files for word in pair],
                 flags.overrides, dry)  # fmt: skip


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set for what runs inside, then as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C until a stage handles both; outside the main thread it keeps its meaning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
