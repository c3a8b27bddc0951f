"""MLflow as a sink that can't hurt a run: a thread of its own, batches, a bounded queue, one warning.

The only file that imports mlflow, and never before its thread runs. The run's own files hold everything; so what MLflow
does not take in time is dropped, and the training process never waits for it except a little while when it closes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ctl.track.record import State
from fp8ctl.track.redact import redact, redact_text

MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # a server that does not answer is asked again by the sink itself; mlflow's own retries take minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables that keep mlflow quiet and off the network. It reads some when imported, and deepspeed imports it: a rank
had better start with them."""

_FLUSH_S = 5.0
_LONGEST_PAUSE_S = 300.0
_CLOSE_S = 60.0
_LOCK_S = 120.0
_QUEUE_VALUES = 200_000
_BATCH_VALUES, _BATCH_PARAMS = 1000, 100  # mlflow's limits for one log_batch
_KEY_CHARS, _PARAM_CHARS, _TAG_CHARS = 250, 6000, 8000
_STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}


@dataclass(frozen=True, kw_only=True)
class MlflowTarget:
    """Which MLflow run a run folder feeds."""

    uri: str
    """Tracking URI."""
    experiment: str
    """Experiment; made when absent."""
    artifact_location: str | None
    """Where a new experiment keeps artifacts; None: the server decides."""
    run_name: str
    run_id_file: Path
    """Holds the id of the MLflow run, so that a resumed run continues it."""


