"""What is trained and gets no gradient is named, once."""

from __future__ import annotations

import pytest

from tests.conftest import Runs

WORDS = "got no gradient in the first update"


def told(runs: Runs, *settings: str) -> list[str]:
    text = (runs("task=sft", "train.steps=3", *settings) / "flowrun.log").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if WORDS in line]


@pytest.mark.slow
def test_parameters_without_a_gradient_are_named_once(runs: Runs) -> None:
    """MiniLM's last layer, which its hidden states do not pass through."""
    (line,) = told(runs, "task.trainable_models=[transformer,text_encoder]", "train.accumulate=2")
    places = "text_encoder.network.pooler.dense.weight, text_encoder.network.pooler.dense.bias"
    assert "WARNING" in line and "2 of " in line and line.endswith(places)


def test_so_are_those_of_an_adapter(runs: Runs) -> None:
    (line,) = told(runs, "adapter=lora", "adapter.lora_base_model=[transformer,text_encoder]", "adapter.variant=dora",
                   "adapter.targets=all-linear")  # fmt: skip
    ends = ("lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight")
    assert "3 of " in line and all(f"text_encoder.network.pooler.dense.{end}" in line for end in ends)


@pytest.mark.parametrize("settings", [(), ("adapter=lora",)])
def test_nothing_is_said_when_all_get_one(runs: Runs, settings: tuple[str, ...]) -> None:
    """An adapter's A gets a gradient of zero at first, since B is zero: that is one."""
    assert told(runs, *settings) == []
