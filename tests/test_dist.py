"""One process and two, device and precision. The two-process checks share one launch."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flowrun.config import ConfigError, DataError, Failure, Lost, Precision, Stopped
from flowrun.dist import make_dist
from flowrun.machine import check_precision, check_processes

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def dist():
    made = make_dist(Precision.fp32)
    yield made
    made.close()


def net():
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, -2.0, 2.0]])
    return model


def test_one_process_is_the_main_one_and_wraps_nothing(dist):
    model = net()
    assert (dist.rank, dist.world, dist.is_main, dist.device.type) == (0, 1, True, "cpu")
    assert dist.prepare(model) is model and dist.unwrap(model) is model
    assert dist.any(True) and not dist.any(False)
    assert dist.sum(torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]
    assert not dist.scales_gradients and dist.state() == {}


@pytest.mark.parametrize("most, left", [(None, [3.0, 4.0, 0.0]), (10.0, [3.0, 4.0, 0.0]), (1.0, [0.6, 0.8, 0.0])])
def test_clipping_scales_the_whole_gradient_and_tells_its_norm(dist, most, left):
    model, unused = net(), nn.Parameter(torch.ones(2))
    dist.backward((model.weight * torch.tensor([[3.0, 4.0, 0.0]])).sum())
    optimizer = torch.optim.SGD([model.weight, unused], lr=1.0)
    assert dist.clip(optimizer, [model.weight, unused], most) == pytest.approx(5.0)
    assert model.weight.grad[0].tolist() == pytest.approx(left, abs=1e-6)
    assert dist.step(optimizer)
    assert model.weight[0].tolist() == pytest.approx([1 - left[0], -2 - left[1], 2 - left[2]], abs=1e-6)
    assert unused.tolist() == [1.0, 1.0]


def test_precisions_follow_one_another_in_a_process():
    for precision, wanted in ((Precision.bf16, torch.bfloat16), (Precision.fp32, torch.float32)) * 2:
        made = make_dist(precision)
        with made.autocast():
            assert net()(torch.ones(1, 3)).dtype == wanted
        made.close()


def test_half_precision_without_a_gpu_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=r"^precision: fp16 needs a GPU and there is none; use bf16 or fp32$"):
        make_dist(Precision.fp16)
    make_dist(Precision.fp32).close()


def test_bf16_on_a_device_that_lacks_it_is_refused_with_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match=r"^precision: this device does not compute in bf16; use fp16 or fp32$"):
        check_precision(Precision.bf16)
    check_precision(Precision.fp32)


@pytest.mark.parametrize(
    ("processes", "environment", "message"),
    [
        (4, {}, "processes: is 4 and this machine has 2 devices for them; use one for each device"),
        (8, {"LOCAL_WORLD_SIZE": "4"}, "processes: is 4 and this machine has 2 devices"),
        (2, {"ACCELERATE_USE_FSDP": "true"}, "accelerate launch: its configuration asks for FSDP"),
        (2, {"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate launch: its configuration asks for DeepSpeed"),
    ],
)
def test_what_the_machine_or_the_launcher_cannot_give_is_refused(monkeypatch, processes, environment, message):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for fits, where in ((2, {}), (8, {"LOCAL_WORLD_SIZE": "2"}), (1, {})):
        with monkeypatch.context() as patch:
            for name, value in where.items():
                patch.setenv(name, value)
            check_processes(fits)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_processes(processes)


def test_any_number_of_processes_may_share_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    check_processes(8)  # ACCELERATE_USE_CPU is set


@pytest.mark.parametrize(
    "error", [ConfigError("a.b", "is 1", "give 2"), DataError(["a", "b"], "c"), Failure("x", "y"), Stopped("z"), Lost()]
)
def test_errors_travel_between_processes(error):
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)
    assert (other.by_all, other.exit_code) == (error.by_all, error.exit_code)


def test_backward_is_not_divided_by_the_launchers_gradient_accumulation(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    made = make_dist(Precision.fp32)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        made._accelerator.scaler, model = scaler, net()
        made.backward(model(torch.ones(1, 3)).sum())
        made.clip(torch.optim.SGD(model.parameters(), lr=1.0), model.parameters(), None)
        assert model.weight.grad[0].tolist() == [1.0, 1.0, 1.0]
    made.close()


def test_missing_processes_are_noticed():
    with pytest.raises(Failure, match="2 processes were asked for and 1 are connected"):
        make_dist(Precision.fp32, processes=2)
    make_dist(Precision.fp32).close()


def test_an_overflow_skips_the_update_and_lowers_the_factor(dist):
    """fp16's scaler works on the CPU too; only accelerate reserves it for GPUs."""
    dist._accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def update(factor):
        optimizer.zero_grad()
        dist.backward((model.weight * torch.tensor([[factor, 0.0, 0.0]])).sum())
        return dist.clip(optimizer, model.parameters(), None), dist.step(optimizer)

    norm, done = update(0.5)
    assert norm == pytest.approx(0.5) and done and model.weight[0].tolist() == [0.5, -2.0, 2.0]
    assert dist.state()["scale"] == 2048
    norm, done = update(float("inf"))
    assert not done and model.weight[0].tolist() == [0.5, -2.0, 2.0]
    assert dist.state()["scale"] == 1024 and dist.scales_gradients
    state = json.loads(json.dumps(dist.state()))
    dist._accelerator.scaler = torch.amp.GradScaler("cpu")
    dist.load_state(state)
    assert dist.state() == state


