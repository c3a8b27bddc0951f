"""Where a run's numbers go: metrics.jsonl at once, MLflow in the background when asked."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fp8ctl.paths import RunPaths
from fp8ctl.track.metrics import METRICS
from fp8ctl.track.mlflow_sink import MlflowSink, MlflowTarget
from fp8ctl.track.record import State, StepStats, append_jsonl
from fp8ctl.track.redact import redact_text

RUN_ID_FILE = "mlflow_run_id"
_KEPT_LINES = 100_000
_TAIL_BYTES = 1 << 20


class TrackSettings(Protocol):
    """The fields of the settings group `track` (`config.schema.TrackConfig`) that are used here."""

    @property
    def mlflow(self) -> bool: ...
    @property
    def mlflow_uri(self) -> str | None: ...
    @property
    def experiment(self) -> str: ...


class Tracker:
    """Writer of one run's metrics. Only rank 0 makes one: numbers are reduced over ranks before they come here.

    Opening a folder that has been written to before continues it: a line that a killed writer left half-written is cut
    off, and the same MLflow run goes on. Nothing that happens to a sink stops the training: lines that can't be written
    (a full disk) are kept and tried again with the next one.

    Args:
        paths: the run folder.
        track: settings; without `track.mlflow` only metrics.jsonl is written.
        run_name: name of the MLflow run.
        params: the run's settings, nested plain data.
        tags: tags of the MLflow run (git commit, stage, model, ...).
    """

    def __init__(
        self,
        paths: RunPaths,
        track: TrackSettings,
        *,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self._paths = paths
        self._pending: deque[dict[str, Any]] = deque(maxlen=_KEPT_LINES)
        self._has_warned = False
        self._mlflow: MlflowSink | None = None
        for file in (paths.metrics, paths.events):
            mend_tail(file)
        if track.mlflow:
            target = _target(paths, track, run_name)
            self._mlflow = MlflowSink(
                target, params=params, tags={"fp8ctl.run_folder": str(paths.root.resolve()), **tags}
            )

    def log(self, stats: StepStats) -> None:
        """Writes the step's line to metrics.jsonl at once and queues its numbers for MLflow."""
        line = stats.to_line()
        self._pending.append(line)
        self._write()
        if self._mlflow:
            of_sources = {f"validation_loss/{Path(k).name}": v for k, v in (stats.validation_losses or {}).items()}
            self._mlflow.put(stats.step, {name: line[name] for name in METRICS if name in line} | of_sources)

    def log_values(self, step: int, values: Mapping[str, float]) -> None:
        """Queues other numbers for MLflow: those that have their own file in the run folder (evaluations, coverage)."""
        if self._mlflow:
            self._mlflow.put(step, values)

    def close(self, state: State) -> None:
        """Flushes and ends the MLflow run as `state`; a later Tracker on the same folder continues it.

        Calling it again does nothing.
        """
        if self._pending:
            self._write()
        if self._mlflow:
            paths = self._paths
            self._mlflow.close(state, files=(paths.config, paths.env, paths.plan, paths.coverage))

    def _write(self) -> None:
        try:
            if len(self._pending) > 1:  # the last write failed, perhaps half-way
                mend_tail(self._paths.metrics)
            while self._pending:
                append_jsonl(self._paths.metrics, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"warning: can't write {self._paths.metrics}: {error}; kept in memory and tried again",
                    file=sys.stderr,
                    flush=True,
                )


def mend_tail(path: Path) -> None:
    """Cuts a half-written last line off a JSON-lines file, lest the next grow onto it; a whole one is ended."""
    if not path.is_file():
        return
    with open(path, "r+b") as f:
        size = f.seek(0, 2)
        start = f.seek(max(0, size - _TAIL_BYTES))
        last = f.read().rpartition(b"\n")[2]
        if not last or (len(last) == size - start and start > 0):
            return
        try:
            json.loads(last)
            f.write(b"\n")
        except ValueError:
            f.truncate(size - len(last))


def _target(paths: RunPaths, track: TrackSettings, run_name: str) -> MlflowTarget:
    runs = paths.root.resolve().parent
    uri = track.mlflow_uri or f"sqlite:///{runs / 'mlflow.db'}"
    # MLflow's own default is ./mlruns of whatever directory the process happens to be in
    is_database = uri.startswith(("sqlite:", "postgresql", "mysql", "mssql"))
    return MlflowTarget(
        uri=uri,
        experiment=track.experiment,
        artifact_location=(runs / "mlflow-artifacts").as_uri() if is_database else None,
        run_name=redact_text(run_name),
        run_id_file=paths.root / RUN_ID_FILE,
    )
