from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardInfo
from fp8ctl.errors import DataError


def shard(name: str = "train-00000", digest: str = "aa", tokens: int = 30) -> ShardInfo:
    return ShardInfo(name, 3, tokens, 27, 99, {"bin": digest, "idx": "bb"}, {"bin": 120, "idx": 90})


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "kind": "cpt",
        "tokenizer_fingerprint": "tt",
        "vocab_size": 400,
        "max_token_id": 99,
        "eos_id": 0,
        "splits": {"train": [shard()], "validation": [shard("validation-00000", tokens=0)]},
        "counters": {"rows": 3},
        "prepared": {"append_eos": True},
        "fp8ctl_version": "0.1.0",
    }
    return Manifest(**{**values, **changes})


def test_round_trip(tmp_path: Path) -> None:
    made = manifest()
    path = made.write(tmp_path)
    assert path == tmp_path / "manifest.json"
    assert Manifest.read(tmp_path) == made
    assert json.loads(path.read_text())["fingerprint"] == made.fingerprint
    assert (made.tokens("train"), made.documents("train")) == (30, 3)


def test_splits() -> None:
    made = manifest()
    assert made.has_split("train")
    assert not made.has_split("validation"), "a split without tokens is no split"
    assert not made.has_split("test")


def test_fingerprint_is_of_the_content() -> None:
    base = manifest().fingerprint
    assert manifest(counters={"rows": 5}, prepared={}, fp8ctl_version="9").fingerprint == base
    assert manifest(splits={"train": [shard(digest="ab")], "validation": []}).fingerprint != base
    assert manifest(tokenizer_fingerprint="other").fingerprint != base
    assert manifest(kind="sft").fingerprint != base
    assert manifest(eos_id=1).fingerprint != base


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set in ") as error:
        Manifest.read(tmp_path / "absent")
    assert error.value.hint is not None and "fp8ctl data prep out=" in error.value.hint
    (tmp_path / "train-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"was not finished: it has shards, but no manifest\.json"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("kind"), "can't be understood: kind: Field required"),
        (lambda v: v.update(kind="rl"), "can't be understood: kind"),
        (lambda v: v["splits"]["train"][0].pop("tokens"), r"can't be understood: splits\.train\.0\.tokens"),
        (lambda v: v.update(format=2), "has format 2, this fp8ctl reads 1"),
        (lambda v: v["splits"]["train"][0]["hashes"].update(bin="zz"), "its fingerprint does not fit"),
        (lambda v: v.pop("fingerprint"), "its fingerprint does not fit"),
    ],
)
def test_changed_by_hand(tmp_path: Path, change, message: str) -> None:
    path = manifest().write(tmp_path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "null", "\ufeff{}"])
def test_no_manifest_at_all(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError):
        Manifest.read(tmp_path)