class MlflowSink:
    """Feeds one MLflow run from a background thread. No method raises for anything that MLflow does.

    Args:
        target: store, experiment and run.
        params: settings, nested; flattened to dotted names, secrets redacted, long values cut. A resumed run whose
            settings changed keeps its parameters (MLflow forbids changing them) and gets the new value as tag
            `changed.NAME`.
        tags: tags of the run.
    """

    def __init__(self, target: MlflowTarget, *, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._target = target
        self._params = dict(flatten(redact(params)))
        self._tags = {_key(k): _cut(redact_text(str(v)), _TAG_CHARS) for k, v in tags.items()}
        self._queue: deque[tuple[str, float, int, int]] = deque(maxlen=_QUEUE_VALUES)
        self._batch: list[tuple[str, float, int, int]] = []
        self._files: list[Path] = []
        self._final_state: State = "running"
        self._client: Any = None
        self._run_id = ""
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-sink", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queues values of one step and returns at once; when the queue is full the oldest values make room.

        What is no number is left out.
        """
        now_ms = time.time_ns() // 1_000_000
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            # MLflow stores infinity as 1.8e308, which ruins every chart; NaN it keeps and leaves out of charts
            self._queue.append((_key(name), number if math.isfinite(number) else math.nan, now_ms, step))

    def close(self, state: State, files: Sequence[Path] = ()) -> None:
        """Hands over what is queued, and `files` as artifacts; ends the MLflow run as `state`; waits a limited time."""
        if self._closing.is_set():
            return
        self._final_state = state
        self._files = [f for f in files if f.is_file()]
        self._closing.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"it did not take the last values within {_CLOSE_S:.0f} s")

    # ------------------------------------------------------------ everything below runs in the thread

    def _work(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            pause_s = _FLUSH_S if self._deliver() else min(max(2 * pause_s, _FLUSH_S), _LONGEST_PAUSE_S)
        if self._deliver():
            self._finish()

    def _deliver(self) -> bool:
        try:
            if self._client is None:
                self._connect()
            while self._batch or self._queue:
                self._send_batch()
        except Exception as error:  # whatever mlflow, its store or the network can throw
            self._warn(error)
            return False
        return True

    def _send_batch(self) -> None:
        from mlflow.entities import Metric

        while self._queue and len(self._batch) < _BATCH_VALUES:
            self._batch.append(self._queue.popleft())
        metrics = [Metric(key, value, now_ms, step) for key, value, now_ms, step in self._batch]
        self._unless_refused(self._client.log_batch, self._run_id, metrics=metrics)
        self._batch = []

    def _finish(self) -> None:
        for file in self._files:
            try:
                self._client.log_artifact(self._run_id, str(file))
            except Exception as error:
                self._warn(error)
                break
        try:
            self._client.set_terminated(self._run_id, status=_STATUS[self._final_state])
        except Exception as error:
            self._warn(error)

    def _connect(self) -> None:
        _silence()
        from mlflow import MlflowClient

        target = self._target
        with _creation_lock(target.uri):
            client = MlflowClient(tracking_uri=target.uri)
            experiment = client.get_experiment_by_name(target.experiment)
            if experiment is None:
                experiment_id = client.create_experiment(target.experiment, artifact_location=target.artifact_location)
            else:
                experiment_id = experiment.experiment_id
        run = self._previous_run(client)
        if run is None:
            run = client.create_run(experiment_id, run_name=target.run_name, tags=self._tags)
            self._run_id = (
                run.info.run_id
            )  # before the file: should that fail, the next attempt must not make another run
            temporary = target.run_id_file.with_suffix(".tmp")
            temporary.write_text(self._run_id + "\n", encoding="utf-8")
            os.replace(temporary, target.run_id_file)
        self._run_id = run.info.run_id
        self._send_params(client, dict(run.data.params))
        self._client = client

    def _previous_run(self, client: Any) -> Any:
        from mlflow.exceptions import MlflowException

        file = self._target.run_id_file
        run_id = self._run_id or (file.read_text(encoding="utf-8").strip() if file.exists() else "")
        if not run_id:
            return None
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None  # another store, or removed for good: the folder starts a new MLflow run
            raise
        if run.info.lifecycle_stage != "active":
            return None
        client.update_run(run_id, status=_STATUS["running"])
        return run

    def _send_params(self, client: Any, known: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        new = [Param(k, v) for k, v in self._params.items() if k not in known]
        tags = dict(self._tags) if known else {}
        tags |= {_key(f"changed.{k}"): v for k, v in self._params.items() if known.get(k, v) != v}
        items: list[tuple[str, list[Any]]] = [("params", new), ("tags", [RunTag(k, v) for k, v in tags.items()])]
        for kind, values in items:
            for start in range(0, len(values), _BATCH_PARAMS):
                self._unless_refused(client.log_batch, self._run_id, **{kind: values[start : start + _BATCH_PARAMS]})

    def _unless_refused(self, call: Any, *arguments: Any, **keywords: Any) -> None:
        """A call that MLflow may refuse for its content: sending that again would block all behind it for ever."""
        from mlflow.exceptions import MlflowException

        try:
            call(*arguments, **keywords)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            self._warn(error)

    def _warn(self, reason: Exception | str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        text = str(reason).strip() or type(reason).__name__
        first_line = _cut(redact_text(text.splitlines()[0]), 300)
        print(
            f"warning: MLflow ({redact_text(self._target.uri)}) does not take the metrics: {first_line}; "
            "the run goes on, and its own files have everything",
            file=sys.stderr,
            flush=True,
        )


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text) within MLflow's limits; lists of plain values stay one value, as JSON."""
    if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        yield from itertools.chain.from_iterable(
            flatten(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items()
        )
    elif prefix:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield _key(prefix), _cut(text, _PARAM_CHARS)


def _key(name: str) -> str:
    # MLflow takes word characters and -. :/ in names, and they must not read as a path to elsewhere
    clean = re.sub(r"[^\w\-. :/]", "_", str(name))
    clean = "/".join(part if part.strip(".") else "_" for part in clean.split("/"))
    return clean if len(clean) <= _KEY_CHARS else clean[:120] + "..." + clean[-120:]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _creation_lock(uri: str) -> AbstractContextManager[Any]:
    """One process at a time makes the tables: two migrations of one SQLite file at once leave it broken."""
    file = uri.removeprefix("sqlite:///").partition("?")[0]
    if not uri.startswith("sqlite:///") or file in ("", ":memory:"):
        return nullcontext()
    from filelock import FileLock

    Path(file).parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{file}.lock", timeout=_LOCK_S)


def _silence() -> None:
    """Also where mlflow was imported before its variables were set, since it reads them only then."""
    import mlflow  # noqa: F401
    from mlflow.telemetry import set_telemetry_client

    set_telemetry_client()  # asks the variables anew, and drops a client that runs
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
