"""`fp8ctl data inspect`: what raw files hold, before anything is prepared."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fp8ctl.config.checks import check_sources
from fp8ctl.config.data_schema import InspectConfig
from fp8ctl.data.conversations import to_conversation
from fp8ctl.data.encode import num_chars
from fp8ctl.data.files import SUFFIXES, Format, InputFile, find_files
from fp8ctl.data.formats import Refused
from fp8ctl.data.rows import BadRowError, Origin
from fp8ctl.data.sample import Sample, SampledRow, objects, sample
from fp8ctl.data.scan import text_of
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.errors import DataError

CHARS_PER_TOKEN = 4.0
"""What is assumed without a tokenizer."""
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_USUAL_NAMES = ("text", "content", "raw_content", "document", "body", "markdown", "code")
_SCHEMAS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("input", "output"),
    ("input_ids",),
)
_BUCKETS = tuple(2**i for i in range(7, 21, 2))
_SHOWN_ROWS = 3
_SHOWN_CHARS = 300
_MOST_REASONS = 10
_BATCH = 64
_INDEX_BYTES = 20
"""Of each document in a shard's index."""


class _Text(NamedTuple):
    place: str
    text: str
    file: int


@dataclass
class Inspection:
    """What was found; shares are of the sampled rows, totals are of all files."""

    files: int
    bytes: int
    by_format: dict[str, dict[str, int]]
    """Format and compression: files and bytes."""
    sampled_rows: int
    rows: int
    rows_are_exact: bool
    fields: dict[str, dict[str, Any]]
    """Of each field: share of the rows that have it, types, mean length of its texts."""
    kind: str
    """cpt, sft, or nothing."""
    schema: str
    """Field of the text, or fields of the conversation."""
    missing_share: float
    """Rows without text or conversation, unreadable ones among them."""
    bad: dict[str, dict[str, Any]]
    """By reason: rows, and where the first of them is."""
    tokens_are: str
    """counted or estimated."""
    mean_tokens: float
    histogram: dict[str, int]
    """Sampled rows by length in tokens."""
    tokens: int
    tokens_per_second: float | None
    """One process."""
    prep_seconds: float | None
    disk_bytes: int
    examples: list[dict[str, str]]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect_source(config: InspectConfig) -> Inspection:
    """Looks at some rows of the files and tells what the whole will be.

    Raises:
        ConfigError: no files in the settings.
        DataError: no files there, none that can be read, or a tokenizer that can't be used.
    """
    check_sources(config)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    files = [file for source in config.sources for file in find_files(source)]
    taken = sample(files, config.sample_rows)
    if not taken.rows:
        why = f": {taken.errors[0]}" if taken.errors else ", they are empty"
        raise DataError(f"no rows in {len(files):,} files{why}", "check the paths")
    kind, schema = _guess(taken, config.text_field)
    texts, bad = _texts(taken, kind, schema)
    lengths, speed = _lengths(texts, tokenizer)
    good_share = len(texts) / len(taken.rows)
    rows = round(sum(taken.num_rows) * taken.scale)
    tokens = _all_tokens(taken, texts, lengths)
    return Inspection(
        files=len(files),
        bytes=sum(f.bytes for f in files),
        by_format=_by_format(files),
        sampled_rows=len(taken.rows),
        rows=rows,
        rows_are_exact=taken.is_exact,
        fields=_fields(taken),
        kind=kind,
        schema=schema,
        missing_share=1 - good_share,
        bad=bad,
        tokens_are="counted" if tokenizer else "estimated",
        mean_tokens=float(lengths.mean()) if len(lengths) else 0.0,
        histogram=_histogram(lengths),
        tokens=tokens,
        tokens_per_second=speed,
        prep_seconds=tokens / speed / config.num_workers if speed else None,
        disk_bytes=tokens * (5 if kind == "sft" else 4) + rows * _INDEX_BYTES,
        examples=[
            {"place": p, "text": text[:_SHOWN_CHARS]} for p, text, _ in texts[:: max(1, len(texts) // _SHOWN_ROWS)]
        ][:_SHOWN_ROWS],
        warnings=[*taken.errors, *(f.note for f in files if f.note)],
    )


def guess_format(path: str) -> Format:
    """Format of a file, folder (of most of its files) or pattern, by its name.

    Raises:
        DataError: the name does not tell.
    """
    if os.path.isdir(path):
        found = Counter(
            kind for _, _, names in os.walk(path, followlinks=False) for name in names if (kind := _by_suffix(name))
        )
        if found:
            return found.most_common(1)[0][0]
        raise DataError(f"{path} holds no file of a known format", f"known are {_known()}")
    kind = _by_suffix(path)
    if kind is None:
        raise DataError(
            f"the name of {path} does not tell its format", f"known are {_known()}; or set sources.0.kind and paths"
        )
    return kind


def _by_suffix(name: str) -> Format | None:
    name = name.lower()
    for compressed in _COMPRESSED:
        name = name.removesuffix(compressed)
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _known() -> str:
    return ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


def _by_format(files: list[InputFile]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for file in files:
        name = file.format + (f".{file.compression}" if file.compression else "")
        counts = found.setdefault(name, {"files": 0, "bytes": 0})
        counts["files"] += 1
        counts["bytes"] += file.bytes
    return found


def _fields(taken: Sample) -> dict[str, dict[str, Any]]:
    values: dict[str, list[Any]] = {}
    for row in objects(taken.rows):
        for name, value in row.items():
            values.setdefault(str(name), []).append(value)
    fields = {}
    for name, of in values.items():
        present = [v for v in of if v is not None]
        texts = [len(v) for v in present if isinstance(v, str)]
        fields[name] = {
            "share": len(present) / len(taken.rows),
            "types": sorted({type(v).__name__ for v in present}),
            "mean_chars": sum(texts) / len(texts) if texts else None,
        }
    return fields


def _guess(taken: Sample, text_field: str | None) -> tuple[str, str]:
    """Kind and schema: the given field, else conversations where most rows hold one, else the field with most text."""
    if text_field is not None:
        return "cpt", text_field
    if sum(isinstance(row.value, str) for row in taken.rows) * 2 >= len(taken.rows):
        return "cpt", ""
    conversations = [row.value for row in taken.rows if _is_conversation(row)]
    if len(conversations) * 2 >= len(taken.rows):
        shapes = {
            next((" + ".join(s) for s in _SCHEMAS if all(value.get(name) is not None for name in s)), "mixed")
            for value in conversations
        }
        return "sft", ", ".join(sorted(shapes))
    amounts = Counter[str]()
    for value in objects(taken.rows):
        amounts.update({str(name): len(text) for name, text in value.items() if isinstance(text, str)})
    usual = next((name for name in _USUAL_NAMES if amounts[name] * 2 >= max(amounts.values(), default=0) > 0), None)
    best = usual or next((name for name, _ in amounts.most_common(1)), None)
    return ("cpt", best) if best is not None else ("", "")


def _is_conversation(row: SampledRow) -> bool:
    try:
        return isinstance(row.value, dict) and to_conversation(row.value, Origin("", 0)) is not None
    except BadRowError:
        return False


def _texts(taken: Sample, kind: str, schema: str) -> tuple[list[_Text], dict[str, dict[str, Any]]]:
    """Place and text of the rows that have one, and why others have none."""
    texts: list[_Text] = []
    bad: dict[str, dict[str, Any]] = {}
    for row in taken.rows:
        text, reason = _text(row, kind, schema)
        if text is not None:
            texts.append(_Text(row.place, text, row.file))
        else:
            entry = bad.setdefault(reason, {"rows": 0, "first": row.place})
            entry["rows"] += 1
    most = sorted(bad.items(), key=lambda item: -item[1]["rows"])[:_MOST_REASONS]
    return texts, dict(most)


def _text(row: SampledRow, kind: str, schema: str) -> tuple[str | None, str]:
    value = row.value
    if isinstance(value, Refused):
        return None, value.reason
    if isinstance(value, str) and not schema:
        return (value, "") if value.strip() else (None, "no text")
    if not isinstance(value, dict):
        return None, f"{type(value).__name__}, not an object"
    if kind == "sft":
        try:
            conversation = to_conversation(value, Origin("", 0))
        except BadRowError as error:
            return None, error.message
        return (text_of(conversation), "") if num_chars(conversation) else (None, "no text")
    text = value.get(schema)
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    if isinstance(text, str):
        return (text, "") if text.strip() else (None, f"field {schema!r} is empty")
    if schema not in value:
        return None, f"no field {schema!r}" if schema else "no field with text"
    return None, f"field {schema!r} is {type(text).__name__}, not text"


def _lengths(texts: list[_Text], tokenizer: TextTokenizer | None) -> tuple[np.ndarray, float | None]:
    if tokenizer is None:
        return np.array([max(1.0, len(text) / CHARS_PER_TOKEN) for _, text, _ in texts]), None
    started_s = time.process_time()
    lengths = [len(ids) for batch in _batches(texts) for ids in tokenizer.encode_documents(batch)]
    seconds = time.process_time() - started_s  # of all threads: what one process will take
    return np.array(lengths, dtype=np.float64), sum(lengths) / max(seconds, 1e-9) if lengths else None


def _all_tokens(taken: Sample, texts: list[_Text], lengths: np.ndarray) -> int:
    """Of each file its own mean counts: a few large documents in one file say nothing about the others."""
    looked_at = np.bincount([row.file for row in taken.rows], minlength=len(taken.num_rows))
    found = np.bincount([text.file for text in texts], weights=lengths, minlength=len(taken.num_rows))
    return round(float((found / np.maximum(looked_at, 1) * np.array(taken.num_rows)).sum()) * taken.scale)


def _batches(texts: list[_Text]) -> Iterator[list[str]]:
    for at in range(0, len(texts), _BATCH):
        yield [text for _, text, _ in texts[at : at + _BATCH]]


def _histogram(lengths: np.ndarray) -> dict[str, int]:
    counts = {f"< {top:,}": 0 for top in _BUCKETS} | {f">= {_BUCKETS[-1]:,}": 0}
    names = list(counts)
    for place in np.searchsorted(_BUCKETS, lengths, side="right").tolist():
        counts[names[place]] += 1
    return counts
