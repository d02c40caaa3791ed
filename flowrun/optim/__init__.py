"""What turns gradients into weights: the optimizer, its learning-rate schedule, the average of the weights."""

from flowrun.optim.ema import Ema
from flowrun.optim.optimizer import make_optimizer
from flowrun.optim.schedule import check_optimizer, make_schedule

__all__ = ["Ema", "check_optimizer", "make_optimizer", "make_schedule"]
