"""The kernel that computes attention, by diffusers' name for it: on the pipeline's denoisers, and on nothing else.

diffusers' setter also changes the default of the whole process, does nothing on networks whose layers do not take a backend,
and lets some kernels drop masks or gradients; all three are looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)
from torch import Tensor, nn

from flowrun.accelerators import Accelerator, Undo
from flowrun.accelerators._networks import attributes_restored, loaded, outlines
from flowrun.config import ConfigError
from flowrun.modular.blocks import quiet
from flowrun.spelling import near
from flowrun.wording import first_line

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

NATIVE = AttentionBackendName.NATIVE
CLOSE = 0.1  # relative difference from native: rounding of half precision stays far below, a mask or a gradient left out does not
HEAD = 64  # channels of a head where the network does not say


class AttentionBackend(Accelerator):
    stage, safety, before = "both", "lossless", ("torch_compile",)

    @dataclass(kw_only=True, slots=True)
    class Config:
        backend: str

        def __post_init__(self) -> None:
            names = [name.value for name in AttentionBackendName]
            if self.backend not in names:
                guess = f"did you mean {' or '.join(found)}? " if (found := near(self.backend, names)) else ""
                fix = f"{guess}there are {', '.join(names)}"
                raise ConfigError(f"{AttentionBackend.key()}.backend", f"there is no {self.backend!r}", fix)

    @property
    def backend(self) -> AttentionBackendName:
        return AttentionBackendName(self.config.backend)

    def check(self, pipeline: Pipeline) -> list[str]:
        networks = outlines(pipeline)
        self._require_layers(networks)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        heads = {getattr(network.config, "attention_head_dim", None) for network in networks.values()}
        if fault := _fault(self.backend, device, dtype, sorted(head for head in heads if isinstance(head, int)) or [HEAD]):
            raise ConfigError(f"{self.key()}.backend", f"{self.config.backend} cannot be used: {fault}", _alternatives(device, dtype))
        return [f"{name} {self.config.backend}, {len(_processors(network))} attention layers" for name, network in networks.items()]

    def setup(self, pipeline: Pipeline) -> Undo:
        networks = loaded(pipeline)
        self._require_layers(networks)
        with ExitStack() as made:
            for network in networks.values():
                made.enter_context(_layers_use(network, self.backend))
            return made.pop_all().close

    def prove(self, pipeline: Pipeline, loss: Callable[[], Tensor]) -> None:
        """The first batch's gradients by this kernel and by the native one, both uncompiled: the native graph would be of no use."""
        with torch.compiler.set_stance("force_eager"):
            self._compare(pipeline, loss)

    def _compare(self, pipeline: Pipeline, loss: Callable[[], Tensor]) -> None:
        trained = [p for network in pipeline.models.values() for p in network.parameters() if p.requires_grad]
        try:
            found = _gradients(loss, trained)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise self._unfit(f"fails on the first batch ({first_line(error)})") from error
        with ExitStack() as native:
            for network in loaded(pipeline).values():
                native.enter_context(_layers_use(network, NATIVE))
            truth = _gradients(loss, trained)
        if fault := _difference(found, truth):
            raise self._unfit(f"{fault} on the first batch")

    def _require_layers(self, networks: dict[str, nn.Module]) -> None:
        if not any(_processors(network) for network in networks.values()):
            names = ", ".join(f"{name} ({type(network).__name__})" for name, network in networks.items())
            what = f"{names} computes attention in its own way: no layer of it takes a backend"
            raise ConfigError(self.key(), what, "leave it out for this model")

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(f"{self.key()}.backend", f"{self.config.backend} {what}", "use native, which every model is trained with")


def _processors(network: nn.Module) -> list[Any]:
    """What computes attention in the network's layers and takes a backend."""
    found = (getattr(module, "processor", None) for module in network.modules())
    return [processor for processor in found if hasattr(processor, "_attention_backend")]


@contextmanager
def _layers_use(network: nn.Module, backend: AttentionBackendName) -> Iterator[None]:
    """Within the block. The process's default stays as it is: other networks follow it."""
    processors, default = _processors(network), _AttentionBackendRegistry._active_backend
    with attributes_restored(processors, ["_attention_backend"]):
        try:
            with quiet("diffusers.models.modeling_utils"):
                network.set_attention_backend(backend.value)
        finally:
            _AttentionBackendRegistry.set_active_backend(default)
        if odd := [processor for processor in processors if processor._attention_backend != backend]:
            what = f"{type(network).__name__} keeps {odd[0]._attention_backend} in {type(odd[0]).__name__}"
            raise ConfigError(AttentionBackend.key(), what, "leave it out for this model")
        yield


def _fault(backend: AttentionBackendName, device: torch.device, dtype: torch.dtype, heads: list[int]) -> str:
    """Why it cannot be trained with on this machine; empty: it can. A kernel that refuses masks will do here; whether the network
    has any shows on the first batch."""
    try:
        _check_attention_backend_requirements(backend)
        _maybe_download_kernel_for_backend(backend)
        for head in heads:
            inputs = _inputs(device, dtype, head)
            if fault := _difference(_attention(backend, inputs, None), _attention(NATIVE, inputs, None)):
                return fault
    except (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
        return first_line(error)
    mask = torch.arange(8, device=device) < torch.tensor([[8], [5]], device=device)  # [2, 8]: the second row is padded
    try:
        masked = _attention(backend, inputs, mask[:, None, None])
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return ""
    return "it leaves out attention masks" if _difference(masked, _attention(NATIVE, inputs, mask[:, None, None])) else ""


def _inputs(device: torch.device, dtype: torch.dtype, head: int) -> list[Tensor]:
    """Queries, keys, values [2 rows, 8 tokens, 2 heads, channels]."""
    drawn = torch.randn(3, 2, 8, 2, head, generator=torch.Generator().manual_seed(0))
    return list(drawn.to(device, dtype))


def _attention(backend: AttentionBackendName, inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The output and the gradients of its squares. Raises what the kernel raises."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = dispatch_attention_fn(*leaves, attn_mask=mask, backend=backend)
    if not out.requires_grad:
        return [out, *(torch.full_like(leaf, torch.nan) for leaf in leaves)]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def _gradients(loss: Callable[[], Tensor], trained: list[nn.Parameter]) -> list[Tensor]:
    """Of what gets one, on the CPU; none stays on the parameters. By `backward`: what averages gradients over processes needs that."""
    try:
        value = loss()
        if value.requires_grad:
            value.backward()
        return [p.grad.cpu() for p in trained if p.grad is not None]
    finally:
        for parameter in trained:
            parameter.grad = None


def _difference(found: list[Tensor], truth: list[Tensor]) -> str:
    """What is wrong with them, in words; empty: they are close."""
    if len(found) != len(truth):
        return "has no gradients" if not found else "gives gradients to other weights than native"
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        return "gives no finite gradients"
    error = sum(_square(a.float() - b.float()) for a, b in zip(found, truth, strict=True)) ** 0.5
    size = sum(_square(tensor.float()) for tensor in truth) ** 0.5
    return f"differs from native by {error / size:.0%}" if error > CLOSE * size else ""


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _alternatives(device: torch.device, dtype: torch.dtype) -> str:
    """Kernels that can be used here; those that would be fetched or compiled first are not tried."""
    tried = [name for name in AttentionBackendName if "hub" not in name.value and name is not AttentionBackendName.FLEX]
    able = [name.value for name in tried if not _fault(name, device, dtype, [HEAD])]
    return f"on this machine there are {', '.join(able)}"

