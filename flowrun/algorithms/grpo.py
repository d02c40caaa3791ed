"""Group-relative policy optimisation of a flow model (`_clipped`), the old log-probabilities being those of the rollout itself:
it has to compute exactly what training computes."""

from __future__ import annotations

from flowrun.algorithms._clipped import Clipped


class Grpo(Clipped):
    """As it stands."""
