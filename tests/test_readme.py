"""Commands shown to users parse: every `fp8ctl` line of the README, the docs and the Makefile, against the real command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from fp8ctl.cli.app import app
from fp8ctl.config.compose import compose

ROOT = Path(__file__).parent.parent
COMPOSED = {
    ("train", "cpt"): "train_cpt",
    ("train", "sft"): "train_sft",
    ("data", "prep"): "data_prep",
    ("eval",): "eval",
    ("bench", "gemm"): "bench_gemm",
    ("bench", "step"): "bench_step",
}


def shown_commands() -> list[tuple[str, str]]:
    found = []
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", file.read_text(), flags=re.S):
            text = block.replace("\\\n", " ")
            found += [
                (file.name, line.strip().removeprefix("$ "))
                for line in text.splitlines()
                if re.match(r"\s*(\$ )?fp8ctl ", line)
            ]
    make = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$*", "infir2")
    variables = dict(re.findall(r"^(\w+)\s*[:?]=\s*(.*)$", make, flags=re.M))
    for name in ("DEMO", "DEMO_EVAL"):
        make = make.replace(f"$({name})", variables[name])
    found += [
        ("Makefile", re.sub(r"\$\((\w+)\)", "x", line.strip().replace("$(FP8CTL)", "fp8ctl")))
        for line in make.splitlines()
        if "\t$(FP8CTL)" in line
    ]
    return found


COMMANDS = shown_commands()


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 15
    assert {"README.md", "Makefile"} <= {file for file, _ in COMMANDS}


@pytest.mark.parametrize(("file", "line"), COMMANDS, ids=lambda v: v[:60])
def test_a_shown_command_parses(file: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    path: list[str] = []
    while hasattr(command, "commands"):
        name = words.pop(0)
        if name.startswith("-"):
            return  # `fp8ctl --help`
        assert name in command.commands, f"{file}: no command {name} in: {line}"
        command, path = command.commands[name], [*path, name]
    if "--help" in words:
        return
    context = command.make_context(path[-1], words)
    overrides = context.params.get("overrides") or []
    if overrides and tuple(path) in COMPOSED and not context.params.get("resume"):
        compose(COMPOSED[tuple(path)], overrides)
