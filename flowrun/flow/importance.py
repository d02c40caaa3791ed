"""Importance weights: a mean under p from draws of q counts each of them by w = p / q.

    log w = min(power log(p / q), log most)
    ESS = (sum w)^2 / (n sum w^2): the n draws are worth as much as so large a share of n draws of p

Without a power and uncut the mean is unbiased. Truncated (Ionides 2008, J. Comput. Graph. Stat. 17; IMPALA, arXiv
1802.01561) its variance is bounded, and a part of p is lost. A power below 1 (Koblents & Miguez 2015, Stat. Comput. 25) brings the
weights nearer to one another: likelihoods over many elements differ by so many nats that a few draws would have all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

HALVINGS = 40  # of an interval, down to digits that nobody sees


@dataclass(frozen=True)
class Worth:
    """Of some weights. ess: as above, as a share. mean: 1 but for chance where neither power nor most changes them. truncated: the
    share of draws whose weight was cut. lost: the share of the uncut weights' sum that was cut off."""

    ess: float
    mean: float
    truncated: float
    lost: float


@dataclass(frozen=True)
class Weighting:
    """power: of the ratio, in (0, 1]. most: the greatest weight; None: any."""

    power: float
    most: float | None

    def logs(self, log_ratio: Tensor) -> Tensor:
        """log w where log_ratio = log(p / q), in nats. Of its shape."""
        uncut = self.power * log_ratio
        return uncut if self.most is None else uncut.clamp(max=math.log(self.most))

    def worth(self, log_ratio: Tensor) -> Worth:
        """log_ratio: of all draws, any shape."""
        ratio = log_ratio.double().flatten()
        uncut, logs = self.power * ratio, self.logs(ratio)
        return Worth(
            ess=effective(logs),
            mean=float(logs.exp().mean()),
            truncated=float((logs < uncut).double().mean()),
            lost=1 - float((logs.logsumexp(0) - uncut.logsumexp(0)).exp()),
        )


def effective(logs: Tensor) -> float:
    """ESS of weights by their logarithms, [n], as a share: 1 where all are equal, 1 / n where one has everything."""
    w = (logs.double() - logs.max()).exp()  # of the greatest, which no exponential is too small or large for
    return float(w.sum().square() / w.square().sum()) / len(w)


def power_for(log_ratio: Tensor, share: float) -> float:
    """The greatest power, at most 1, with which uncut weights have an ESS of `share`. log_ratio: [n].

    ESS falls as the power p rises: d log ESS / d p = 2 (<log ratio>_p - <log ratio>_2p), means weighed by these powers."""
    if effective(log_ratio) >= share:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if effective(middle * log_ratio) >= share else (low, middle)
    return low
