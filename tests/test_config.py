"""Rules across the fields of a run; each message names the setting and what would be right."""

from dataclasses import replace

import pytest

from flowrun.compose import compose
from flowrun.config import ConfigError, DataError, Failure, Stopped, UserError

RULES = [
    ("train", {"steps": 0}, "train.steps: is 0; must be at least 1"),
    ("train", {"batch_size": 0}, "train.batch_size: is 0; must be at least 1"),
    ("train", {"keep": 0}, "train.keep: is 0; must be at least 1"),
    ("train", {"epochs": 2}, "train.steps, train.epochs: both are given; give one and set the other to null"),
    ("train", {"steps": None}, "train.steps, train.epochs: neither is given; give one and set the other to null"),
    ("optimizer", {"lr": float("nan")}, "optimizer.lr: is nan; must be at least 0"),
    ("optimizer", {"lr": -1.0}, "optimizer.lr: is -1.0; must be at least 0"),
    ("optimizer", {"warmup_steps": -1}, "optimizer.warmup_steps: is -1; must be at least 0"),
    ("optimizer", {"ema": 1.0}, "optimizer.ema: is 1.0; a decay lies in [0, 1); 0 keeps no average"),
    ("optimizer", {"clip": 0.0}, "optimizer.clip: is 0.0; give a positive norm, or null for no clipping"),
    ("cache", {"flush_mb": 0}, "cache.flush_mb: is 0; must be positive"),
    ("cache", {"flush_s": -1}, "cache.flush_s: is -1; must be positive"),
    ("sample", {"steps": 0}, "sample.steps: is 0; must be at least 1"),
    ("sample", {"seeds": []}, "sample.seeds: is empty although there is something to draw; give at least one seed, e.g. [0]"),
    ("", {"processes": 0}, "processes: is 0; must be at least 1"),
    ("", {"run_id": "a/b"}, "run_id: is 'a/b'; it stands in a directory's name: give up to 100 letters, digits and . _ + -"),
    ("", {"run_id": ".."}, "run_id: is '..'; it stands in a directory's name: give up to 100 letters, digits and . _ + -"),
    ("", {"run_id": ""}, "run_id: is ''; it stands in a directory's name: give up to 100 letters, digits and . _ + -"),
    ("", {"model": None}, "model: is None; choose an option, model=NAME; --help lists them"),
    ("", {"adapter": "lora"}, "adapter: is lora; choose an option, adapter=NAME; --help lists them"),
]


@pytest.fixture(scope="module")
def run():
    return compose()


@pytest.mark.parametrize(("section", "change", "message"), RULES)
def test_rule(run, section, change, message):
    with pytest.raises(ConfigError) as caught:
        replace(getattr(run, section) if section else run, **change)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"steps": None, "epochs": 1}),
        ("optimizer", {"lr": 0.0, "clip": None, "ema": 0.0}),
        ("sample", {"prompts": [], "seeds": []}),
        ("", {"tracker": None}),
    ],
)
def test_what_the_rules_admit(run, section, change):
    replace(getattr(run, section) if section else run, **change)


def test_exit_codes():
    errors = ConfigError("a", "b", "c"), DataError(["a: b"]), Failure("a"), Stopped("a")
    assert [error.exit_code for error in errors] == [2, 2, 1, 130]
    assert all(isinstance(error, UserError) for error in errors)
