"""Processes, device and precision, through Hugging Face accelerate: the only import of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flowrun.config import Failure, Lost, Precision, UserError
from flowrun.machine import check_precision

T = TypeVar("T")

# One process may draw samples, or finish its rows, much later than another. That one has died is seen by the launcher.
PATIENCE = timedelta(days=1)
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters else "broadcast_buffers"


class Dist:
    """One process among `world`. Optimizer and schedule stay plain torch objects: accelerate's wrapped schedule would
    step `world` times per update."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process

    @property
    def scales_gradients(self) -> bool:
        """fp16 multiplies the loss so that small gradients do not vanish; an overflow then skips an update."""
        return self._accelerator.scaler is not None

    def prepare(self, module: Module) -> Module:
        """The module on this process's device, and in a wrapper that averages its gradients when there are several
        processes and something in it is trained.

        accelerate's `prepare` would also replace `forward` by one with autocast in it; here `autocast` decides."""
        module = module.to(self.device)
        if self.world == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        devices = None if self.device.type == "cpu" else [self.device]
        # Not every parameter gets a gradient: an image network's last text block, parts that are trained alone. Looking for
        # them is a walk over the graph that cannot be measured beside FLUX's passes, and without it one would hang. Buffers
        # are equal everywhere; sending them at each forward would hang a process that samples on its own.
        # What is frozen is loaded alike by all, and some backends cannot send 8-bit floats.
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, frozen)
        with self._together():
            return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=True, **{BUFFERS: False})

    def unwrap(self, module: Module) -> Module:
        return self._accelerator.unwrap_model(module, keep_fp32_wrapper=False)

    def autocast(self) -> AbstractContextManager[None]:
        """The configured precision inside the block; nothing for fp32."""
        return nullcontext() if self._accelerator.mixed_precision == "no" else self._accelerator.autocast()

    def syncing(self, module: Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: processes average their gradients at the last one only."""
        return nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()

    def average(self, parameters: Iterable[Parameter]) -> None:
        """The mean over processes of the gradients of parameters outside `prepare`'s wrappers; where one process has
        none it counts as zeros, where no process has one it stays so.

        For networks that are called several times before one backward pass, which the wrapper does not support."""
        parameters = list(parameters)
        if self.world == 1 or not parameters:
            return
        having = self.sum(torch.tensor([float(p.grad is not None) for p in parameters], device=self.device))
        for parameter, count in zip(parameters, having.tolist(), strict=True):
            if count:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.sum(own) / self.world

    def backward(self, loss: Tensor) -> None:
        """Not accelerate's, which divides by the gradient accumulation that `accelerate config` may ask for."""
        with self._together():
            (self._accelerator.scaler.scale(loss) if self.scales_gradients else loss).backward()

    def clip(self, optimizer: Optimizer, parameters: Iterable[Parameter], most: float | None) -> float:
        """Total L2 norm of the gradients, before they are scaled down to `most` (null: they are left as they are).

        Once per update, before `step`: it also takes out fp16's factor. Parameters without gradient do not count."""
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.unscale_(optimizer)
        used = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in used])
        if most is not None:
            torch.nn.utils.clip_grads_with_norm_(used, most, norm)
        return float(norm)

    def step(self, optimizer: Optimizer) -> bool:
        """One update; False when fp16 overflowed and it was skipped, so that schedule and averages must not move."""
        scaler = self._accelerator.scaler
        if scaler is None:
            optimizer.step()
            return True
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= before

    def state(self) -> dict[str, float]:
        """fp16's current factor and its counters, plain data; empty in other precisions."""
        return self._accelerator.scaler.state_dict() if self.scales_gradients else {}

    def load_state(self, state: dict[str, float]) -> None:
        if self.scales_gradients:
            self._accelerator.scaler.load_state_dict(state)

    def any(self, flag: bool) -> bool:
        """True on every process when it is true on one."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the processes, on each of them; the same shape."""
        with self._together():
            return values if self.world == 1 else self._accelerator.reduce(values, "sum")

    def sum_each(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the processes by name; all processes must have the same names."""
        if self.world == 1:
            return values
        total = self.sum(torch.tensor(list(values.values()), dtype=torch.float32, device=self.device))
        return dict(zip(values, total.tolist(), strict=True))

    def share(self, value: T) -> T:
        """The first process's `value`, on each of them. Any picklable object."""
        with self._together():
            return value if self.world == 1 else broadcast_object_list([value])[0]

    def gather(self, value: T) -> list[T]:
        """Every process's `value` in the order of ranks, on each of them. Any picklable object."""
        with self._together():
            return [value] if self.world == 1 else gather_object([value])

    def on_main(self, do: Callable[[], T]) -> T:
        """What `do` returns on the first process, on each of them; a UserError that it raises there is raised by each."""
        if self.world == 1:
            return do()
        value, error = None, None
        if self.is_main:
            try:
                value = do()
            except UserError as raised:
                error = raised
                error.by_all = True
        value, error = self.share((value, error))
        if error is not None:
            raise error
        return value

    def each(self, do: Callable[[], T]) -> T:
        """What `do` returns here; a UserError that it raises on some processes is raised by all: the first one's."""
        value, error = None, None
        try:
            value = do()
        except UserError as raised:
            error = raised
        met = [other for other in self.gather(error) if other is not None]
        if met:
            met[0].by_all = True
            raise met[0]
        return value

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all processes do at once: one that has ended is no fault of this one. Raises Lost."""
        try:
            yield
        except RuntimeError as error:
            if self.world > 1 and (isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)):
                raise Lost from error
            raise

    def close(self) -> None:
        """Leave the process group; another Dist, of another precision, may then be made in this process."""
        self._accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)


def make_dist(precision: Precision, processes: int = 1) -> Dist:
    """Join the processes that the launcher started.

    Raises ConfigError for fp16 without a GPU, Failure when not `processes` of them are there."""
    # Without a word for the CPU, accelerate joins no process group there: every process would believe it is alone.
    check_precision(precision)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision="no" if precision is Precision.fp32 else precision.value,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    dist = Dist(accelerator)
    if dist.world != processes:
        dist.close()
        raise Failure(f"{processes} processes were asked for and {dist.world} are connected",
                      "set processes to what was launched")
    return dist
