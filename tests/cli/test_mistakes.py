"""Every mistake on the command line or in an option file: one line, exit code 2, nothing run and nothing written."""

import re
import shlex

import pytest

from flowrun import cli
from flowrun.compose import compose
from flowrun.config import ConfigError

MISTAKES = [
    # unknown keys, with or without +
    ("modle=tiny", "modle: is no setting; did you mean model?"),
    ("train.stpes=5", "train.stpes: is no setting; did you mean train.steps?"),
    ("+train.stpes=5", "train.stpes: is no setting; did you mean train.steps?"),
    ("+sede=5", "sede: is no setting; did you mean seed?"),
    ("lr=1e-3", "lr: is no setting; did you mean optimizer.lr?"),
    ("task.caption_dorpout=0", "task.caption_dorpout: is no setting; did you mean task.caption_dropout?"),
    ("optimizer.learning_rte=1e-4", "optimizer.learning_rte: is no setting; known: args, betas, "),
    ("train/steps=3", "train/steps: there is no such group; groups: "),
    ("acceleration/sharde=[x]", "acceleration/sharde: there is no such group; did you mean acceleration/shared?"),
    # wrong types
    ("optimizer.lr=abc", "optimizer.lr: 'abc' has the wrong type; give a number"),
    ("optimizer.betas=[1,x]", "optimizer.betas[1]: 'x' has the wrong type; give a number"),
    ("train.steps=1.5", "train.steps: '1.5' has the wrong type; give a whole number"),
    ("dry_run=maybe", "dry_run: 'maybe' has the wrong type; give true or false"),
    ("train=3", "train: is 3, not a section; give its fields, train.FIELD=VALUE"),
    ("sample.prompts=3", "sample.prompts: is no list; give a list, [a,b]"),
    # fixed choices
    ("stage=cahce", "stage: there is no 'cahce'; did you mean cache?"),
    ("stage=roll", "stage: there is no 'roll'; did you mean rollout?"),
    # options of groups
    ("task=sft_splt", "task: there is no option 'sft_splt'; did you mean sft_split or distill_split? "
     "options: distill, distill_split, grpo, grpo_rescored, nft, sft, sft_split"),
    ("tracker=[csv,wandbb]", "tracker: there is no option 'wandbb'; did you mean wandb? options: csv, tensorboard, wandb"),
    ("model=bagel", "model: there is no option 'bagel'; neither diffusers nor transformers has BAGEL's network"),
    ("experiment=smok", "experiment: there is no option 'smok'; did you mean smoke?"),
    ("model=sd3.5", "model: there is no option 'sd3.5'; did you mean sd3_5_large or sd3_5_medium?"),
    ("model=Wan2.2-I2V-A14B", "model: there is no option 'Wan2.2-I2V-A14B'; did you mean wan2_2_i2v_a14b?"),
    ("model=stable", "model: there is no option 'stable'; known: emoji, "),
    ("acceleration/shared=[x]", "acceleration/shared: there is no option 'x'; known: attention_backend, torch_compile"),
    ("+task=sft", "task: is chosen twice; write task=OPTION once, without +"),
    ("experiment=null", "experiment: null is no option; choose an option, experiment=NAME, or leave it out"),
    ("acceleration/shared=null", "acceleration/shared: null is no option; acceleration/shared=[] chooses none"),
    ("tracker=[csv,csv]", "tracker: csv is chosen twice; name each option once"),
    ("-m tracker=[csv],[csv,csv]", "tracker: csv is chosen twice; name each option once"),
    ("task=[sft,sft_split]", "task: takes one option, not a list; write task=NAME"),
    ("model={a:1}", "model: {a:1} is no option's name; choose with model=NAME; a value is set with model.FIELD=..."),
    # a list-valued group set as a value
    ("acceleration.shared=[a]", "acceleration.shared: is ['a'], not a mapping of options; choose options with "),
    (
        "'acceleration/shared=[a]' 'acceleration.shared={b:{}}'",
        "acceleration.shared: is set as a value while acceleration/shared chooses its options; choose with ",
    ),
    # settings that went elsewhere
    ("model.attn_backend=flash", "model.attn_backend: was moved to acceleration.shared.attention_backend; "),
    ("++model.attn_backend=一", "model.attn_backend: was moved to acceleration.shared.attention_backend; "),
    # removing
    ("~seed", "seed: is not given; write seed=VALUE"),
    ("~task", "task: is None; choose an option, task=NAME; --help lists them"),
    ("~nope", "~nope: there is nothing to remove; known: "),
    ("+seed=1", "seed: exists already; write seed=VALUE without +"),
    # missing values
    ("task.density=???", "task.density: is not given; write task.density=VALUE"),
    ("seed=${nope.x}", "seed: refers to ${nope.x}, which does not exist; name an existing key"),
    ("run_id=${oc.env:NOPE_NOPE}", "run_id: needs the environment variable NOPE_NOPE, which is not set; set it"),
    # a rule across fields; the others are in tests/test_config.py
    ("train.epochs=2", "train.steps, train.epochs: both are given; give one and set the other to null"),
    # what the shell made of it
    ("seed", "seed: has no value; write seed=VALUE"),
    ("=3", "=3: has no key; write KEY=3"),
    ("sample.prompts=[a cat, on a mat", "sample.prompts: the shell split the value at its spaces; quote the whole"),
    ("seed=1,2", "seed: has several values, separated by commas; add -m to sweep over them, or quote one value"),
    # flags
    ("--cfg jobb", "command line: argument --cfg/-c: invalid choice: 'jobb'"),
    ("--confg-dir x", "command line: there is no flag --confg-dir; --help lists flags, groups and settings"),
    ("-m --cfg job", "command line: Only one of --run, --multirun, --cfg"),
    ("--resolve", "command line: The --resolve flag can only be used in conjunction with --cfg"),
    ("--shell-completion", "command line: Expecting one subcommand from ['install', 'uninstall', 'query'] to be set"),
    ("--config-name nope", "--config-name: there is no nope.yaml; leave it out"),
    ("--experimental-rerun x", "--experimental-rerun: needs files that flowrun does not write; go on with a run by"),
    ("--config-dir /no/such/folder", "--config-dir: /no/such/folder is no folder; give a folder with options in it"),
    ("hydra.searchpath=[/no/such]", "hydra.searchpath: /no/such is not there; give a folder, or pkg://PACKAGE"),
    ("hydra.searchpath=[pkg://no_such]", "hydra.searchpath: no_such is not there; give a folder, or pkg://PACKAGE"),
    # the same while showing
    ("--help task=sft_splt", "task: there is no option 'sft_splt'; did you mean sft_split"),
    # one wrong job refuses the whole sweep, before any has run
    ("-m seed=1,x", "seed: 'x' has the wrong type; give a whole number"),
]


