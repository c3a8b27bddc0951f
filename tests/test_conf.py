"""Every file of conf/ composes, and every setting is read somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8ctl.config.compose import COMMANDS, compose, dotted_names, groups
from fp8ctl.paths import conf_dir

PACKAGE = Path(__file__).parent.parent / "fp8ctl"
# which root composes a group; experiments name their command in their first comment line
ROOT_OF = {"source": "data_prep", "suite": "eval"}
CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices if group != "experiment"]
EXPERIMENTS = groups().get("experiment", [])


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda v: v)
def test_every_choice_composes(group: str, choice: str) -> None:
    settings = compose(ROOT_OF.get(group, "train_cpt"), [f"{group}={choice}"])
    assert settings is not None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    command = re.search(r"fp8ctl (train cpt|train sft)", text)
    assert command, f"{name}.yaml says for which command it is"
    compose(command[1].replace(" ", "_"), [f"experiment={name}"])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_roots_compose_alone(command: str) -> None:
    assert isinstance(compose(command), COMMANDS[command])


def test_every_setting_is_read_somewhere() -> None:
    code = "\n".join(f.read_text() for f in PACKAGE.rglob("*.py") if f.name != "schema.py")
    unread = set()
    for schema in COMMANDS.values():
        for name in dotted_names(schema):
            leaf = name.rsplit(".", 1)[-1]
            if not re.search(rf"\.{leaf}\b", code):
                unread.add(name)
    assert not unread


def test_yaml_holds_only_known_settings_and_no_default_twice() -> None:
    for file in conf_dir().rglob("*.yaml"):
        assert file.read_text().strip(), f"{file} is empty"
