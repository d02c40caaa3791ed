"""What is asked of the machine and the launcher, before anything starts."""

from __future__ import annotations

import os

import torch

from flowrun.config import CPU, ConfigError, Precision
from flowrun.launch import PLACED

# What accelerate's own configuration may ask for, as ACCELERATE_USE_...
STRATEGIES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "a parallelism"}


def check_precision(precision: Precision) -> None:
    """Raises ConfigError for fp16 without a GPU, where Hugging Face accelerate would compute in fp32 without a word, and
    for bf16 on a device that lacks it."""
    if precision is Precision.fp16 and not torch.accelerator.is_available():
        raise ConfigError("precision", "fp16 needs a GPU and there is none", "use bf16 or fp32")
    if precision is Precision.bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ConfigError("precision", "this device does not compute in bf16", "use fp16 or fp32")


def check_processes(processes: int) -> None:
    """Raises ConfigError for more processes than devices on a machine, and for a strategy that is not followed here."""
    for name, strategy in STRATEGIES.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            what = f"its configuration asks for {strategy}, and flowrun holds all weights on each device"
            raise ConfigError("accelerate launch", what, "launch with --multi_gpu, or use processes=N alone")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if not _on_cpu() and here > torch.accelerator.device_count():
        what = f"is {here} and this machine has {torch.accelerator.device_count()} devices for them"
        raise ConfigError("processes", what, "use one for each device")


def check_placed() -> None:
    """Raises ConfigError for a sweep's job whose GPU is not there; it would run on the CPU without a word."""
    device = os.environ.get(PLACED, CPU)
    if not device.startswith(CPU) and not torch.accelerator.is_available():
        raise ConfigError("multirun.devices", f"names {device}, and there is no such GPU", f"name those that are there, or {CPU}")


def _on_cpu() -> bool:
    return not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
