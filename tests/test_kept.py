"""Copies of weights that stand in for others, and how slowly averages follow."""

import pytest
import torch
from torch.nn import Linear

from flowrun.config import ConfigError
from flowrun.optim.decay import Decay, Kind
from flowrun.optim.kept import Kept


def made():
    torch.manual_seed(0)
    layer = Linear(3, 2)
    return layer, Kept(list(layer.parameters()))


def change(layer, by):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(by)


def test_a_copy_stands_in_and_the_weights_return_also_after_an_error():
    layer, kept = made()
    kept.keep("old")
    first = layer.weight.clone()
    change(layer, 1.0)
    now = layer.weight.clone()
    with pytest.raises(KeyError, match="x"), kept.applied("old"):
        assert torch.equal(layer.weight, first)
        raise KeyError("x")
    assert torch.equal(layer.weight, now)
    with kept.applied("old"), pytest.raises(RuntimeError, match="already"), kept.applied("old"):
        pass


def test_blending_is_the_weighted_mean():
    layer, kept = made()
    kept.keep("old")
    first = layer.weight.clone()
    change(layer, 1.0)
    kept.blend("old", 0.3)
    with kept.applied("old"):
        assert torch.allclose(layer.weight, first + 0.7, atol=1e-6)
    kept.blend("old", 0.0)
    with kept.applied("old"):
        assert torch.equal(layer.weight, first + 1.0)


def test_copies_of_other_weights_are_refused():
    layer, kept = made()
    kept.keep("old")
    saved = {name: {key: copy.clone() for key, copy in copies.items()} for name, copies in kept.state().items()}
    change(layer, 1.0)
    kept.load("old", saved["old"])
    with kept.applied("old"):
        assert torch.equal(layer.weight, saved["old"]["0"])
    with pytest.raises(ValueError, match="other parameters"):
        kept.load("old", {"0": torch.zeros(1)})


def decay(kind, value=0.995, length=None, flat=None, ramp=None):
    return Decay(kind=kind, decay=value, length=length, flat=flat, ramp=ramp)


@pytest.mark.parametrize(
    "made, expected",
    [
        (decay(Kind.power), {0: 0.1, 1: 2 / 11, 10: 0.55, 100: 0.9181818, 1000: 0.991089}),
        (decay(Kind.constant, 0.3), {0: 0.3, 99: 0.3}),
        (decay(Kind.linear, 0.8, length=4), {0: 0.0, 2: 0.4, 4: 0.8, 9: 0.8}),
        (decay(Kind.piecewise_linear, 0.5, flat=3, ramp=0.1), {0: 0.0, 3: 0.0, 5: 0.2, 20: 0.5}),
        (decay(Kind.cosine, 0.8, length=4), {0: 0.0, 2: 0.4, 4: 0.8, 9: 0.8}),
        (decay(Kind.warmup_cosine, 0.8, length=4, flat=2), {0: 0.0, 2: 0.0, 4: 0.4, 6: 0.8}),
    ],
)
def test_decays_have_their_stated_values(made, expected):
    assert {t: pytest.approx(made.at(t), abs=1e-6) for t in expected} == expected


def test_fields_that_a_decay_does_not_read_are_refused():
    with pytest.raises(ConfigError, match=r"task\.old\.ramp"):
        decay(Kind.constant, ramp=0.1)
    with pytest.raises(ConfigError, match=r"task\.old\.length"):
        decay(Kind.linear)
