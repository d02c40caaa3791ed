"""What a training step will take of the device's memory, computed from the networks' configurations: no weights, no GPU.

`python -m flowrun.memory` prints the table of recipes, `python -m flowrun.memory OVERRIDES` the row of any run.
"""
