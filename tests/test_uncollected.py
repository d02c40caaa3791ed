"""The search for garbage rests while a run is prepared, and is as before afterwards, whatever happened."""

import gc
import weakref

import pytest

from flowrun.uncollected import set_apart, uncollected


class Ring:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("before", [True, False])
def test_the_search_is_off_inside_and_as_it_was_afterwards(before):
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(RuntimeError), uncollected():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()


def test_what_is_set_apart_is_passed_over_and_found_afterwards():
    old = weakref.ref(Ring())
    with pytest.raises(RuntimeError), set_apart():
        new = weakref.ref(Ring())
        gc.collect()
        assert old() is not None and new() is None
        raise RuntimeError
    gc.collect()
    assert old() is None and gc.get_freeze_count() == 0
