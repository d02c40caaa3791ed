"""Signals while a stage works, and after it has failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from flowrun.stop import Stop

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """Both raise KeyboardInterrupt, as around a command, and are put back."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = [signal.signal(number, signal.default_int_handler) for number in BOTH]
    yield before
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_asks_and_the_second_ends_at_once(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        os.kill(os.getpid(), number)
    assert all(signal.getsignal(n) is signal.default_int_handler for n in BOTH)


def failing() -> None:
    with pytest.raises(ArithmeticError), Stop():
        raise ArithmeticError


def test_a_rank_that_has_failed_is_not_disturbed_by_the_launcher_and_is_by_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    failing()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_one_process_that_has_failed_can_be_ended_by_both() -> None:
    failing()
    for number in BOTH:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
