"""Accelerators make a pipeline faster and leave it as it was. One file each; their settings stand in conf/acceleration.

A new one is a subclass of `Accelerator` in a module here, with a file in conf/acceleration/shared or .../rollout. Names
that begin with `_` are not accelerators.
"""

from flowrun.accelerators._accelerator import Accelerator as Accelerator
from flowrun.accelerators._accelerator import Undo as Undo
from flowrun.accelerators._applied import applied as applied
from flowrun.accelerators._applied import report as report
from flowrun.accelerators._applied import rollout_applied as rollout_applied
from flowrun.accelerators._chosen import Chosen as Chosen
from flowrun.accelerators._chosen import choose as choose
from flowrun.accelerators._validate import validate as validate
