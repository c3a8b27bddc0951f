"""Shards that Megatron's own tools wrote, taken over as a data set: no token is copied, only described."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import fp8ctl
from fp8ctl.data.manifest import FILE, Manifest
from fp8ctl.data.shards import ShardInfo, ShardReader, hash_file
from fp8ctl.data.tokenizer import load_tokenizer
from fp8ctl.errors import DataError

_CHUNK = 2**24


def adopt(
    prefixes: Sequence[Path],
    out: Path,
    tokenizer: Path,
    *,
    validation: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda name: None,
) -> Path:
    """Makes a folder of links to `PREFIX.bin` and `PREFIX.idx` with a manifest that describes them.

    Args:
        prefixes: shards for training, in order; with or without their ending.
        tokenizer: folder of the tokenizer that made the ids.
        validation: shards held out.
        progress: called with the name of each shard before it is read.

    Returns:
        The path of the manifest.

    Raises:
        DataError: a shard is missing or is none, holds ids that the tokenizer can't give, or the folder is taken.
    """
    if (out / FILE).exists():
        raise DataError(f"{out} holds a data set already", "choose another folder, or remove this one")
    shards = [_prefix(p).resolve() for p in (*prefixes, *validation)]
    if twice := [str(p) for p in shards if shards.count(p) > 1]:
        raise DataError(f"{twice[0]} is named twice", "name each shard once, for training or for validation")
    backend = load_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[ShardInfo]] = {"train": [], "validation": []}
    for split, given in (("train", prefixes), ("validation", validation)):
        for number, prefix in enumerate(given):
            path = _prefix(prefix)
            progress(str(path))
            splits[split].append(_describe(path, out, f"{split}-{number:05d}"))
    largest = max((s.max_token_id for shards in splits.values() for s in shards), default=-1)
    if largest >= backend.vocab_size:
        raise DataError(
            f"the shards hold token {largest:,}, the tokenizer in {tokenizer} has {backend.vocab_size:,}",
            "give the folder of the tokenizer that they were made with",
        )
    return Manifest(
        kind="cpt",
        tokenizer_fingerprint=backend.fingerprint,
        vocab_size=backend.vocab_size,
        max_token_id=largest,
        eos_id=backend.eos_id,
        splits=splits,
        counters={"documents": {split: sum(s.documents for s in shards) for split, shards in splits.items()}},
        prepared={"adopted": [str(p) for p in (*prefixes, *validation)], "tokenizer": str(tokenizer)},
        fp8ctl_version=fp8ctl.__version__,
    ).write(out)


def _prefix(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _describe(prefix: Path, out: Path, name: str) -> ShardInfo:
    files = {suffix: prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx")}
    shard = ShardReader(prefix.parent, prefix.name, with_mask=False)
    largest = -1
    for start in range(0, len(shard.all_tokens), _CHUNK):
        chunk = shard.all_tokens[start : start + _CHUNK]
        if chunk.min() < 0:
            raise DataError(f"{files['bin']} holds negative ids", "it is damaged, or its ids are of another type")
        largest = max(largest, int(chunk.max()))
    for suffix, file in files.items():
        link = out / f"{name}.{suffix}"
        link.unlink(missing_ok=True)
        os.symlink(file.resolve(), link)
    lengths = shard.lengths
    return ShardInfo(
        name=name,
        documents=len(shard),
        tokens=int(lengths.sum()),
        trained_tokens=int(np.maximum(lengths - 1, 0).sum()),
        max_token_id=largest,
        hashes={suffix: hash_file(file) for suffix, file in files.items()},
        sizes={suffix: file.stat().st_size for suffix, file in files.items()},
    )
