"""How often the host waits for the device to tell it a number.   pytest tests/stages/test_reading.py"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowrun.stages import learner, trainer
from flowrun.stages.reading import read
from tests.conftest import Runs
from tests.stages.test_rollout import BLIND, learn


def test_what_is_read_together_is_what_is_read_alone() -> None:
    drawn = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = {"loss": drawn[2].float(), "wide": drawn[3], "count": torch.tensor(3)}
    found = [{"loss": drawn[0].float(), "half": drawn[1].bfloat16()}, wide]
    assert read(found) == [{name: float(value) for name, value in metrics.items()} for metrics in found]
    assert read([]) == [] and read([{}]) == [{}]
    assert str(read([{"loss": torch.tensor(torch.nan)}])) == "[{'loss': nan}]"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """Numbers asked of single tensors, and of all metrics at once, since it was called last."""
    alone, together, original = [0], [0], Tensor.__float__

    def one(self: Tensor) -> float:
        alone[0] += 1
        return original(self)

    def all_at_once(found: list) -> list:
        together[0] += 1
        return read(found)

    monkeypatch.setattr(Tensor, "__float__", one)
    for module in (trainer, learner):
        monkeypatch.setattr(module, "read", all_at_once)

    def since() -> tuple[int, int]:
        found = alone[0], together[0]
        alone[0] = together[0] = 0
        return found

    return since


def test_an_update_from_data_reads_once_whatever_it_accumulates(runs: Runs, readings: Callable[[], tuple[int, int]]) -> None:
    counts = []
    for accumulate in (1, 8):
        readings()
        runs("train.steps=2", "train.batch_size=1", f"train.accumulate={accumulate}")
        counts.append(readings())
    assert counts[0] == counts[1] and counts[0][1] == 2


@pytest.mark.slow
def test_an_update_from_a_rollout_reads_once_whatever_it_accumulates(runs: Runs, readings: Callable[[], tuple[int, int]]) -> None:
    counts = []
    for micro in (4, 1):
        readings()
        words = ("train.epochs=1", "rollout.updates=2", "resume=none", f"run_id=micro{micro}", "acceleration.probe=false")
        learn(runs, *BLIND, *words, f"train.batch_size={micro}", "task=nft")
        counts.append(readings())
    assert counts[0] == counts[1] and counts[0][1] == 2
