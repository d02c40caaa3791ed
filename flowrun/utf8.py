"""Text of any script on any machine: file names, arguments and what is printed, whatever the locale. No torch."""

from __future__ import annotations

import os
import sys


def speak_utf8() -> None:
    """Called first by each command. Does not return where the locale knows other letters: the same command then starts
    again in Python's UTF-8 mode, since arguments and names of files have been read wrongly by now."""
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    sys.stdout.reconfigure(errors="backslashreplace")  # PYTHONIOENCODING may name a smaller set of letters
