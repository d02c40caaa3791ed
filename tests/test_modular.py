"""Modular blocks as units: toy blocks with known effects.   pytest tests/test_modular.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines import (
    ComponentSpec,
    InputParam,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    OutputParam,
    SequentialPipelineBlocks,
)
from torch import Tensor, nn

from flowrun.graph import Draws, Executor, State, UndeclaredEffect, Unit
from flowrun.modular import Modular


class Net(nn.Module):
    """Multiplies by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Block(ModularPipelineBlocks):
    reads: tuple[InputParam, ...] = ()
    writes: tuple[str, ...] = ()
    calls: tuple[ComponentSpec, ...] = ()

    @property
    def inputs(self) -> list[InputParam]:
        return list(self.reads)

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in self.writes]

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return list(self.calls)

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        block_state = self.get_block_state(state)
        self.work(components, block_state)
        self.set_block_state(state, block_state)
        return components, state

    def work(self, components: Any, s: Any) -> None: ...


class Encode(Block):
    """Doubles its input, without saying so."""

    reads = (InputParam("x"), InputParam("times", default=5))
    writes = ("code",)
    calls = (ComponentSpec("net", Net),)

    def work(self, components: Any, s: Any) -> None:
        s.code = components.net(s.x) * s.times
        s.x = 2 * s.x


class Refine(Block):
    reads = (InputParam("code"), InputParam("times", default=7))
    writes = ("fine",)

    def work(self, components: Any, s: Any) -> None:
        s.fine = s.code + s.times


class Unprepared(Block):
    """Would run if anything that the loop needs were only found here."""

    reads = (InputParam("fine"),)
    writes = ("latents",)

    def work(self, components: Any, s: Any) -> None:
        raise AssertionError("latents were given")


class Prepare(Block):
    reads = (InputParam("fine"),)
    writes = ("places",)

    def work(self, components: Any, s: Any) -> None:
        s.places = s.fine + 1


class Denoise(Block):
    reads = (InputParam("latents", required=True), InputParam("places", required=True))
    calls = (
        ComponentSpec("core", Net),
        ComponentSpec("guider", ClassifierFreeGuidance, config=FrozenDict({"guidance_scale": 9.0}), default_creation_method="from_config"),
    )  # fmt: skip

    @torch.no_grad()
    def __call__(self, components: Any, s: Any, i: int, t: Tensor) -> tuple[Any, Any]:
        assert not components.guider._enabled
        s.noise_pred = components.core(s.latents) + s.places + t[:, None]
        return components, s


class Loop(LoopSequentialPipelineBlocks):
    block_classes = [Denoise]
    block_names = ["denoiser"]


def modular(rewrites: dict[str, tuple[str, ...]] | None = None, **blocks: type[Block]) -> Modular:
    whole = {"encode": Encode(), "refine": Refine(), **{name: block() for name, block in blocks.items()},
             "denoise.latents": Unprepared(), "denoise.prepare": Prepare(), "denoise.denoise": Loop()}  # fmt: skip
    return Modular(
        SequentialPipelineBlocks.from_blocks_dict(whole), {"net": {"size": 4}, "core": {}}, lambda name: None, "core",
        {}, {"encode": ("x",), "refine": ()} if rewrites is None else rewrites,
    )  # fmt: skip


def run(units: tuple[Unit, ...], trained: tuple[str, ...] = (), **models: nn.Module) -> dict[str, Any]:
    executor = Executor(units, models, trained=trained)
    return executor.run(State(shared={"x": torch.tensor([1.0, 2.0])}), Draws(0, "row", 0)).shared


def test_blocks_before_the_denoiser_are_units_with_their_declared_effects() -> None:
    encode, refine = modular().units(("x",))
    assert (encode.name, encode.input_params, encode.onload_model_names) == ("encode", ("x",), ("net",))
    assert encode.output_params == ("code", "x") and not encode.may_write  # the rewrite is in the table
    assert (refine.name, refine.input_params, refine.output_params) == ("refine", ("code",), ("fine",))


