"""python -m flowrun.cache stats|verify|prune PATH, and show RUN_DIR. Exit codes: 0 all is well, 1 faults were found, 2 wrong use."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from flowrun.cache.facade import Cache
from flowrun.config import ConfigError, UserError
from flowrun.utf8 import speak_utf8

SHOWN = 20  # faults printed in full


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        if options.verb == "show":
            return _show(options)
        return VERBS[options.verb](Cache(options.path), options)
    except UserError as error:
        sys.stderr.write(f"flowrun.cache: {error}\n")
        return error.exit_code


def _stats(cache: Cache, options: argparse.Namespace) -> int:
    _table(asdict(cache.stats()))
    return 0


def _verify(cache: Cache, options: argparse.Namespace) -> int:
    findings = cache.verify()
    for finding in findings[:SHOWN]:
        sys.stdout.write(f"{finding}\n")
    if findings:
        sys.stdout.write(f"{len(findings)} faults; run stage=cache to make the damaged and missing values again\n")
        return 1
    sys.stdout.write("every value and manifest was read; no fault\n")
    return 0


def _prune(cache: Cache, options: argparse.Namespace) -> int:
    _table(asdict(cache.prune(options.superseded)))
    return 0


def _show(options: argparse.Namespace) -> int:
    from PIL import Image

    from flowrun.decoded import cached_pictures  # imports torch and the run, which nothing else here needs

    if options.out.suffix not in Image.registered_extensions() or not options.out.absolute().parent.is_dir():
        raise ConfigError("--out", f"{options.out} cannot be written", "name a picture, e.g. cached.png, in an existing folder")
    sheet = cached_pictures(options.run_dir)
    sheet.save(options.out)
    sys.stdout.write(f"{options.out.absolute()}\n")
    return 0


VERBS = {"stats": _stats, "verify": _verify, "prune": _prune}


def _table(numbers: dict[str, int]) -> None:
    for name, number in numbers.items():
        sys.stdout.write(f"{name.replace('_', ' '):<16} {number:>15,}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowrun.cache", description="Look at, check or clean a cache of encoded rows."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="stats|verify|prune|show")
    texts = {"stats": "count rows, values, bytes, orphans",
             "verify": "read everything again; list what is damaged or missing, with its rows",
             "prune": "remove what no manifest needs, damaged values and what killed writers left"}  # fmt: skip
    for name, text in texts.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("path", metavar="PATH", help="the cache's folder, e.g. outputs/cache")
        if name == "prune":
            verb.add_argument(
                "--superseded",
                action="store_true",
                help="first forget all but the newest manifest of each model and data set",
            )
    shows = "decode the cached targets of a run's rows to a sheet of pictures"
    show = verbs.add_parser("show", help=shows, description=shows)
    show.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a cache or train run's directory")
    show.add_argument("--out", type=Path, default=Path("cached.png"), help="the picture to write (%(default)s)")
    return parser


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
