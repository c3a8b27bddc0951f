"""manifest.json of a data set: what is in it, how it was made, and a fingerprint of its content.

It is written last and atomically: a folder without it is no data set, a shard that it does not name does not exist. It
holds no times and no number of workers, so that the same input gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from fp8ctl.data.shards import ShardInfo
from fp8ctl.errors import DataError
from fp8ctl.track.record import write_json

FORMAT = 1
FILE = "manifest.json"
QUARANTINE = "quarantine.jsonl"


class Manifest(BaseModel):
    """Description of one data set folder."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    format: int = FORMAT
    kind: Literal["cpt", "sft"]
    """cpt: documents. sft: conversations, with a mask of trained tokens beside each shard."""
    tokenizer_fingerprint: str
    """Hash of the tokenizer.json that made the tokens."""
    vocab_size: int
    """Largest id that the tokenizer can give, plus one."""
    max_token_id: int
    """Largest id that is in the shards."""
    eos_id: int | None
    """End-of-text token of the tokenizer; also the filler of padding."""
    splits: dict[str, list[ShardInfo]]
    """Shards of `train` and `validation`, in order."""
    counters: dict[str, Any]
    """rows = documents + dropped (by reason) + bad (by reason)."""
    prepared: dict[str, Any]
    """Settings that the data were made with."""
    fp8ctl_version: str
    warnings: list[str] = []
    """What the user should be told after the preparation."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that training sees: kind, tokenizer, and each split's files in order."""
        content = {
            "format": self.format,
            "kind": self.kind,
            "tokenizer": self.tokenizer_fingerprint,
            "eos_id": self.eos_id,
            "splits": {split: [s.hashes for s in shards] for split, shards in self.splits.items()},
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    def has_split(self, split: str) -> bool:
        """Whether a split holds any token."""
        return self.tokens(split) > 0

    def tokens(self, split: str) -> int:
        """Tokens of a split."""
        return sum(s.tokens for s in self.splits.get(split, []))

    def documents(self, split: str) -> int:
        """Documents of a split."""
        return sum(s.documents for s in self.splits.get(split, []))

    def write(self, folder: Path) -> Path:
        """Writes manifest.json into the folder, atomically."""
        path = folder / FILE
        write_json(path, {**self.model_dump(mode="json"), "fingerprint": self.fingerprint})
        return path

    @staticmethod
    def read(folder: Path | str) -> Manifest:
        """Reads the manifest of a data set folder; shards are not opened.

        Raises:
            DataError: no data set, one that was not finished, or a manifest that can't be understood.
        """
        folder = Path(folder)
        path = folder / FILE
        if not path.is_file():
            if any(folder.glob("*.bin")):
                raise DataError(
                    f"{folder} was not finished: it has shards, but no {FILE}", "run `fp8ctl data prep` again"
                )
            raise DataError(f"no data set in {folder}", f"make one with `fp8ctl data prep out={folder}`")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
                raise DataError(f"{path} has format {value['format']}, this fp8ctl reads {FORMAT}", "prepare it again")
            manifest = Manifest.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(f"{path} can't be understood: {place}: {first['msg']}", "prepare the data again") from None
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}", "prepare the data again") from None
        if value.get("fingerprint") != manifest.fingerprint:
            raise DataError(f"{path} was changed: its fingerprint does not fit", "prepare the data again")
        return manifest
