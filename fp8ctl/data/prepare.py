"""`fp8ctl data prep`: text or conversations to token shards and a manifest.

Order in, order out: the shards hold the samples in the order of the sources, whatever num_workers is. The manifest is written
last, so a folder is a data set or it is not. rows = documents + dropped + bad holds for every run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import filelock
import xxhash

import fp8ctl
from fp8ctl.config.checks import check_data_prep
from fp8ctl.config.schema import DataPrepConfig
from fp8ctl.data import reasoning_gym
from fp8ctl.data.encode import Dropped, Encoder, Sample, encode_all
from fp8ctl.data.manifest import FILE, QUARANTINE, Manifest
from fp8ctl.data.rows import BadRow
from fp8ctl.data.sources import iter_rows
from fp8ctl.data.splits import SplitWriter, is_validation
from fp8ctl.data.stdlib_text import python_version
from fp8ctl.errors import DataError
from fp8ctl.track.record import append_jsonl

_OURS = re.compile(r"(train|validation)-\d{5}(-rest)?\.(bin|idx|mask\.bin)|" + re.escape(QUARANTINE))


@dataclass
class Counts:
    """How far a preparation is."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    first_bad: BadRow | None = None
    dropped: Counter[str] = field(default_factory=Counter)


def prepare(config: DataPrepConfig, progress: Callable[[Counts], None] = lambda counts: None) -> Path:
    """Writes the data set that `config` describes and returns the path of its manifest.

    Args:
        progress: called after every batch of rows with the counts so far.

    Raises:
        ConfigError: settings that are missing or don't fit together.
        DataError: the folder holds a data set already or is in use, files can't be read or written, too many rows are bad, or
            nothing is left.
    """
    check_data_prep(config)
    assert config.out is not None
    for family in chain.from_iterable(s.families for s in config.sources if s.kind == "reasoning_gym"):
        reasoning_gym.question(family, 0, 0)  # a wrong name fails before anything is written
    encoder = Encoder(config)
    folder = Path(config.out)
    try:
        with _folder_of_our_own(folder):
            return _write(config, encoder, folder, progress)
    except OSError as error:
        raise DataError(
            f"{folder} can't be written: {error.strerror}", "choose another out=FOLDER, or make room"
        ) from None


def _write(config: DataPrepConfig, encoder: Encoder, folder: Path, progress: Callable[[Counts], None]) -> Path:
    options: dict[str, Any] = {"shard_tokens": config.shard_tokens, "with_mask": config.kind == "sft"}
    train = SplitWriter(folder, "train", choose=min, **options)
    validation = SplitWriter(folder, "validation", choose=max, **options)
    counts = Counts()
    try:
        rows = chain.from_iterable(iter_rows(source, config.kind) for source in config.sources)
        for batch, results in encode_all(encoder, config, rows):
            for result in results:
                if isinstance(result, Sample):
                    held_out = is_validation(result.key, config.validation_share)
                    (validation if held_out else train).add(result)
                elif isinstance(result, Dropped):
                    counts.dropped[result.reason] += 1
                else:
                    counts.bad += 1
                    counts.first_bad = counts.first_bad or result
                    _quarantine(folder, result)
            counts.rows += len(batch)
            counts.documents = train.documents + validation.documents
            counts.tokens = train.tokens + validation.tokens
            progress(counts)
        train.close()
        validation.close()
        _refuse_too_many_bad_rows(counts, config, folder)
        if not train.documents:
            validation.lend(train, keep_some=False)
        if not validation.documents and config.validation_share > 0:
            train.lend(validation, keep_some=True)
        return _manifest(config, encoder, train, validation, counts).write(folder)
    except BaseException:
        train.abandon()
        validation.abandon()
        _remove_shards(folder)
        raise


def _refuse_too_many_bad_rows(counts: Counts, config: DataPrepConfig, folder: Path) -> None:
    if counts.first_bad is not None and counts.bad > config.max_bad_rate * counts.rows:
        first = counts.first_bad
        raise DataError(
            f"{counts.bad:,} of {counts.rows:,} rows are bad ({counts.bad / counts.rows:.2%}, allowed are "
            f"{config.max_bad_rate:.2%}); the first is {first.origin.file} line {first.origin.line}: {first.reason}",
            f"see {folder / QUARANTINE} for all of them; raise max_bad_rate to go on without these rows",
        )
    if not counts.documents:
        dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.dropped.items()))
        raise DataError(
            f"nothing to train on: {counts.rows:,} rows in the sources" + (f", dropped: {dropped}" if dropped else ""),
            "check the files that sources.*.paths name, text_field, and max_tokens",
        )


def _manifest(
    config: DataPrepConfig, encoder: Encoder, train: SplitWriter, validation: SplitWriter, counts: Counts
) -> Manifest:
    shards = {"train": train.shards, "validation": validation.shards}
    prepared = config.model_dump(mode="json", exclude={"out", "num_workers"})
    prepared["versions"] = _versions(config)
    if encoder.template is not None:
        prepared["chat_template_hash"] = xxhash.xxh3_128_hexdigest(encoder.template.source.encode())
    return Manifest(
        kind=config.kind,
        tokenizer_fingerprint=encoder.tokenizer.fingerprint,
        vocab_size=encoder.tokenizer.vocab_size,
        max_token_id=max(s.max_token_id for s in chain.from_iterable(shards.values())),
        eos_id=encoder.tokenizer.eos_id,
        splits=shards,
        counters={
            "rows": counts.rows,
            "documents": {"train": train.documents, "validation": validation.documents},
            "dropped": dict(sorted(counts.dropped.items())),
            "bad": counts.bad,
        },
        prepared=prepared,
        fp8ctl_version=fp8ctl.__version__,
        warnings=_warnings(config, validation),
    )


def _warnings(config: DataPrepConfig, validation: SplitWriter) -> list[str]:
    if config.validation_share > 0 and not validation.documents:
        return ["no validation split: all documents are copies of one, which can't be on both sides"]
    return []


def _versions(config: DataPrepConfig) -> dict[str, str]:
    """Versions of what the content depends on."""
    kinds = {source.kind for source in config.sources}
    versions = {"tokenizers": importlib.metadata.version("tokenizers")}
    if "python_stdlib" in kinds:
        versions["python"] = python_version()
    if "reasoning_gym" in kinds:
        versions["reasoning-gym"] = importlib.metadata.version("reasoning-gym")
    return versions


def _quarantine(folder: Path, bad: BadRow) -> None:
    file = bad.origin.file.encode("utf-8", errors="backslashreplace").decode()
    line = {"file": file, "line": bad.origin.line, "reason": bad.reason, "excerpt": bad.excerpt}
    append_jsonl(folder / QUARANTINE, line)


@contextlib.contextmanager
def _folder_of_our_own(folder: Path) -> Iterator[None]:
    """Creates the folder, keeps other preparations out of it, and clears what a killed one left there."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".prep.lock", timeout=0)
    try:
        with lock:
            try:
                if (folder / FILE).exists():
                    raise DataError(
                        f"{folder} holds a data set already", "choose another out=FOLDER, or remove this one"
                    )
                _remove_shards(folder, and_quarantine=True)
                yield
            finally:
                (folder / ".prep.lock").unlink(missing_ok=True)
    except filelock.Timeout:
        raise DataError(
            f"another data prep is writing into {folder}", "wait for it, or choose another out=FOLDER"
        ) from None


def _remove_shards(folder: Path, *, and_quarantine: bool = False) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and (and_quarantine or path.name != QUARANTINE):
            path.unlink()
