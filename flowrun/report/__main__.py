from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrun.config import UserError
from flowrun.report import PAGE, __doc__, write
from flowrun.utf8 import speak_utf8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.report", description=__doc__.partition(":")[0])
    parser.add_argument("folder", type=Path, metavar="RUN_OR_SWEEP", help="the directory of a run or of a sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where the page goes; else {PAGE} in that directory")
    given = parser.parse_args(arguments)
    try:
        page = write(given.folder, given.out)
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{page.absolute()}\n")
    return 0


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
