"""pytest tests/data/test_looking.py: a picture is looked at once, by whichever process, and again whenever it may have changed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from flowrun.cache import segments
from flowrun.cache.looks import Looks
from flowrun.config import Failure
from flowrun.data import _looking
from flowrun.data import _picture as picture
from flowrun.data._looking import PORTION, each_of, sizes_of
from flowrun.data._member import Member
from flowrun.data._picture import PictureFault

MANY = 10**6  # pixels


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that were opened, in order."""
    opened, check = [], picture.check

    def counted(file: Path, max_pixels: int, full: bool) -> tuple[int, int]:
        opened.append(file.name)
        return check(file, max_pixels, full)

    monkeypatch.setattr(picture, "check", counted)
    yield opened


def drawn(path: Path, height: int, width: int) -> Path:
    Image.effect_noise((width, height), 64).save(path)
    time.sleep(0.03)  # what changed within a tick of the clock is not remembered
    return path


def sizes(root: Path, files: list, full: bool = False, max_pixels: int = MANY) -> list[object]:
    """As a new process sees them."""
    looks = Looks(root)
    found = list(sizes_of(files, max_pixels, full, looks))
    looks.save()
    return found


def test_a_sound_picture_is_opened_once(tmp_path: Path, looked: list[str]) -> None:
    files = [drawn(tmp_path / f"{n}.png", 8 + n, 32) for n in range(3)]
    first = sizes(tmp_path / "cache", files)
    assert first == [(8, 32), (9, 32), (10, 32)] == sizes(tmp_path / "cache", files)
    assert looked == ["0.png", "1.png", "2.png"]


def test_one_of_which_only_the_header_was_read_is_decoded_when_that_is_asked_for(tmp_path: Path, looked: list[str]) -> None:
    whole = drawn(tmp_path / "a.png", 64, 64)
    torn = tmp_path / "torn.png"
    torn.write_bytes(whole.read_bytes()[:-2000])
    time.sleep(0.03)
    assert sizes(tmp_path / "cache", [whole, torn]) == [(64, 64), (64, 64)]
    assert isinstance(sizes(tmp_path / "cache", [whole, torn], full=True)[1], PictureFault)
    assert isinstance(sizes(tmp_path / "cache", [whole, torn], full=True)[1], PictureFault)  # a fault is never remembered
    assert looked == ["a.png", "torn.png", "a.png", "torn.png", "torn.png"]
    assert sizes(tmp_path / "cache", [whole]) == [(64, 64)] and len(looked) == 5  # what was decoded has a header too


def test_another_picture_under_the_same_name_is_looked_at(tmp_path: Path, looked: list[str]) -> None:
    file = drawn(tmp_path / "a.png", 8, 16)
    before = file.stat()
    assert sizes(tmp_path / "cache", [file]) == [(8, 16)]
    drawn(file, 16, 8)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sizes(tmp_path / "cache", [file]) == [(16, 8)] and len(looked) == 2


def test_a_limit_that_was_lowered_since_counts(tmp_path: Path) -> None:
    file = drawn(tmp_path / "a.png", 8, 16)
    assert sizes(tmp_path / "cache", [file]) == [(8, 16)]
    (found,) = sizes(tmp_path / "cache", [file], max_pixels=100)
    assert isinstance(found, PictureFault) and "128 pixels" in str(found)


def test_pictures_in_one_archive_are_told_apart(tmp_path: Path, looked: list[str]) -> None:
    parts = [drawn(tmp_path / f"{n}.png", 8 + n, 16).read_bytes() for n in range(2)]
    archive = tmp_path / "all.tar"
    archive.write_bytes(b"".join(parts))
    time.sleep(0.03)
    members = [Member(archive, "a", 0, len(parts[0])), Member(archive, "b", len(parts[0]), len(parts[1]))]
    assert sizes(tmp_path / "cache", members) == [(8, 16), (9, 16)] == sizes(tmp_path / "cache", members)
    assert looked == ["a", "b"]


def process_of(number: int) -> tuple[int, int]:
    if number % 50 == 7:
        raise PictureFault(f"{number} is no picture")
    return number, os.getpid()


def test_several_processes_find_what_one_does_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_looking, "_cores", lambda: 2)
    numbers = list(range(4 * PORTION))
    found = list(each_of(process_of, numbers, least=PORTION))
    alone = list(each_of(process_of, numbers, least=10**9))
    assert [str(f) if isinstance(f, Exception) else f[0] for f in found] == [
        str(f) if isinstance(f, Exception) else f[0] for f in alone
    ]
    assert {f[1] for f in alone if not isinstance(f, Exception)} == {os.getpid()}
    assert os.getpid() not in {f[1] for f in found if not isinstance(f, Exception)}


def test_a_picture_that_goes_after_it_was_looked_at_is_no_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = picture.check

    def looked_and_gone(file: Path, max_pixels: int, full: bool) -> tuple[int, int]:
        found = check(file, max_pixels, full)
        file.unlink()
        return found

    monkeypatch.setattr(picture, "check", looked_and_gone)
    assert sizes(tmp_path / "cache", [drawn(tmp_path / "a.png", 8, 16)]) == [(8, 16)]


def slow(number: int) -> int:
    if number:
        time.sleep(60)
    return os.getpid()


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("by", ["close", "kill"])
def test_nobody_waits_for_processes_of_no_more_use(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(_looking, "_cores", lambda: 2)
    monkeypatch.setattr(_looking, "PORTION", 1)
    found, began = each_of(slow, [0, 1, 2], least=1), time.monotonic()
    one = next(found)
    if by == "close":  # as an interrupted run does
        found.close()
    else:
        os.kill(one, signal.SIGKILL)
        with pytest.raises(Failure, match="was killed"):
            next(found)
    assert not alive(one) and time.monotonic() - began < 30


ALONE = """
import sys, time
from flowrun.data import _looking
from test_looking import slow
_looking._cores, _looking.PORTION = lambda: 2, 1
for process in _looking.each_of(slow, [0, 1, 2], least=1):
    print(process, flush=True)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them() -> None:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, env=found) as parent:
        one = int(parent.stdout.readline())
        parent.kill()
    for _ in range(100):
        if not alive(one):
            return
        time.sleep(0.1)
    os.kill(one, signal.SIGKILL)
    pytest.fail("it went on alone")


def test_what_may_not_be_read_or_written_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[str]) -> None:
    file = drawn(tmp_path / "a.png", 8, 16)
    sizes(tmp_path / "cache", [file])

    def refused(*given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(segments, "TensorFile", refused)
    monkeypatch.setattr(segments, "write_tensorfile", refused)
    assert sizes(tmp_path / "cache", [file]) == [(8, 16)] and len(looked) == 2
