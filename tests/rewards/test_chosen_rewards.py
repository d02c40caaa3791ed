"""Rewards are chosen as a list, checked before the run, and one class can serve under two names."""

import pytest
import torch

from flowrun.compose import compose
from flowrun.config import ConfigError
from flowrun.rewards import Reward, choose

RED = {"kind": "colour", "weight": 1.0, "batch_size": 64, "which": "red"}


class Own(Reward):
    packages = {"no_such_package": "pip install it"}

    def score(self, images, prompts, rows):
        return torch.zeros(len(images))


class Light(Own):
    packages = {}


def test_a_list_of_options_becomes_rewards_by_name():
    run = compose(["reward=[red,jpeg_size]", "reward.red.weight=0.5", "reward.jpeg_size.batch_size=2", "reward.red.which=blue"])
    chosen = choose(run.reward, None)
    assert list(chosen) == ["red", "jpeg_size"]
    assert (chosen["red"].weight, chosen["jpeg_size"].weight, chosen["jpeg_size"].batch_size) == (0.5, 1.0, 2)
    assert chosen["red"].reward.config.which.value == "blue"


def test_no_reward_is_chosen_by_itself():
    assert compose().reward is None and choose(None, None) == {}


def test_one_class_under_two_names_and_a_class_of_ones_own():
    chosen = choose({"red": RED, "sea": {**RED, "which": "blue"},
                     "own": {"kind": f"{__name__}:Light", "weight": 0.0, "batch_size": 1}}, None)  # fmt: skip
    assert type(chosen["red"].reward) is type(chosen["sea"].reward) and isinstance(chosen["own"].reward, Light)
    assert chosen["own"].weight == 0


@pytest.mark.parametrize(("settings", "words"), [
    ("red", ["reward: is 'red'", "'reward=[NAME,...]'"]),
    ({"red": 1}, ["reward.red", "is 1"]),
    ({"red": {**RED, "kind": "color"}}, ["reward.red.kind", "did you mean colour"]),
    ({"red": {k: v for k, v in RED.items() if k != "kind"}}, ["reward.red.kind", "is not given"]),
    ({"red": {**RED, "which": "pink"}}, ["reward.red.which", "pink"]),
    ({"red": {**RED, "wich": "red"}}, ["reward.red.wich", "did you mean reward.red.which"]),
    ({"red": {**RED, "batch_size": 0}}, ["reward.red.batch_size: is 0", "at least 1"]),
    ({"red": {**RED, "weight": float("nan")}}, ["reward.red.weight: is nan"]),
    ({"red": {**RED, "weight": 0.0}}, ["reward.red.weight: every weight is 0"]),
    ({"own": {"kind": f"{__name__}:Own", "weight": 1.0, "batch_size": 1}}, ["needs the package no_such_package", "pip install it"]),
    ({"nearest": {"kind": "nearest", "weight": 1.0, "batch_size": 1, "measure": "hit", "data": None}}, ["no run whose data"]),
    ({"nearest": {"kind": "nearest", "weight": 1.0, "batch_size": 1, "measure": "hit", "data": {}}}, ["reward.nearest.data.source"]),
    ({"size": {"kind": "size", "weight": 1.0, "batch_size": 1, "ground": [0, 0], "tolerance": 1}}, ["reward.size.ground: is [0, 0]"]),
    ({"jpeg_size": {"kind": "jpeg_size", "weight": 1.0, "batch_size": 1, "wanted": "small", "quality": 100}}, ["reward.jpeg_size.quality"]),
])  # fmt: skip
def test_wrong_settings_are_refused_before_anything_loads(settings, words):
    with pytest.raises(ConfigError) as caught:
        choose(settings, None)
    assert all(word in str(caught.value) for word in words), str(caught.value)
