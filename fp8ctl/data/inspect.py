"""Looking at a data set that is there: is it whole, what is in it, what does a document look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8ctl.data.corpus import Corpus
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardInfo, ShardReader, hash_file
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.errors import DataError

_CHUNK = 2**24
_DECODED_TOKENS = 64
_PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


def verify(path: Path | str, progress: Callable[[str], None] = lambda shard: None) -> list[str]:
    """Reads every byte of a data set and compares it with the manifest.

    Args:
        progress: called with the name of each shard before it is read.

    Returns:
        What is wrong, in sentences; empty when all is well.

    Raises:
        DataError: there is no data set, or its manifest was changed.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    problems = []
    for infos in manifest.splits.values():
        for info in infos:
            progress(info.name)
            found = list(_file_problems(folder, info))
            # a damaged index can't be trusted to say where the documents are
            problems += found or list(_content_problems(folder, info, manifest))
    return problems


@dataclass(frozen=True)
class DecodedDocument:
    """A document that was decoded to see whether it is text."""

    split: str
    number: int
    text: str
    """Its beginning."""


def decode_some(path: Path | str, count: int = 3, seed: int = 0) -> list[DecodedDocument] | None:
    """Decodes documents of a data set chosen by chance (always the same for a seed), to be looked at by a human.

    Returns:
        None where the tokenizer is not where it was when the data set was prepared, or is another one.

    Raises:
        DataError: there is no data set, or a shard is missing or cut short.
    """
    manifest = Manifest.read(path)
    try:
        backend = load_tokenizer(str(manifest.prepared.get("tokenizer", "")))
    except DataError:
        return None
    if backend.fingerprint != manifest.tokenizer_fingerprint:
        return None
    sizes = [(split, manifest.documents(split)) for split in manifest.splits if manifest.has_split(split)]
    total = sum(size for _, size in sizes)
    decoded = []
    for place in np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False)).tolist():
        for split, size in sizes:
            if place < size:
                ids = Corpus(path, manifest, split).tokens(place)
                decoded.append(DecodedDocument(split, place, backend.decode(ids[:_DECODED_TOKENS])))
                break
            place -= size
    return decoded


def stats(path: Path | str) -> dict[str, Any]:
    """What a data set holds, per split: documents, tokens, trained tokens, percentiles of document length in tokens.

    Raises:
        DataError: there is no data set, or a shard is missing or cut short.
    """
    manifest = Manifest.read(path)
    splits = {}
    for split, shards in manifest.splits.items():
        if not manifest.has_split(split):
            continue
        lengths = Corpus(path, manifest, split).lengths
        splits[split] = {
            "shards": len(shards),
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "trained_tokens": sum(s.trained_tokens for s in shards),
            "mean_length": float(lengths.mean()),
            "length_percentiles": {str(p): int(np.percentile(lengths, p, method="lower")) for p in _PERCENTILES},
        }
    return {
        "kind": manifest.kind,
        "fingerprint": manifest.fingerprint,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "vocab_size": manifest.vocab_size,
        "max_token_id": manifest.max_token_id,
        "eos_id": manifest.eos_id,
        "splits": splits,
        "counters": manifest.counters,
        "warnings": manifest.warnings,
    }


@dataclass(frozen=True)
class ShownDocument:
    """A document as text, cut where training begins and ends."""

    number: int
    tokens: int
    trained_tokens: int
    pieces: list[tuple[str, bool]]
    """Text, and whether it is trained."""


def show_document(
    path: Path | str, number: int, *, split: str = "train", tokenizer: Path | str | None = None
) -> ShownDocument:
    """Decodes one document of a data set.

    Args:
        tokenizer: folder of the tokenizer; default: where it was when the data set was prepared.

    Raises:
        DataError: no such data set, split or document, or the tokenizer is another one.
    """
    manifest = Manifest.read(path)
    corpus = Corpus(path, manifest, split)
    if not 0 <= number < len(corpus):
        raise DataError(f"{path} has no {split} document {number}", f"it has documents 0 to {len(corpus) - 1}")
    backend = load_tokenizer(tokenizer if tokenizer is not None else manifest.prepared.get("tokenizer", ""))
    if backend.fingerprint != manifest.tokenizer_fingerprint:
        raise DataError(
            f"{backend.folder} is not the tokenizer that {path} was prepared with", "give the folder of the right one"
        )
    ids, mask = corpus.tokens(number), corpus.mask(number)
    return ShownDocument(number, len(ids), int(mask.sum()), pieces_of(ids, mask, backend))


def pieces_of(ids: np.ndarray, mask: np.ndarray, tokenizer: TextTokenizer) -> list[tuple[str, bool]]:
    """Text of tokens, cut where training begins and ends, each piece with whether it is trained."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[start:end]), bool(mask[start])) for start, end in zip(borders, borders[1:], strict=False)
    ]


def _file_problems(folder: Path, info: ShardInfo) -> Iterator[str]:
    for suffix, size in info.sizes.items():
        file = folder / f"{info.name}.{suffix}"
        if not file.is_file():
            yield f"{file.name} is missing"
        elif file.stat().st_size != size:
            yield f"{file.name} has {file.stat().st_size:,} bytes, the manifest says {size:,}"
        elif hash_file(file) != info.hashes.get(suffix):
            yield f"{file.name} was changed: its hash is not the manifest's"


def _content_problems(folder: Path, info: ShardInfo, manifest: Manifest) -> Iterator[str]:
    try:
        shard = ShardReader(folder, info.name, with_mask=manifest.kind == "sft")
    except DataError as error:
        yield error.message
        return
    if (len(shard), len(shard.all_tokens)) != (info.documents, info.tokens):
        yield f"{info.name} holds {len(shard):,} documents and {len(shard.all_tokens):,} tokens, the manifest says others"
    largest = -1
    for start in range(0, len(shard.all_tokens), _CHUNK):
        chunk = shard.all_tokens[start : start + _CHUNK]
        largest = max(largest, int(chunk.max()))
        if chunk.min() < 0 or largest >= manifest.vocab_size:
            yield f"{info.name} holds a token outside the vocabulary of {manifest.vocab_size:,}"
            return
    if largest != info.max_token_id:
        yield f"the largest token of {info.name} is {largest:,}, the manifest says {info.max_token_id:,}"
    if shard.all_masks is not None and len(shard.all_masks) and shard.all_masks.max() > 1:
        yield f"the mask of {info.name} holds values other than 0 and 1"