@pytest.mark.parametrize(("command", "line"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_line(refused, command, line):
    assert refused(*shlex.split(command)).startswith(line)


FILES = [
    # a file of one's own, what it says, the answer
    ("train: {stpes: 3}", "train.stpes: is no setting (in experiment/x.yaml); did you mean train.steps?"),
    ("modle: {a: 3}", "modle: is no setting (in experiment/x.yaml); did you mean model?"),
    ("train: {steps: abc}", "train.steps: 'abc' has the wrong type (in experiment/x.yaml); give a whole number"),
    ("stage: trian", "stage: there is no 'trian' (in experiment/x.yaml); did you mean train?"),
    ("train: {steps: [1", "/options/experiment/x.yaml, line 3: is no valid YAML (expected ',' or ']'"),
    ("train:\n\tsteps: 1", "/options/experiment/x.yaml, line 3: is no valid YAML (found character '\\t'"),
    ("seed: 1\nseed: 2", "/options/experiment/x.yaml, line 3: is no valid YAML (found duplicate key seed)"),
    ("defaults:\n  - override /task: nope", "task: there is no option 'nope'; known: distill, distill_split, grpo, grpo_rescored, nft, "
     "sft, sft_split"),
    ("defaults:\n  - override /tusk: sft", "tusk: is no group (in experiment/x.yaml); did you mean task?"),
    (b"run_id: \xff", "/options/experiment/x.yaml: is not UTF-8 (invalid start byte at byte 28); save it as UTF-8"),
]


@pytest.mark.parametrize(("text", "line"), FILES, ids=[str(text) for text, _ in FILES])
def test_a_mistake_in_a_file_names_the_file(refused, options, text, line):
    text = text if isinstance(text, bytes) else f"{text}\n".encode()
    folder = options({"experiment/x": b"# @package _global_\n" + text})
    answer = refused("--config-dir", folder, "experiment=x")
    assert line in answer
    assert answer.startswith(line) or line[0] == "/"


@pytest.mark.parametrize("text", ["train: {steps: 3}\n", "- a\n"])
def test_an_experiment_without_its_header_is_told_so(refused, options, text):
    folder = options({"experiment/x": text})
    assert "its first line must be `# @package _global_`" in refused("--config-dir", folder, "experiment=x")


def test_missing_folders_of_options_are_refused(refused, monkeypatch):
    monkeypatch.setenv("FLOWRUN_CONF", "/no/such/folder")
    assert refused("seed=1").startswith("FLOWRUN_CONF: /no/such/folder is no folder; give a folder with options in it")
    monkeypatch.setenv("FLOWRUN_CONF", "pkg://no_such_package")
    assert refused("seed=1").startswith("hydra.searchpath: no_such_package is not there; ")


def test_a_removed_setting_in_a_users_option_is_left_to_the_pipeline(runs, options):
    """The section is open while composing; the registry answers with the same words when the pipeline is built."""
    folder = options({"model/old": "name: old\nattn_backend: flash\n"})
    assert cli.main(["--config-dir", folder, "model=old"]) == 0
    assert runs[0].model["attn_backend"] == "flash"


QUOTING = [
    ("sample.prompts=一只猫", ["sample.prompts=一只猫"], "一只猫"),
    ("sample.prompts=[一只猫,dog]", ["sample.prompts=[一只猫,dog]"], ["一只猫", "dog"]),
    ("sample.prompts=[dog!,cat]", ["sample.prompts=[dog!,cat]"], ["dog!", "cat"]),
    ("sample.seeds=[64, 96]", ["sample.seeds=[64,", "96]"], [64, 96]),
    ("sample.prompts=[a cat, 猫]", ["sample.prompts=[a", "cat,", "猫]"], ["a cat", "猫"]),
    ("sample.prompts=a cat, on a mat", ["sample.prompts=a cat, on a mat"], "a cat, on a mat"),
    ("optimizer.args={a: 1}", ["optimizer.args={a:", "1}"], {"a": 1}),
]


@pytest.mark.parametrize(("typed", "arguments", "meant"), QUOTING, ids=[typed for typed, *_ in QUOTING])
def test_the_quoting_in_a_hint_works(refused, typed, arguments, meant):
    """The hint ends with what to type; typed into a shell, it gives the value that was meant."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    hint = re.split("argument: |inside: |one value: ", refused(*arguments))[1]
    (word,) = shlex.split(hint)
    parsed = OverridesParser.create().parse_override(word)
    value = parsed.value()
    plain = [getattr(v, "text", v) for v in value] if isinstance(value, list) else getattr(value, "text", value)
    assert plain == meant


def test_text_of_any_script_comes_from_files(runs, options):
    folder = options({"experiment/cats": "# @package _global_\nsample: {prompts: [一只猫, 'a cat, on a mat']}\n"})
    assert cli.main(["--config-dir", folder, "experiment=cats"]) == 0
    assert runs[0].sample.prompts == ["一只猫", "a cat, on a mat"]


def test_compose_refuses_alike():
    """Notebooks and tests compose without the command line and get the same answers."""
    with pytest.raises(ConfigError, match=r"^train\.stpes: is no setting; did you mean train\.steps\?$"):
        compose(["train.stpes=5"])
    with pytest.raises(ConfigError, match=r"^tracker: csv is chosen twice"):
        compose(["tracker=[csv,csv]"])
    assert compose(["seed=5"]).seed == 5
