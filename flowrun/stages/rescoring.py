"""Old log-probabilities computed once more by the path of training, before an epoch's first update; what they differ by from those
of the rollout weighs the steps (`flowrun.flow.importance`)."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import asdict, replace

import torch
from torch import Tensor

from flowrun.flow.importance import power_for
from flowrun.stages.learner import Learner
from flowrun.stages.roller import Chunk, Epoch

log = logging.getLogger(__name__)

HALF = 0.5  # of the steps effective: less is worth a warning


class Rescoring:
    """Of an algorithm with `rescores`."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.weighting = learner, learner.algorithm.weighting
        self._warned = False

    def rescored(self, epoch: Epoch) -> tuple[Epoch, dict[str, float]]:
        """The epoch with log-probabilities by the weights as they are, and what its weights are worth, over all processes.

        Memory: that of a training step's forward pass, and two numbers a step and picture."""
        epoch = replace(epoch, chunks=[self._chunk(chunk) for chunk in epoch.chunks])
        nats, dist = torch.empty(len(epoch.samples), len(epoch.steps)), self.learner.dist
        own = [(chunk.numbers, _nats(chunk)) for chunk in epoch.chunks]
        for numbers, found in (part for parts in dist.gather(own) for part in parts):
            nats[numbers.start : numbers.stop] = found
        self.warn(nats.flatten())
        worth = self.weighting.worth(nats)
        return epoch, {**{f"weight/{name}": value for name, value in asdict(worth).items()}, "weight/nats_max": float(nats.abs().max())}

    def told(self, nats: Tensor) -> str:
        """What weights of these log-likelihood ratios, [n], are worth, and a remedy where that is less than half: once is enough."""
        ess = self.weighting.worth(nats).ess
        self._warned = self._warned or ess < HALF
        less = f"; task.power={power_for(nats, HALF):.2g}, or less acceleration, would keep half" if ess < HALF else ""
        return f"weights by likelihoods up to {float(nats.abs().max()):.2g} nats off make {ess:.0%} of the steps effective{less}"

    def warn(self, nats: Tensor) -> None:
        """Unless it has been told, when less than half of the steps are effective."""
        if not self._warned and self.weighting.worth(nats).ess < HALF:
            log.warning("rollouts deviate: %s", self.told(nats))

    def _chunk(self, chunk: Chunk) -> Chunk:
        sampler, found = self.learner.algorithm.rollout.sampler, defaultdict(list)
        for walked, step, taken in self.learner.again(chunk):
            found[step].append(walked.log_prob(step, taken, sampler))
        log_probs = {step: torch.cat(parts) for step, parts in found.items()}
        return replace(chunk, walked=chunk.walked.rescored(log_probs, sampler))


def _nats(chunk: Chunk) -> Tensor:
    """[B, steps], on the CPU."""
    return torch.stack([chunk.walked.off[step] for step in chunk.walked.steps], 1).cpu()
