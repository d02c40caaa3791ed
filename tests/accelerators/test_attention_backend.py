"""Attention kernels are taken or refused, never ignored, and put back.   pytest tests/accelerators/test_attention_backend.py"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from flowrun.accelerators import applied
from flowrun.accelerators.attention_backend import AttentionBackend
from flowrun.accelerators.torch_compile import Mode, TorchCompile
from flowrun.config import ConfigError
from flowrun.pipelines import Pipeline
from tests.accelerators.tiny import flux, loss, made_of, walked
from tests.pipelines.families import assembled

MATH = AttentionBackendName._NATIVE_MATH


def backend(name: str) -> AttentionBackend:
    return AttentionBackend(AttentionBackend.Config(backend=name))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    """All weights trained."""
    made = flux()
    made.models["transformer"].requires_grad_(True)
    return made


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts a kernel of one's own in the place of `_native_math`'s."""
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]

    def put(changed: Any) -> None:
        def stub(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **named: Any) -> Tensor:
            return changed(native, query, key, value, attn_mask)

        monkeypatch.setitem(_AttentionBackendRegistry._backends, MATH, stub)
        monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, MATH, {"query", "key", "value", "attn_mask"})

    yield put


def drops_mask(native: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return native(q, k, v)


def no_gradient(native: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return native(q, k, v, mask).detach()


def nan_gradient(native: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = native(q, k, v, mask)
    return out + (q * 0).sum().abs().sqrt()  # whose derivative at 0 is 0 / 0


def other(native: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return 10 * native(q, k, v, mask)


def test_each_layer_uses_it_and_afterwards_all_is_as_before(pipeline: Pipeline) -> None:
    network, active = pipeline.models["transformer"], _AttentionBackendRegistry._active_backend
    before, plain = made_of(network), walked(pipeline)
    with applied([backend("_native_math")], pipeline):
        assert {m.processor._attention_backend for m in network.modules() if hasattr(m, "processor")} == {MATH}
        assert _AttentionBackendRegistry._active_backend == active  # other networks of the process do not follow
        found = walked(pipeline)
        assert 0 < (found - plain).abs().max() < 1e-4
    assert made_of(network) == before and _AttentionBackendRegistry._active_backend == active
    assert torch.equal(walked(pipeline), plain)


def test_a_setting_of_before_stands_again(pipeline: Pipeline) -> None:
    network, active = pipeline.models["transformer"], _AttentionBackendRegistry._active_backend
    network.set_attention_backend("_native_flash")
    _AttentionBackendRegistry.set_active_backend(active)
    with applied([backend("_native_math")], pipeline):
        pass
    assert {m.processor._attention_backend.value for m in network.modules() if hasattr(m, "processor")} == {"_native_flash"}
    network.reset_attention_backend()


def test_the_plan_names_the_layers_before_weights_are_loaded() -> None:
    unloaded = assembled("emoji_tiny")
    assert backend("native").check(unloaded) == ["transformer native, 2 attention layers"]
    assert not unloaded.models


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as error:
        backend("flash_4")
    text = str(error.value)
    assert text.startswith("acceleration.shared.attention_backend.backend: there is no 'flash_4'; did you mean ")
    assert all(name.value in text for name in AttentionBackendName)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("flash", "install `flash-attn"),
        ("_flash_3", "FA3"),
        ("_flash_3_hub", "kernel"),
        ("sage", "sageattention"),
        ("xformers", "xformers"),
        ("_native_npu", "torch_npu"),
        ("_native_cudnn", ""),  # set without a word, and fails at the first call
        ("_native_efficient", ""),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_before_weights_with_the_reason_and_what_is_there(name: str, why: str) -> None:
    unloaded = assembled("emoji_tiny")
    with pytest.raises(ConfigError) as error:
        backend(name).check(unloaded)
    head = f"acceleration.shared.attention_backend.backend: {name} cannot be used: "
    assert error.value.args[0].startswith(head) and why in error.value.what and len(error.value.args[0]) > len(head)
    assert error.value.fix == "on this machine there are native, _native_flash, _native_math"
    assert not unloaded.models


@pytest.mark.parametrize(("stub", "why"), [(drops_mask, "it leaves out attention masks"), (no_gradient, "gives no finite gradients"),
                                           (nan_gradient, "gives no finite gradients"), (other, "differs from native by ")])  # fmt: skip
def test_a_kernel_that_is_wrong_is_refused_before_weights(kernel: Any, stub: Any, why: str) -> None:
    kernel(stub)
    with pytest.raises(ConfigError, match=f"_native_math cannot be used: {why}"):
        backend("_native_math").check(assembled("emoji_tiny"))


@pytest.mark.parametrize(("stub", "why"), [(no_gradient, "has no gradients|gives gradients to other weights than native"),
                                           (nan_gradient, "gives no finite gradients"), (other, "differs from native by ")])  # fmt: skip
def test_the_first_batch_shows_it_on_the_loaded_network(pipeline: Pipeline, kernel: Any, stub: Any, why: str) -> None:
    kernel(stub)
    with applied([one := backend("_native_math")], pipeline), pytest.raises(ConfigError, match=f"_native_math ({why}).*on the first batch"):
        one.prove(pipeline, lambda: loss(pipeline))
    assert all(p.grad is None for p in pipeline.models["transformer"].parameters())


def test_a_kernel_that_refuses_masks_is_refused_for_a_network_that_has_some(pipeline: Pipeline) -> None:
    def masked() -> Tensor:
        layer = pipeline.models["transformer"].single_transformer_blocks[0].attn
        states = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
        mask = torch.arange(4) < torch.tensor([[4], [2]])  # [2, 4]
        return layer(states, attention_mask=mask[:, None, None]).square().mean()

    with applied([one := backend("_native_flash")], pipeline):
        one.prove(pipeline, lambda: loss(pipeline))  # has none
        with pytest.raises(ConfigError, match=r"_native_flash fails on the first batch \(.*attn_mask"):
            one.prove(pipeline, masked)


def test_a_right_kernel_passes_and_leaves_no_gradients(pipeline: Pipeline) -> None:
    with applied([one := backend("_native_math")], pipeline):
        one.prove(pipeline, lambda: loss(pipeline))
    assert all(p.grad is None for p in pipeline.models["transformer"].parameters())


def test_the_comparison_compiles_nothing(pipeline: Pipeline) -> None:
    config = TorchCompile.Config(mode=Mode.full, compile_kwargs={"backend": "eager"}, recompile_limit=8)
    kernel, compiler = backend("_native_math"), TorchCompile(config)
    with applied([kernel, compiler], pipeline):
        kernel.prove(pipeline, lambda: loss(pipeline))
        assert compiler.report()["graphs"] == 0


@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_a_network_whose_layers_take_none_is_refused(family: str) -> None:
    unloaded = assembled(f"{family}_tiny")
    with pytest.raises(ConfigError) as error:
        backend("native").check(unloaded)
    assert str(error.value).startswith("acceleration.shared.attention_backend: ") and "in its own way" in str(error.value)
    unloaded.load(unloaded.denoisers, torch.device("cpu"), torch.float32)
    before = made_of(unloaded.models[unloaded.denoiser])
    with pytest.raises(ConfigError, match="no layer of it takes a backend"), applied([backend("_native_math")], unloaded):
        raise AssertionError("entered")
    assert made_of(unloaded.models[unloaded.denoiser]) == before


def test_a_layer_that_keeps_its_own_is_refused_and_nothing_stays(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    network = pipeline.models["transformer"]
    set_backend, layer = FluxTransformer2DModel.set_attention_backend, network.transformer_blocks[0].attn.processor

    def partly(self: FluxTransformer2DModel, name: str) -> None:
        set_backend(self, name)
        layer._attention_backend = AttentionBackendName.NATIVE

    before = made_of(network)
    monkeypatch.setattr(FluxTransformer2DModel, "set_attention_backend", partly)
    with pytest.raises(ConfigError, match="keeps .*NATIVE in FluxAttnProcessor"), applied([backend("_native_math")], pipeline):
        raise AssertionError("entered")
    assert made_of(network) == before


def test_other_networks_of_the_process_stay_as_they_are(pipeline: Pipeline) -> None:
    vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    pipeline.models["vae"] = vae
    before = made_of(vae)
    with applied([backend("_native_math")], pipeline):
        assert made_of(vae) == before
    del pipeline.models["vae"]
