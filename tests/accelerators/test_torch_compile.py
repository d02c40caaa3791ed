"""torch.compile in place, with a way back; rollout and training alike.   pytest tests/accelerators/test_torch_compile.py"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from flowrun.accelerators import applied
from flowrun.accelerators.torch_compile import Mode, TorchCompile, steady
from flowrun.config import ConfigError
from flowrun.paradigm import Rereads
from tests.accelerators.tiny import flux, loss, made_of, walked
from tests.pipelines.families import assembled

pytestmark = pytest.mark.slow

LIMIT = 64


def compiler(how: str = "auto", rereads: Rereads = Rereads.nothing, limit: int = LIMIT, **given: Any) -> TorchCompile:
    config = TorchCompile.Config(mode=Mode(how), compile_kwargs={"backend": "eager"} | given, recompile_limit=limit)
    return TorchCompile(config, rereads)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Net(nn.Module):
    """Notes under which gradient mode and with which strides it runs uncompiled."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, rest: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(Net):
    _repeated_blocks = ()


class Holder:
    """What an accelerator asks of a pipeline."""

    denoisers = ("transformer",)

    def __init__(self, network: nn.Module) -> None:
        self.models = {"transformer": network}

    @property
    def network(self) -> nn.Module:
        return self.models["transformer"]


X = torch.ones(2, 3)


@pytest.fixture
def pipeline() -> Iterator[Holder]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Holder(Net())
    torch._dynamo.reset()


def parts(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if module._compiled_call_impl is not None]


@pytest.mark.parametrize(("mode", "cls", "compiled"), [("auto", Net, 3), ("regional", Net, 3), ("full", Net, 1), ("auto", Plain, 1)])
def test_it_is_compiled_in_place_and_afterwards_all_is_as_before(pipeline: Holder, mode: str, cls: type[Net], compiled: int) -> None:
    network = pipeline.models["transformer"] = cls()
    before, plain = made_of(network), network(X)
    with applied([compiler(mode, Rereads.log_probs)], pipeline):
        during = made_of(network)
        assert (during["parameters"], during["keys"]) == (before["parameters"], before["keys"])
        assert len(parts(network)) == compiled
        torch.testing.assert_close(network(X), plain)
        assert network.forward.is_steady and (network._compiled_call_impl is None or network._compiled_call_impl.is_steady)
    assert made_of(network) == before
    assert torch.equal(network(X), plain)


def test_an_error_while_it_is_set_up_leaves_nothing(pipeline: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, before, compiled = torch._dynamo.config.recompile_limit, made_of(pipeline.network), []

    def compile_two(self: Block, **given: Any) -> None:
        compiled.append(1 / (2 - len(compiled)))
        nn.Module.compile(self, **given)

    monkeypatch.setattr(Block, "compile", compile_two)
    with pytest.raises(ZeroDivisionError), applied([compiler("regional")], pipeline):
        raise AssertionError("entered")
    assert len(compiled) == 2
    assert made_of(pipeline.network) == before and torch._dynamo.config.recompile_limit == limit


def test_what_is_done_is_said_for_each_component_before_weights_are_loaded() -> None:
    assert compiler().check(assembled("emoji_tiny")) == [
        "transformer regional (FluxTransformerBlock, FluxSingleTransformerBlock), backend=eager"
    ]
    assert compiler(rereads=Rereads.log_probs).check(assembled("sd3_tiny")) == [
        "transformer full (SD3Transformer2DModel), backend=eager, gradients on in rollouts"
    ]
    assert [line.split(",")[0] for line in compiler(dynamic=True).check(assembled("wan2_2_tiny"))] == [
        "transformer regional (WanTransformerBlock)", "transformer_2 regional (WanTransformerBlock)"
    ]  # fmt: skip


def test_regional_without_repeated_blocks_is_refused_before_weights_are_loaded() -> None:
    with pytest.raises(ConfigError) as error:
        compiler("regional").check(assembled("sd3_tiny"))
    assert str(error.value) == ("acceleration.shared.torch_compile.mode: is regional, but transformer (SD3Transformer2DModel) names no "
                                "repeated blocks; use auto or full")  # fmt: skip


@pytest.mark.parametrize("given", [{"backend": "inductr"}, {"mode": "fast", "backend": "inductor"},
                                   {"options": {"nope": 1}, "backend": "inductor"},
                                   {"mode": "default", "options": {"trace.enabled": False}, "backend": "inductor"}])  # fmt: skip
def test_values_that_torch_refuses_are_refused_before_weights_are_loaded(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"acceleration\.shared\.torch_compile\.compile_kwargs: torch.compile refuses "):
        compiler(**given).check(assembled("emoji_tiny"))


@pytest.mark.parametrize("name", ["disable", "model", "recompile_limit", "dynamc"])
def test_only_arguments_that_do_something_are_forwarded(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"compile_kwargs\.{name}: is no argument of torch\.compile"):
        compiler(**{name: True})


def test_a_machine_without_a_compiler_is_told_so_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match=r"torch_compile: torch's compiler needs a C\+\+ compiler on this machine"):
        compiler(backend="inductor").check(assembled("emoji_tiny"))


