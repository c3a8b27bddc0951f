"""Where things lie: conf/ and templates/ (checkout or installed wheel), and the names of everything in a run folder."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _bundled(name: str) -> Path:
    # In a wheel the folder is inside the package; in a checkout (also an editable install) it lies beside it.
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def conf_dir() -> Path:
    """Folder of the Hydra configuration files."""
    return _bundled("conf")


def templates_dir() -> Path:
    """Folder of the chat and report templates."""
    return _bundled("templates")


def shown_path(path: Path | str) -> str:
    """A path for people: relative when it lies below the working directory, so that a report passed on names no home folder."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


class RunPaths:
    """Names of everything in one run folder (see docs/run-folder.md)."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.env = self.root / "env.json"
        self.plan = self.root / "plan.json"
        self.coverage = self.root / "coverage.json"
        self.metrics = self.root / "metrics.jsonl"
        self.layers = self.root / "layers.parquet"
        self.events = self.root / "events.jsonl"
        self.status = self.root / "status.json"
        self.logs = self.root / "logs"
        self.checkpoints = self.root / "checkpoints"
        self.eval = self.root / "eval"
        self.read_before = self.root / "read_before.json"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint written after `step` optimizer steps."""
        return self.checkpoints / f"step-{step:08d}"

    def rank_log(self, rank: int) -> Path:
        """Log file of one rank."""
        return self.logs / f"rank-{rank}.log"

    def rank_error(self, rank: int) -> Path:
        """Where a rank leaves the cause of its death for the parent."""
        return self.logs / f"rank-{rank}.error.json"
