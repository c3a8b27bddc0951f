"""An installed wheel finds conf/ and templates/ without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, unpacked into a folder of its own like pip does it (the dependencies come from this environment)."""
    out = tmp_path_factory.mktemp("wheel")
    # --no-isolation: setuptools is here already; an isolated build would ask a package index
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
        text=True,
    )
    site = out / "site"
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run(installed: Path, tmp_path: Path, code: str) -> str:
    # -P and another working directory: nothing but the unpacked wheel can be what is imported
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    ).stdout


def test_the_wheel_composes_every_root_and_has_the_templates(installed, tmp_path) -> None:
    code = """
import fp8ctl, fp8ctl.paths as p
from fp8ctl.config.compose import COMMANDS, compose
assert 'site' in fp8ctl.__file__, fp8ctl.__file__
for command in COMMANDS: compose(command)
compose('train_cpt', ['experiment=demo_cpt', 'precision=infir2'])
assert p.conf_dir().parent.name == 'fp8ctl' and p.templates_dir().parent.name == 'fp8ctl'
print(sorted(f.name for f in (p.templates_dir() / 'chat').glob('*')), sorted(f.name for f in (p.templates_dir() / 'report').glob('*')))
"""
    out = run(installed, tmp_path, code)
    assert "smollm2.jinja" in out
    for file in (ROOT / "templates").rglob("*.j*"):
        assert file.name in out


def test_every_module_travels(installed) -> None:
    for kind, root in (("fp8ctl", "fp8ctl"), ("conf", "fp8ctl/conf"), ("templates", "fp8ctl/templates")):
        for file in (ROOT / kind).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.name != ".DS_Store":
                assert (installed / root / file.relative_to(ROOT / kind)).is_file(), f"{file} is not in the wheel"