@pytest.mark.parametrize(("mode", "rereads"), [*(("full", rereads) for rereads in Rereads), ("regional", Rereads.log_probs)])
def test_gradients_are_on_in_rollouts_only_where_steps_are_compared(rereads: Rereads, mode: str, pipeline: Holder) -> None:
    compared = rereads in (Rereads.transitions, Rereads.log_probs)
    with applied([compiler(mode, rereads)], pipeline), torch.no_grad():
        for call in (pipeline.network, pipeline.network.forward):
            out = call(X)
            assert out.requires_grad == compared
            assert not (out * 1).requires_grad  # what comes after does not go on with the graph
        assert not torch.is_grad_enabled()


def test_floating_inputs_are_contiguous_in_both_phases() -> None:
    strided, seen = torch.ones(4, 3).T, []
    assert not strided.is_contiguous()

    def call(x: Tensor, rest: list[Tensor]) -> None:
        seen.append((torch.is_grad_enabled(), x.stride(), rest[0].stride()))

    steadily = steady(call, keeps_grad=False, compiles=compiler()._compiles)
    for phase in (torch.no_grad, torch.enable_grad):
        with phase():
            steadily(strided, [strided])
            steadily(x=strided, rest=[strided])
    assert seen == [(grad, (4, 1), (4, 1)) for grad in (False, False, True, True)]
    assert steady(steadily, False, compiler()._compiles) is steadily  # once is enough


@pytest.mark.parametrize("mode", ["full", "regional"])
def test_rollout_and_training_run_the_same_graph_where_they_are_compared(pipeline: Holder, mode: str) -> None:
    """Counts graphs: without gradients in rollouts the two phases have one each. Strides differ between them."""
    found = {}
    for rereads in (Rereads.final_latent, Rereads.log_probs):
        torch._dynamo.reset()
        one = compiler(mode, rereads)
        with applied([one], pipeline):
            for phase, x in ((torch.no_grad, X), (torch.enable_grad, torch.ones(3, 2).T)):
                with phase():
                    pipeline.network(x)
                found[rereads, phase] = one.report()["graphs"], one.report()["recompiles"]
    assert found[Rereads.log_probs, torch.enable_grad] == found[Rereads.log_probs, torch.no_grad]
    graphs, again = found[Rereads.final_latent, torch.enable_grad]
    assert graphs > found[Rereads.final_latent, torch.no_grad][0] and again > 0


def test_the_limit_is_raised_and_restored(pipeline: Holder) -> None:
    config = torch._dynamo.config
    before = config.recompile_limit, config.accumulated_recompile_limit
    with pytest.raises(RuntimeError, match="stop"), applied([compiler()], pipeline):
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (LIMIT, max(LIMIT, before[1]))
        raise RuntimeError("stop")
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before
    with applied([compiler(limit=2)], pipeline):
        assert config.recompile_limit == before[0]  # never lowered


