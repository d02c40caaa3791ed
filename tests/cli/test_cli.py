"""The command line: what reaches the run, exit codes, flags, options of one's own, and what is printed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowrun import cli
from flowrun.config import ConfigError, DataError, Failure, Run, Stage, Stopped

pytestmark = pytest.mark.usefixtures("composed_once")


def test_a_run_reaches_execute_typed(runs, elsewhere):
    assert cli.main(["stage=train", "seed=3", "train.steps=7", "optimizer.lr=1e-4"]) == 0
    (run,) = runs
    assert isinstance(run, Run)
    assert (run.stage, run.seed, run.train.steps, run.optimizer.lr) == (Stage.train, 3, 7, 1e-4)
    assert not list(elsewhere.iterdir()), "directories are the run's business"


def test_arguments_default_to_those_of_the_process(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flowrun", "seed=4"])
    assert cli.main() == 0
    assert runs[0].seed == 4


def test_run_ids_differ_and_sort_by_time(runs):
    assert cli.main([]) == cli.main([]) == 0
    first, second = (run.run_id for run in runs)
    assert re.fullmatch(r"\d{6}-\d{6}-\d{6}", first)
    assert first < second


def test_the_run_id_can_be_given(runs, monkeypatch):
    monkeypatch.setenv("FLOWRUN_RUN_ID", "from-outside")
    cli.main([])
    cli.main(["run_id=mine"])
    assert [run.run_id for run in runs] == ["from-outside", "mine"]


def test_environment_and_handlers_are_left_as_they_were(runs):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM), Path.cwd()
    cli.main([])
    cli.main(["sede=1"])
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM), Path.cwd()) == before


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("data.path", "is a file", "give a folder"), 2, "flowrun: data.path: is a file; give a folder\n"),
        (DataError(["a.png: damaged", "b.png: empty"], "repair"), 2, "flowrun: a.png: damaged\nb.png: empty\nrepair\n"),
        (Failure("the loss is NaN", "lower the rate"), 1, "flowrun: the loss is NaN; lower the rate\n"),
        (Stopped("stopped after step 3"), 130, "flowrun: stopped after step 3\n"),
        (KeyboardInterrupt(), 130, "flowrun: stopped\n"),
    ],
)
def test_exit_codes_of_a_run(runs, capfd, error, code, printed):
    runs.error = error
    assert cli.main([]) == code
    assert capfd.readouterr().err == printed


def test_an_unexpected_error_keeps_its_traceback(runs):
    runs.error = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_sigterm_ends_what_no_stage_guards(runs, capfd):
    runs.execute = lambda run: None
    sys.modules["flowrun.run"].execute = lambda run: os.kill(os.getpid(), signal.SIGTERM)
    assert cli.main([]) == 130
    assert capfd.readouterr().err == "flowrun: stopped\n"


def test_flags_may_stand_between_settings(runs, capfd):
    assert cli.main(["seed=5", "--cfg", "job", "train.steps=3", "-p", "train"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["steps"] == 3
    assert not runs


def test_cfg_prints_the_composed_run(runs, capfd):
    assert cli.main(["--cfg", "job", "seed=5"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    assert printed["seed"] == 5
    assert printed["acceleration"] == {"shared": None, "rollout": None, "probe": True, "bound": 0.1}
    assert "hydra" not in printed
    assert not runs


def test_help_lists_groups_options_and_settings(runs, capfd, options):
    folder = options({"task/mine": "name: mine\n"})
    assert cli.main(["--help", "seed=5", "--config-dir", folder]) == 0
    out = capfd.readouterr().out
    assert "python -m flowrun" in out
    assert re.search(r"^task: .*\bmine\b.*\bsft_split\b", out, re.MULTILINE)
    assert re.search(r"^seed: 5$", out, re.MULTILINE)
    assert "$" not in re.sub(r"\$\{[^\n]*\}", "", out), "every placeholder is filled in"
    assert not runs


def test_hydras_own_flags_work(runs, capfd):
    assert cli.main(["--version"]) == 0
    assert "Hydra" in capfd.readouterr().out


def test_options_of_ones_own(runs, options, monkeypatch):
    mine = "# @package _global_\nseed: 77\n"
    folder = options({"experiment/mine": mine})
    assert cli.main(["experiment=mine", "--config-dir", folder]) == 0
    assert cli.main(["experiment=mine", f"hydra.searchpath=[file://{folder}]"]) == 0
    monkeypatch.setenv("FLOWRUN_CONF", folder)
    assert cli.main(["experiment=mine"]) == 0
    assert [run.seed for run in runs] == [77, 77, 77]


def test_a_package_of_options(runs, options, tmp_path, monkeypatch):
    folder = Path(options({"experiment/mine": "# @package _global_\nseed: 78\n"}))
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["experiment=mine", "hydra.searchpath=[pkg://options]"]) == 0
    assert runs[0].seed == 78


def test_list_valued_groups_keep_the_order_typed(runs, options):
    folder = options({f"acceleration/shared/{name}": f"{name}: {{k: 1}}\n" for name in ("a", "b")})
    assert cli.main(["--config-dir", folder, "acceleration/shared=[b,a]", "acceleration.shared.a.k=2"]) == 0
    assert list(runs[0].acceleration.shared.items()) == [("b", {"k": 1}), ("a", {"k": 2})]
    assert cli.main(["--config-dir", folder, "acceleration/shared=[]"]) == 0
    assert runs[1].acceleration.shared is None


def test_settings_of_open_sections_can_be_removed_and_added(runs):
    assert cli.main(["~optimizer.args.fused", "+optimizer.args.eps=1e-7", "~tracker.wandb"]) == 0
    assert runs[0].optimizer.args == {"eps": 1e-7}
    assert runs[0].tracker == {"csv": {}}


def test_several_ranks_say_a_mistake_once(runs, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FLOWRUN_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["sede=1"]) == 2
    assert capfd.readouterr().err == ""
    runs.error = Failure("rank 1 broke")
    assert cli.main([]) == 1
    assert capfd.readouterr().err == "flowrun: rank 1 broke\n"
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["sede=1"]) == 2
    assert capfd.readouterr().err == "flowrun: sede: is no setting; did you mean seed?\n"


LIGHT = """
import sys
from flowrun.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "accelerate", "diffusers", "transformers", "peft", "numpy", "wandb"} & set(sys.modules)
sys.stderr.write(f"code {code} heavy {sorted(heavy)}")
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["-m", "seed=0", "dry_run=true"], ["sede=1"]])
def test_no_torch_is_imported(children, arguments):
    """Showing, refusing, and the parent of a sweep, whose job is a process of its own."""
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, timeout=120)
    assert done.stderr.endswith(f"code {2 if arguments == ['sede=1'] else 0} heavy []"), done.stderr


def test_python_m_flowrun_works_from_any_directory(children, elsewhere):
    done = subprocess.run(
        [sys.executable, "-m", "flowrun", "sede=1"], capture_output=True, text=True, cwd=elsewhere, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "flowrun: sede: is no setting; did you mean seed?\n"
    assert not list(elsewhere.iterdir())
