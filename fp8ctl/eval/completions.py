"""Raw answers on disk: written as they finish, so that a killed evaluation goes on where it stopped.

A folder belongs to one set of settings. `settings.json` names them and is written before the first answer; answers of other
settings are never mixed in. `completions.jsonl` is in order of finishing while the evaluation runs, and in order of questions
once it is whole, so that equal answers give equal files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from fp8ctl.errors import CheckpointError, ConfigError, DataError
from fp8ctl.track.record import append_jsonl, write_json


@dataclass(frozen=True, order=True)
class Key:
    """One requested answer."""

    family: str
    index: int
    """Number of the question in its family."""
    sample: int
    """Number of the answer to that question."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer as the model gave it, and how it was judged."""

    family: str
    index: int
    sample: int
    question: str
    expected: str
    """Answer of the question's author; some questions have other right answers."""
    text: str
    """Everything generated before the end token, special tokens included."""
    answer: str | None
    """What was taken out of `text` to be judged; null: nothing could be."""
    score: float
    """1 right, 0 wrong."""
    finish_reason: Literal["stop", "length"]
    """stop: the model ended its answer. length: the budget did."""
    prompt_tokens: int
    answer_tokens: int
    """Generated tokens, the end token included."""

    @property
    def key(self) -> Key:
        """What this answers."""
        return Key(self.family, self.index, self.sample)


def hash_settings(settings: Any) -> str:
    """Hash of plain data, independent of key order."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class CompletionStore:
    """The answers of one evaluation folder. Use as a context manager: it holds the folder against a second writer."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Opens the folder, or makes it.

        Args:
            folder: where results go.
            settings: everything that can change an answer, as plain data.

        Raises:
            ConfigError: the folder holds answers of other settings, or another evaluation is writing there.
            DataError: completions.jsonl is damaged other than by a half-written last line.
            CheckpointError: the folder can't be written.
        """
        self.folder = folder
        self.completions_path = folder / "completions.jsonl"
        self.result_path = folder / "result.json"
        self._settings_path = folder / "settings.json"
        self._settings = settings
        self._lock = FileLock(folder / ".lock")
        self.completions: dict[Key, Completion] = {}

    def __enter__(self) -> CompletionStore:
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with _writing(self.folder):
                self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"another evaluation is writing to {self.folder}", "wait for it, or give another out=FOLDER"
            ) from None
        try:
            self._claim()
            self.completions = {c.key: c for c in self._read()}
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def add(self, completion: Completion) -> None:
        """Appends one answer at once; a second answer to the same key is a programmer's mistake.

        Raises:
            CheckpointError: it can't be written; the answers before it are safe.
        """
        assert completion.key not in self.completions, completion.key
        with _writing(self.folder):
            append_jsonl(self.completions_path, dataclasses.asdict(completion))
        self.completions[completion.key] = completion

    def close_with(self, order: Sequence[Key]) -> list[Completion]:
        """Checks that exactly the requested answers are there, and rewrites the file in their order."""
        missing, extra = set(order) - set(self.completions), set(self.completions) - set(order)
        assert not missing and not extra, f"{len(missing)} answers missing, {len(extra)} not asked for"
        ordered = [self.completions[key] for key in order]
        temporary = self.completions_path.with_name(f".{self.completions_path.name}.tmp")
        lines = (json.dumps(dataclasses.asdict(c), ensure_ascii=False, allow_nan=False) + "\n" for c in ordered)
        with _writing(self.folder):
            with open(temporary, "w", encoding="utf-8") as f:
                f.writelines(lines)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, self.completions_path)
        return ordered

    def _claim(self) -> None:
        if self._settings_path.exists():
            there = json.loads(self._settings_path.read_text(encoding="utf-8"))
            if there != self._settings:
                changed = "; ".join(differences(there, self._settings)[:4])
                raise ConfigError(
                    f"{self.folder} holds answers of other settings: {changed}",
                    "give another name=NAME or out=FOLDER, or delete the folder to start afresh",
                )
        elif self.completions_path.exists():
            raise ConfigError(
                f"{self.folder} holds answers of unknown settings", "give another name=NAME or out=FOLDER"
            )
        else:
            with _writing(self.folder):
                write_json(self._settings_path, self._settings)

    def _read(self) -> list[Completion]:
        if not self.completions_path.exists():
            return []
        data = self.completions_path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a killed writer's half line would spoil the next one appended
            with open(self.completions_path, "r+b") as f:
                f.truncate(whole)
        found = []
        # not track.read_jsonl: there the text "nan" means the number
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            try:
                found.append(Completion(**json.loads(line)))
            except (ValueError, TypeError):
                raise DataError(
                    f"{self.completions_path} line {number} is no answer of this version",
                    "delete the folder to start afresh",
                ) from None
        return found


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:  # of the lock: an OSError too, but no trouble with the disk
        raise
    except OSError as error:
        raise CheckpointError(
            f"answers can't be written to {folder}: {error.strerror or error}",
            "make room or give another out=FOLDER; run again, and it goes on from the answers that are there",
        ) from None


def differences(there: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two trees of plain data, as `name: there, now ours` strings."""
    if isinstance(there, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*there, *now])
        return [d for k in keys for d in differences(there.get(k), now.get(k), f"{name}.{k}" if name else k)]
    return [] if there == now else [f"{name} is {_short(there)} there, {_short(now)} now"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
