"""torch.compile in place, with a way back; rollout and training alike.   pytest tests/accelerators/test_torch_compile.py"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from flowrun.accelerators import applied
from flowrun.accelerators.torch_compile import Mode, TorchCompile, steady
from flowrun.config import ConfigError
from flowrun.paradigm import Rereads
from flowrun.pipelines import Pipeline
from tests.accelerators.tiny import conditions, flux, loss, made_of, walked
from tests.pipelines.families import assembled

LIMIT = 64


def compiler(mode: str = "auto", rereads: Rereads = Rereads.nothing, limit: int = LIMIT, **given: Any) -> TorchCompile:
    config = TorchCompile.Config(mode=Mode(mode), compile_kwargs={"backend": "eager"} | given, recompile_limit=limit)
    return TorchCompile(config, rereads)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = flux()
    made.models["transformer"].requires_grad_(True)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def parts(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if module._compiled_call_impl is not None]


@pytest.mark.parametrize(("mode", "compiled"), [("auto", 3), ("regional", 3), ("full", 1)])
def test_the_base_network_is_compiled_in_place_and_afterwards_all_is_as_before(pipeline: Pipeline, mode: str, compiled: int) -> None:
    network = pipeline.models["transformer"]
    before, plain = made_of(network), walked(pipeline)
    with applied([compiler(mode, Rereads.log_probs)], pipeline):
        during = made_of(network)
        assert (during["parameters"], during["keys"]) == (before["parameters"], before["keys"])
        assert len(parts(network)) == compiled
        torch.testing.assert_close(walked(pipeline), plain, atol=1e-5, rtol=1e-5)
    assert made_of(network) == before
    assert torch.equal(walked(pipeline), plain)


def test_an_error_while_it_is_set_up_leaves_nothing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    network, limit = pipeline.models["transformer"], torch._dynamo.config.recompile_limit
    before = made_of(network)
    last = network.single_transformer_blocks[-1]
    monkeypatch.setattr(type(last), "compile", lambda self, **_: nn.Module.compile(self) if self is not last else 1 / 0)
    with pytest.raises(ZeroDivisionError), applied([compiler("regional")], pipeline):
        raise AssertionError("entered")
    assert made_of(network) == before and torch._dynamo.config.recompile_limit == limit


@pytest.mark.parametrize("wrap", ["peft", "ddp"])
def test_wrappers_are_looked_through(pipeline: Pipeline, wrap: str) -> None:
    network = pipeline.models["transformer"]
    if wrap == "peft":
        pipeline.models["transformer"] = get_peft_model(network, LoraConfig(target_modules=["to_q"], r=2))
    else:
        pipeline.models["transformer"] = nn.Sequential(network)  # as torch's data-parallel wrapper: the network is a child
    with applied([compiler("full")], pipeline):
        assert parts(pipeline.models["transformer"]) == [network]
        assert "_orig_mod" not in " ".join(pipeline.models["transformer"].state_dict())


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


@pytest.mark.parametrize("given", [{"backend": "inductr"}, {"mode": "fast", "backend": "inductor"}, {"options": {"nope": 1}, "backend": "inductor"},
                                   {"mode": "default", "options": {}, "backend": "inductor"}])  # fmt: skip
def test_values_that_torch_refuses_are_refused_before_weights_are_loaded(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"acceleration\.shared\.torch_compile\.compile_kwargs: torch.compile refuses "):
        compiler(**given).check(assembled("emoji_tiny"))


@pytest.mark.parametrize("name", ["disable", "model", "recompile_limit", "dynamc"])
def test_only_arguments_that_do_something_are_forwarded(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"compile_kwargs\.{name}: is no argument of torch\.compile"):
        compiler(**{name: True})


class Seen(nn.Module):
    """Notes under which gradient mode and with which strides it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[bool, tuple[int, ...]]] = []

    def forward(self, x: Tensor, rest: Any = None) -> Tensor:
        self.seen.append((torch.is_grad_enabled(), x.stride()))
        return self.scale * x


@pytest.mark.parametrize("rereads", list(Rereads))
def test_gradients_are_on_in_rollouts_only_where_steps_are_compared(rereads: Rereads, pipeline: Pipeline) -> None:
    compared = rereads in (Rereads.transitions, Rereads.log_probs)
    for mode in ("full", "regional"):
        with applied([compiler(mode, rereads)], pipeline), torch.no_grad():
            out = pipeline.models["transformer"](**_inputs(pipeline), return_dict=False)[0]
            assert out.requires_grad == compared
            assert not (out * 1).requires_grad  # what comes after does not go on with the graph
            assert not walked(pipeline).requires_grad


