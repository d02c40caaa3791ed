"""pyproject.toml and the pinned versions agree with the folders and with each other."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if line and line[0] != "#"
)
PROJECT = PYPROJECT["project"]


def requirements():
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def test_every_package_is_installed():
    folders = {init.parent for init in (ROOT / "flowrun").rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(packages | {"flowrun.conf"})


def test_every_requirement_is_pinned_within_its_bounds():
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for requirement in requirements():
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement.name


def test_only_hydra_and_omegaconf_have_upper_bounds():
    bounded = {r.name for r in requirements() if re.search(r"<|==|~=", str(r.specifier))}
    assert bounded == {"hydra-core", "omegaconf"}


def test_pins_name_no_local_builds():
    assert not [version for version in PINS.values() if "+" in version]
