"""Tasks run by datatrove's own executors; the Slurm jobs by an sbatch that runs them at once on this machine."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from fp8ctl.config.checks import check_data_prep
from fp8ctl.config.data_schema import ClusterConfig, DataPrepConfig, SourceConfig
from fp8ctl.data import tasks
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare, submit
from fp8ctl.errors import ConfigError, DataError, LaunchError

pytest.importorskip("datatrove")
pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> DataPrepConfig:
    """A preparation of several tasks."""
    monkeypatch.setattr(tasks, "_SMALLEST_BYTES", 1000)
    rows = [{"text": f"document {i} one two three " * (1 + i % 7)} for i in range(80)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = SourceConfig(kind="jsonl", paths=(str(tmp_path / "a.jsonl"),))
    return DataPrepConfig(
        out=str(tmp_path / "out"), tokenizer=str(tokenizer_folder), sources=(source,), validation_share=0.1
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def test_two_local_workers(tmp_path: Path, config: DataPrepConfig) -> None:
    prepare(config.model_copy(update={"out": str(tmp_path / "alone")}))
    prepare(config.model_copy(update={"executor": "datatrove", "num_workers": 2, "cluster": ClusterConfig(num_jobs=3)}))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "alone")


def test_what_a_task_raises_reaches_the_user(tmp_path: Path, config: DataPrepConfig) -> None:
    (tmp_path / "a.jsonl").write_text("[]\n" * 50)
    with pytest.raises(DataError, match="50 of 50 rows are bad"):
        prepare(config.model_copy(update={"executor": "datatrove"}))


SBATCH = """#!{python}
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
last = int(re.search("--array=0-([0-9]+)", script).group(1))
for number in range(last + 1):
    env = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "RUN_OFFSET": "0", "SLURM_NODELIST": "here", "SLURM_JOB_ID": "7"}}
    subprocess.run(["bash", sys.argv[-1]], env=env, check=True, stdout=sys.stderr)
print("Submitted batch job 7")
"""


def test_slurm_jobs(tmp_path: Path, config: DataPrepConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted runs, and its last job writes the manifest. No real Slurm has been here."""
    programs = {
        "sbatch": SBATCH.format(python=sys.executable),
        "scontrol": "#!/bin/sh\necho here\n",
        "srun": '#!/bin/sh\nshift 3\nexec "$@"\n',
        "launch_pickled_pipeline": f"#!{sys.executable}\nfrom datatrove.tools.launch_pickled_pipeline import main\nmain()\n",
        "merge_stats": "#!/bin/sh\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    cluster = ClusterConfig(num_jobs=2, partition="cpu", env_command="true", sbatch_args=("account=me",))
    assert submit(config.model_copy(update={"executor": "slurm", "cluster": cluster})) == "7"
    assert Manifest.read(tmp_path / "out").counters["rows"] == 80
    prepare(config.model_copy(update={"out": str(tmp_path / "alone")}))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "alone")


def test_without_slurm(tmp_path: Path, config: DataPrepConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cluster.partition: Slurm needs one"):
        check_data_prep(config.model_copy(update={"executor": "slurm"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    on_slurm = {"executor": "slurm", "cluster": ClusterConfig(partition="cpu")}
    with pytest.raises(LaunchError) as error:
        submit(config.model_copy(update=on_slurm))
    assert (error.value.message, error.value.hint) == (
        "there is no sbatch here",
        "run this on a machine that submits to Slurm",
    )