def _inputs(pipeline: Pipeline) -> dict[str, Tensor]:
    given = conditions(1)
    return {
        "hidden_states": torch.ones(1, 16, 192), "encoder_hidden_states": given["prompt_embeds"], "timestep": torch.ones(1),
        "pooled_projections": given["pooled_prompt_embeds"], "txt_ids": torch.zeros(8, 3), "img_ids": torch.zeros(16, 3),
    }  # fmt: skip


def test_floating_inputs_are_contiguous_in_both_phases_and_both_calls() -> None:
    network = Seen()
    strided = torch.ones(4, 3).T
    assert not strided.is_contiguous()
    call = steady(network.forward, keeps_grad=False, compiles=compiler()._compiles)
    for phase in (torch.no_grad, torch.enable_grad):
        with phase():
            call(strided, rest=[strided])
            call(x=strided)
    assert {stride for _, stride in network.seen} == {(4, 1)}
    assert [grad for grad, _ in network.seen] == [False, False, True, True]
    assert steady(call, False, compiler()._compiles) is call  # once is enough


def test_rollout_and_training_run_the_same_graph_where_they_are_compared(pipeline: Pipeline) -> None:
    """Counts graphs: without forced gradients the two phases have one each."""
    counts = {}
    for rereads in (Rereads.final_latent, Rereads.log_probs):
        torch._dynamo.reset()
        one = compiler("full", rereads)
        with applied([one], pipeline):
            with torch.no_grad():
                loss(pipeline)
            after_rollout = one.report()["graphs"]
            loss(pipeline)
            counts[rereads] = (after_rollout, one.report()["graphs"], one.report()["recompiles"])
    assert counts == {Rereads.final_latent: (1, 2, 1), Rereads.log_probs: (1, 1, 0)}


def test_the_limit_is_raised_and_restored(pipeline: Pipeline) -> None:
    config = torch._dynamo.config
    before = config.recompile_limit, config.accumulated_recompile_limit
    with pytest.raises(RuntimeError, match="stop"), applied([compiler()], pipeline):
        assert (config.recompile_limit, config.accumulated_recompile_limit) == (LIMIT, max(LIMIT, before[1]))
        raise RuntimeError("stop")
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before
    with applied([compiler(limit=2)], pipeline):
        assert config.recompile_limit == before[0]  # never lowered


def test_past_the_limit_it_is_said_with_the_reason_and_what_it_costs(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters that change from step to step, as a rollout's and a reference's do: torch runs uncompiled after one line."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    network = pipeline.models["transformer"]
    for name in ("one", "two", "three"):
        network.add_adapter(LoraConfig(target_modules=["to_q"], r=2), adapter_name=name)
    keys = list(network.state_dict())
    one = compiler("full", limit=1)
    with caplog.at_level(logging.INFO, logger="flowrun"), applied([one], pipeline):
        for name in ("one", "two", "three"):
            network.set_adapter(name)
            for _ in range(25):
                loss(pipeline)
        assert list(network.state_dict()) == keys
    assert one.report()["gave_up"] == 1 and one.report()["recompiles"] >= 1
    said = [record.getMessage() for record in caplog.records if record.name.startswith("flowrun.accelerators")]
    assert any("runs uncompiled from now on, because of" in line and "active_adapter" in line for line in said), said
    assert any("a call took" in line and "since" in line for line in said), said
    assert said[-1].startswith("torch_compile: graphs ")


def test_swapped_adapters_within_the_limit_stay_compiled(pipeline: Pipeline) -> None:
    network = pipeline.models["transformer"]
    for name in ("one", "two", "three"):
        network.add_adapter(LoraConfig(target_modules=["to_q"], r=2), adapter_name=name)
    one = compiler("full")
    with applied([one], pipeline):
        for _ in range(2):
            for name in ("one", "two", "three"):
                network.set_adapter(name)
                loss(pipeline)
            graphs = one.report()["graphs"]
        assert one.report() | {"compile_seconds": 0} == {"graphs": 3, "recompiles": 2, "compile_seconds": 0, "gave_up": 0}
        assert graphs == 3  # states that were seen before cost nothing


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
