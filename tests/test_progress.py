"""What a person watching sees."""

from __future__ import annotations

import io
import logging

import pytest

from flowrun.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("rank", "shown"), [(None, True), ("0", True), ("1", False)])
def test_one_bar_is_drawn_whatever_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch, rank: str | None, shown: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with Progress("train", 3, "step") as bar:
        bar.advance(lambda: "loss 1")
    assert ("train" in terminal.getvalue()) is shown


def test_without_a_terminal_the_end_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowrun"), Progress("cache", 2, "row") as bar:
        bar.advance(lambda: "1 MB")
        bar.advance(lambda: "2 MB")
    (line,) = caplog.messages
    assert line.startswith("cache 2/2: 2 MB, ")