NAMES = ("one", "two", "three")


@pytest.fixture
def swapped(pipeline: Holder) -> Callable[[str], None]:
    """Activates one of three adapters."""
    for name in NAMES:
        inject_adapter_in_model(LoraConfig(target_modules=["linear"], r=2), pipeline.network, name)

    def swap(name: str) -> None:
        for module in pipeline.network.modules():
            if isinstance(module, BaseTunerLayer):
                module.set_adapter(name)

    return swap


def test_past_the_limit_it_is_said_with_the_reason_and_what_it_costs(
    pipeline: Holder, swapped: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters that change from step to step, as a rollout's and a reference's do: torch runs uncompiled after one line."""
    one, keys = compiler("full", limit=1), list(pipeline.network.state_dict())
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.INFO, "flowrun"), applied([one], pipeline):
        for name in NAMES:
            swapped(name)
            for _ in range(25):
                pipeline.network(X)
        assert list(pipeline.network.state_dict()) == keys
    assert one.report()["gave_up"] == 1 and one.report()["recompiles"] >= 1
    said = [record.getMessage() for record in caplog.records if record.name.startswith("flowrun.accelerators")]
    assert any("runs uncompiled from now on, because of" in line and "lora_A" in line for line in said), said
    assert any("a call took" in line and "since" in line for line in said), said
    assert said[-1].startswith("torch_compile: graphs ")


def test_swapped_adapters_within_the_limit_stay_compiled(pipeline: Holder, swapped: Callable[[str], None]) -> None:
    one, graphs = compiler("full"), []
    with applied([one], pipeline):
        for _ in range(2):
            for name in NAMES:
                swapped(name)
                pipeline.network(X)
            graphs.append(one.report()["graphs"])
        assert graphs == [3, 3]  # states that were seen before cost nothing
        assert (one.report()["recompiles"], one.report()["gave_up"]) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["none", "peft", "sequential"])
def test_of_a_real_network_the_base_inside_its_wrappers_is_compiled(wrap: str) -> None:
    torch._dynamo.reset()
    made = flux()
    network = made.models["transformer"].requires_grad_(True)
    if wrap == "peft":
        made.models["transformer"] = get_peft_model(network, LoraConfig(target_modules=["to_q"], r=2))
    if wrap == "sequential":
        made.models["transformer"] = nn.Sequential(network)  # as torch's data-parallel wrapper: the network is a child
    before, plain = made_of(made.models["transformer"]), walked(made) if wrap == "none" else None
    with applied([compiler("regional")], made):
        assert len(parts(made.models["transformer"])) == 3
        assert made_of(made.models["transformer"])["keys"] == before["keys"]
        if wrap == "none":
            torch.testing.assert_close(walked(made), plain, atol=1e-5, rtol=1e-5)
    assert made_of(made.models["transformer"]) == before
    if wrap == "none":
        assert torch.equal(walked(made), plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_computes_alike_in_rollout_and_training(dtype: torch.dtype) -> None:
    """torch's own compiler on one layer: gradients on in both phases give the same bits, in either precision."""
    torch._dynamo.reset()
    made = flux(blocks=(0, 1), dtype=dtype)
    made.models["transformer"].requires_grad_(True)
    eager, network = loss(made).detach(), made.models["transformer"]
    one = TorchCompile(TorchCompile.Config(mode=Mode.full, compile_kwargs={}, recompile_limit=LIMIT), Rereads.log_probs)
    assert one.check(assembled("emoji_tiny"))
    before = made_of(network)
    with applied([one], made):
        with torch.no_grad():
            rollout = loss(made)
        training = loss(made)
        training.backward()
        assert torch.equal(rollout, training.detach())
        assert (training - eager).abs() < 0.05 * eager.abs()
        assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
    network.zero_grad()
    assert made_of(network) == before and torch.equal(loss(made), eager)
