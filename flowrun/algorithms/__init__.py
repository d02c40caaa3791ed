"""An algorithm turns batches, or rollouts, into losses and metrics. One file per algorithm; its settings stand in conf/task."""

from flowrun.algorithms._algorithm import Algorithm as Algorithm
from flowrun.algorithms._algorithm import StepOut as StepOut
from flowrun.algorithms._algorithm import Supervised as Supervised
from flowrun.algorithms._online import Lesson as Lesson
from flowrun.algorithms._online import Online as Online
from flowrun.algorithms._online import Policies as Policies
from flowrun.paradigm import Paradigm as Paradigm
from flowrun.paradigm import Rereads as Rereads