def test_accelerate_is_imported_in_one_file():
    users = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "flowrun").rglob("*.py")
        if any(
            line.split()[:2] in (["import", "accelerate"], ["from", "accelerate"])
            or line.startswith("from accelerate.")
            for line in path.read_text().splitlines()
        )
    ]
    assert users == ["flowrun/dist.py"]


def rank():
    """Runs on each of two processes; every rank writes what it saw."""
    dist = make_dist(Precision.fp32, processes=2)
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(2, 2)})
    wrapped = dist.prepare(Two(model))
    frozen = net().requires_grad_(False)
    seen = {
        "world": dist.world,
        "main": dist.is_main,
        "frozen": dist.prepare(frozen) is frozen,
        "unwrapped": dist.unwrap(wrapped).model is model,
    }
    # Rank r sees rows of value r + 1, in two micro-batches; the mean gradient over ranks is 2 * (1 + 2) / 2.
    for micro in range(2):
        with dist.syncing(wrapped, last=micro == 1):
            dist.backward(wrapped(torch.full((1, 3), dist.rank + 1.0)).sum())
        seen[f"gradient{micro}"] = model["used"].weight.grad[0].tolist()
    left, right, nowhere = net(), net(), net()
    left.weight.grad = torch.full((1, 3), 2.0 * dist.rank + 1) if dist.rank else None
    right.weight.grad = torch.full((1, 3), dist.rank + 1.0)
    dist.average([left.weight, right.weight, nowhere.weight])
    seen["averages"] = [left.weight.grad[0, 0].item(), right.weight.grad[0, 0].item(), nowhere.weight.grad]
    seen["gathered"] = dist.gather([dist.rank])
    seen["shared"] = dist.share(dist.rank + 5)
    seen["on_main"] = dist.on_main(lambda: dist.rank + 7)
    seen["each"] = dist.each(lambda: dist.rank)
    for name, do in (("refused", lambda: dist.on_main(refuse)), ("one", lambda: dist.each(refuse if dist.rank else list))):
        try:
            do()
        except ConfigError as error:
            seen[name] = str(error)
    seen["any"] = [dist.any(dist.rank == 1), dist.any(False)]
    seen["sum"] = float(dist.sum(torch.tensor(dist.rank + 1.0)))
    dist.close()
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


def refuse():
    raise ConfigError("key", "is wrong", "make it right")


class Two(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model["used"](x)


@pytest.mark.slow
def test_two_processes_average_gradients_agree_on_stopping_and_wrap_only_what_is_trained(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path)], env=common | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    for r in range(2):
        seen = json.loads((tmp_path / f"{r}.json").read_text())
        assert seen == {
            "world": 2,
            "main": r == 0,
            "frozen": True,
            "unwrapped": True,
            "any": [True, False],
            "sum": 3.0,
            "gathered": [[0], [1]],
            "shared": 5,
            "on_main": 7,
            "each": r,
            "refused": "key: is wrong; make it right",
            "one": "key: is wrong; make it right",
            "gradient0": [r + 1.0] * 3,
            "gradient1": [3.0] * 3,
            "averages": [1.5, 1.5, None],
        }


if __name__ == "__main__":
    rank()