def test_a_row_is_computed_as_the_block_computes_a_batch_of_one() -> None:
    values = run(modular().units(("x",)), net=Net())
    torch.testing.assert_close(values["code"], torch.tensor([15.0, 30.0]))
    torch.testing.assert_close(values["x"], torch.tensor([2.0, 4.0]))


def test_a_default_is_that_of_the_whole_workflow() -> None:
    units = modular().units(("x",))
    assert [unit.settings["times"] for unit in units] == [5, 5]
    torch.testing.assert_close(run(units, net=Net())["fine"], torch.tensor([20.0, 35.0]))


def test_a_block_outside_the_table_may_rewrite_all_it_reads() -> None:
    encode, refine = modular({}).units(("x",))
    assert encode.may_write and set(encode.output_params) == {"code", "x"}
    assert refine.may_write and set(refine.output_params) == {"fine", "code"}
    torch.testing.assert_close(run((encode, refine), net=Net())["x"], torch.tensor([2.0, 4.0]))


def test_a_rewrite_that_the_table_denies_is_an_error() -> None:
    with pytest.raises(UndeclaredEffect, match="unit encode writes 'x'"):
        run(modular({"encode": (), "refine": ()}).units(("x",)), net=Net())


def test_gradients_pass_through_blocks_of_trained_models_only() -> None:
    net = Net()
    trained = run(modular().units(("x",)), ("net",), net=net)["fine"]
    trained.sum().backward()
    assert float(net.weight.grad) == 15.0  # 5 (1 + 2)
    assert not run(modular().units(("x",)), net=net)["fine"].requires_grad


class Peeking(Block):
    """Reads a setting of a network that it does not declare, which is allowed, or calls it, which is not."""

    writes = ("size",)

    def work(self, components: Any, s: Any) -> None:
        s.size = components.net.config.size


class Calling(Peeking):
    def work(self, components: Any, s: Any) -> None:
        s.size = components.net(torch.ones(1))


class Asking(Peeking):
    def work(self, components: Any, s: Any) -> None:
        s.size = components.net.weight


def test_an_absent_networks_configuration_can_be_read() -> None:
    *_, peek = modular(peek=Peeking).units(("x",))
    assert peek.onload_model_names == ()
    assert run((peek,))["size"] == 4


@pytest.mark.parametrize(("block", "error"), [(Calling, TypeError), (Asking, AttributeError)])
def test_an_undeclared_network_cannot_be_used(block: type[Block], error: type[Exception]) -> None:
    *_, unit = modular(peek=block).units(("x",))
    with pytest.raises(error, match="net, which it does not declare"):
        run((unit,), net=Net())


def test_only_what_the_loop_lacks_is_prepared_and_the_denoiser_is_called_with_gradients() -> None:
    whole, core = modular(), Net()
    prepared = whole.begin({"fine": torch.tensor([[1.0], [2.0]]), "latents": torch.zeros(2, 1)})
    assert prepared.places.flatten().tolist() == [2.0, 3.0]
    x = torch.tensor([[10.0], [20.0]])
    out = whole.velocity(prepared, x, torch.tensor([100.0, 200.0]), core)
    assert out.flatten().tolist() == [132.0, 263.0]
    assert float(prepared.latents.sum()) == 0  # what is prepared can be used again
    out.sum().backward()
    assert float(core.weight.grad) == 30.0


class Two(Block):
    writes = ("pair",)

    def work(self, components: Any, s: Any) -> None:
        s.pair = torch.zeros(2, 3)


def test_a_block_that_returns_more_rows_than_it_got_is_refused() -> None:
    *_, unit = modular(pair=Two).units(("x",))
    with pytest.raises(ValueError, match=r"Two returns pair of shape \[2, 3\] for one row"):
        run((unit,))
