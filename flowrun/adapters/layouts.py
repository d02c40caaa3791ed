"""Adapters as peft knows them. W [out, in] is frozen; A [r, in] and B [out, r]; s = alpha / r.

lora    W + s B A                                  Hu et al. 2021, arXiv 2106.09685
rslora  W + alpha / sqrt(r) B A                    Kalajdzievski 2023, arXiv 2312.03732
dora    m (W + s B A) / |W + s B A|                Liu et al. 2024, arXiv 2402.09353
lokr    W + s (W1 kron W2), W2 = B A or whole      Yeh et al. 2023, arXiv 2309.14859
loha    W + s (B1 A1) * (B2 A2), entry by entry    Hyeon-Woo et al. 2021, arXiv 2108.06098; Yeh et al. 2023

DoRA's norm is taken over the inputs of each output, m [out] starts as |W|, and the norm counts as a constant in the
gradient (its section 4.3). LoKr keeps W2 whole when r is at least half its longer side; s counts then too, unlike in
LyCORIS. At the start B, W1 and A2 are zero, all else is random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig

from flowrun.adapters.config import Variant
from flowrun.adapters.targets import Targets

MARKS = {Variant.lokr: ".lokr_", Variant.loha: ".hada_"}  # in the names of their weights


def layout(variant: Variant, rank: int, alpha: float, dropout: float, targets: Targets,
           ranks: Mapping[str, int], alphas: Mapping[str, float]) -> PeftConfig:
    """ranks, alphas: pattern of layers -> where they have others."""
    common = {"r": rank, "target_modules": targets, "rank_pattern": dict(ranks), "alpha_pattern": dict(alphas)}
    if variant is Variant.lokr:
        return LoKrConfig(alpha=alpha, **common)
    if variant is Variant.loha:
        return LoHaConfig(alpha=alpha, **common)
    return LoraConfig(lora_alpha=alpha, lora_dropout=dropout, use_rslora=variant is Variant.rslora,
                      use_dora=variant is Variant.dora, **common)


def divisor(variant: Variant, rank: int) -> float:
    """Of alpha, which gives the scale."""
    return math.sqrt(rank) if variant is Variant.rslora else rank
