"""Advantages: by how much each sample is better than the others of its group, in units of a standard deviation.

    sum    R = sum_k w_k r_k               A = (R - mean_g R) / std R         (GRPO: Shao et al. 2024, arXiv 2402.03300)
    gdpo   z_k = (r_k - mean_g r_k) / std r_k,   C = sum_k w_k z_k,   A = C / std_all C          (arXiv 2601.05242)

mean_g is the group's mean; `std` the group's own or that of all samples, population form, computed in two passes:
E[x^2] - E[x]^2 would be rounding where rewards are nearly equal. gdpo's C has mean 0 in every group, so in all.

Legend: N samples, V of them valid, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Aggregate(Enum):
    """How several rewards become one advantage. sum: weighted before standardising; gdpo: each standardised first."""

    sum = "sum"
    gdpo = "gdpo"


class Spread(Enum):
    """Whose standard deviation divides the distance from the group's mean: the group's own, or that of all samples."""

    group = "group"
    batch = "batch"


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """values: [N], fp32, 0 for samples that failed and in dead groups. valid: [N] bool: those with a finite value of every reward
    that counts; `failed` is how many others there are. means, stds: for each reward the average over groups of their mean and of
    their standard deviation, NaN when nothing was scored. dead: groups, out of `groups`, in which no sample has an advantage."""

    values: Tensor
    valid: Tensor
    means: dict[str, float]
    stds: dict[str, float]
    groups: int
    dead: int
    failed: int


def advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], groups: Tensor, aggregate: Aggregate,
               spread: Spread, floor: float) -> Advantages:  # fmt: skip
    """rewards: name -> [N], not finite where scoring failed; weights: by the same names, 0: measured and not counted;
    groups: [N] integers, equal for samples of one group, whatever their prompts say.

    A sample that failed in one reward that counts is left out of every mean and deviation. floor: a group whose standard
    deviation is at most floor * max(1, |reward|) is dead, its rewards being equal but for rounding; 1e-6 for rewards in fp32.
    Arithmetic is in float64. Raises ValueError when shapes differ or no reward counts."""
    _check(rewards, weights, groups)
    _, index = groups.cpu().unique(return_inverse=True)                          # [N], 0 ... G - 1
    count = int(index.max()) + 1 if len(index) else 0
    wide = {name: reward.detach().to("cpu", torch.float64) for name, reward in rewards.items()}
    counted = {name: reward for name, reward in wide.items() if weights[name]}
    valid = torch.stack([reward.isfinite() for reward in counted.values()]).all(0)          # [N]
    values = torch.zeros(len(index), dtype=torch.float64)
    values[valid] = _advantages({n: r[valid] for n, r in counted.items()}, weights, index[valid], count, aggregate, spread, floor)
    alive = index[values != 0].unique()
    figures = {name: _figures(reward, index, count) for name, reward in wide.items()}
    return Advantages(
        values=values.float(),
        valid=valid,
        means={name: mean for name, (mean, _) in figures.items()},
        stds={name: std for name, (_, std) in figures.items()},
        groups=count,
        dead=count - len(alive),
        failed=int((~valid).sum()),
    )


def _check(rewards: Mapping[str, Tensor], weights: Mapping[str, float], groups: Tensor) -> None:
    if groups.ndim != 1 or groups.is_floating_point():
        raise ValueError(f"groups are {groups.dtype} {list(groups.shape)} where integers [N] are needed")
    for name, reward in rewards.items():
        if reward.shape != groups.shape:
            raise ValueError(f"reward {name} is {list(reward.shape)} for {len(groups)} samples")
    if not any(weights[name] for name in rewards):
        raise ValueError("no reward has a weight other than 0")


def _advantages(rewards: Mapping[str, Tensor], weights: Mapping[str, float], index: Tensor, count: int,
                aggregate: Aggregate, spread: Spread, floor: float) -> Tensor:  # fmt: skip
    """[V], from rewards that are all finite."""
    if aggregate is Aggregate.gdpo:
        rewards = {name: _standard(r, r.abs().clamp(min=1), index, count, spread, floor) for name, r in rewards.items()}
        spread = Spread.batch
    total = sum(weights[name] * r for name, r in rewards.items())                                    # [V]
    size = sum(abs(weights[name]) * r.abs().clamp(min=1) for name, r in rewards.items())             # [V]
    return _standard(total, size, index, count, spread, floor)


def _standard(x: Tensor, size: Tensor, index: Tensor, count: int, spread: Spread, floor: float) -> Tensor:
    """(x - mean_g x) / std x, and 0 where the group's std is at most floor * mean_g size. [V].

    size: [V], how large the numbers are that x was computed from: their rounding is a share of it."""
    mean, std = _moments(x, index, count)                                        # [G]
    dead = std <= floor * _moments(size, index, count)[0]                        # [G]
    if spread is Spread.batch:
        std = _moments(x, torch.zeros_like(index), 1)[1].expand(count)
    return torch.where(dead[index], 0.0, (x - mean[index]) / std[index])


def _moments(x: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation by group: [G] each, NaN for groups without samples."""
    number = torch.bincount(index, minlength=count).double()
    mean = torch.bincount(index, weights=x, minlength=count) / number
    square = torch.bincount(index, weights=(x - mean[index]) ** 2, minlength=count) / number
    return mean, square.sqrt()


def _figures(reward: Tensor, index: Tensor, count: int) -> tuple[float, float]:
    """Averages over groups of mean and standard deviation, of the samples that have this reward."""
    there = reward.isfinite()
    mean, std = _moments(reward[there], index[there], count)
    return float(mean.nanmean()), float(std.nanmean())
