"""One arm of `fp8ctl bench data`, run in a process of its own: python -m fp8ctl.bench.data_arms ARM TEXT TOKENIZER OUT WORKERS.

Prints a JSON object: tokens, seconds, peak memory. Times are of the work itself, without the start of Python and its imports.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def bare(text: Path, tokenizer: str, out: Path, workers: int) -> Callable[[], int]:
    """The tokenizer's fastest call on documents that are in memory already: nothing is read or written."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    backend.encode_special_tokens = True
    texts = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").split("\n") if line]

    def run() -> int:
        batches = (texts[i : i + 128] for i in range(0, len(texts), 128))
        encoded = (e for batch in batches for e in backend.encode_batch_fast(batch, add_special_tokens=False))
        return sum(len(e) + 1 for e in encoded)  # one more for the end-of-text token, as the others write it

    return run


def fp8ctl(text: Path, tokenizer: str, out: Path, workers: int) -> Callable[[], int]:
    """`fp8ctl data prep` from files to a finished data set."""
    from fp8ctl.config.data_schema import DataPrepConfig, SourceConfig
    from fp8ctl.data.manifest import Manifest
    from fp8ctl.data.prepare import prepare

    source = SourceConfig(kind="jsonl", paths=(str(text),))
    config = DataPrepConfig(out=str(out), tokenizer=tokenizer, sources=(source,), num_workers=workers)

    def run() -> int:
        manifest = Manifest.read(prepare(config).parent)
        return manifest.tokens("train") + manifest.tokens("validation")

    return run


def datatrove(text: Path, tokenizer: str, out: Path, workers: int) -> Callable[[], int]:
    """datatrove's reader, tokenizer and Megatron writer, in its local executor; the text is in one file for each worker."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    from fp8ctl.data.tokenizer import load_tokenizer

    parts = out / "parts"
    parts.mkdir(parents=True)
    lines = text.read_bytes().splitlines(keepends=True)
    for worker in range(workers):
        (parts / f"{worker}.jsonl").write_bytes(b"".join(lines[worker::workers]))
    eos = json.loads((Path(tokenizer) / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
    steps = [
        JsonlReader(str(parts), glob_pattern="*.jsonl"),
        MegatronDocumentTokenizer(
            str(out / "tokens"),
            save_filename="text",
            tokenizer_name_or_path=str(Path(tokenizer) / "tokenizer.json"),
            eos_token=eos if isinstance(eos, str) else eos["content"],
        ),
    ]
    executor = LocalPipelineExecutor(
        steps, tasks=workers, workers=workers, logging_dir=str(out / "logs"), start_method="spawn"
    )

    def run() -> int:
        executor.run()
        token_bytes = 4 if load_tokenizer(tokenizer).vocab_size > 2**16 else 2
        return sum(p.stat().st_size for p in (out / "tokens").glob("*.bin")) // token_bytes

    return run


def megatron(text: Path, tokenizer: str, out: Path, workers: int) -> Callable[[], int]:
    """As Megatron's own tool works: json, one document at a time, its indexed data set builder."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    from fp8ctl.data.tokenizer import load_tokenizer

    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    eos = load_tokenizer(tokenizer).eos_id
    out.mkdir(parents=True)

    def run() -> int:
        builder = IndexedDatasetBuilder(str(out / "text.bin"), dtype=np.int32)
        tokens = 0
        with open(text, encoding="utf-8") as f:
            for line in f:
                ids = backend.encode(json.loads(line)["text"], add_special_tokens=False).ids + [eos]
                builder.add_document(torch.tensor(ids, dtype=torch.int32), [len(ids)])
                tokens += len(ids)
        builder.finalize(str(out / "text.idx"))
        return tokens

    return run


ARMS = {"bare": bare, "fp8ctl": fp8ctl, "datatrove": datatrove, "megatron": megatron}


def main() -> None:
    """Entry point."""
    arm, text, tokenizer, out, workers = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):  # a core for each process, as is counted
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(workers)])
    run = ARMS[arm](Path(text), tokenizer, Path(out), int(workers))
    start = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - start
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # of this process or its largest child; Linux counts in KiB
    result: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "peak_bytes": peak_kib * 1024}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
