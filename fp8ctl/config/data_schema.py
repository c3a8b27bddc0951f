"""Settings of `fp8ctl data ...`; see `schema.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from fp8ctl.config.settings import Settings


class SourceConfig(Settings):
    """One source of raw text or conversations."""

    kind: Literal["jsonl", "json", "parquet", "text", "python_stdlib", "reasoning_gym"] = "jsonl"
    """jsonl, json, parquet and text read `paths`; python_stdlib reads the running Python's own standard library and its documentation;
    reasoning_gym generates conversations (SFT only)."""
    paths: tuple[str, ...] = ()
    """Files, folders, glob patterns, or URLs that fsspec knows (s3://, gs://, http:// ...); .gz, .zst, .xz and .bz2 are unpacked."""
    text_field: str = "text"
    """Field or column of the text (jsonl, json and parquet, CPT)."""
    max_row_bytes: PositiveInt = 268_435_456
    """A longer line, JSON item or text file is a bad row; bounds the memory that one row may take."""
    damaged_files: Literal["fail", "keep"] = "fail"
    """A file that is cut short or broken in its middle: fail ends the command; keep uses the rows before the damage and counts
    one bad row for what is lost."""
    families: tuple[str, ...] = ()
    """reasoning-gym families to generate."""
    num_per_family: PositiveInt = 100
    """Conversations per reasoning-gym family."""
    seed: int = 1
    """Seed of the generated conversations; evaluation uses other seeds."""


class ClusterConfig(Settings):
    """How datatrove runs the tasks of a preparation on more than one machine; `out` must lie where all of them see it."""

    num_jobs: PositiveInt | None = None
    """Jobs that the tasks are shared over; default: one for each task."""
    max_running_jobs: PositiveInt | None = None
    """Jobs that run at the same time (slurm, ray); default: as many as there is room for."""
    cpus_per_job: PositiveInt = 1
    """Processor cores of a job (slurm, ray); more than one only brings more memory."""
    mem_per_cpu_gb: PositiveInt = 4
    """Memory per core (slurm, ray)."""
    partition: str | None = None
    """Slurm partition."""
    time_limit: str = "24:00:00"
    """Slurm time limit of a job."""
    env_command: str | None = None
    """Shell command that activates the Python environment on a node (slurm)."""
    sbatch_args: tuple[str, ...] = ()
    """Further arguments of sbatch, each as name=value."""


class DataPrepConfig(Settings):
    """Settings of `fp8ctl data prep`."""

    kind: Literal["cpt", "sft"] = "cpt"
    """cpt: documents to tokens. sft: conversations to tokens and a mask of trained tokens."""
    out: str | None = None
    """Folder of the data set to write."""
    tokenizer: str | None = None
    """Folder with tokenizer.json (and, for SFT, the chat template)."""
    sources: tuple[SourceConfig, ...] = ()
    """Where the text comes from, in order."""
    exclude: tuple[str, ...] = ()
    """Folders of exclusion lists that `fp8ctl data dedup` and `fp8ctl data decontaminate` wrote: rows that are left out and counted."""
    append_eos: bool = True
    """End each document with the tokenizer's end-of-text token (CPT)."""
    prepend_bos: bool = False
    """Begin each document with the tokenizer's begin-of-text token (CPT)."""
    document_control_tokens: Literal["text", "ids_unless_special", "ids"] = "text"
    """What becomes of control tokens that are written in documents (CPT), as `<|im_end|>` in a page about chat models. text: they are
    encoded as the characters they are made of. ids_unless_special: those that the tokenizer does not flag as special (often `<think>`
    and tags of tools) become their ids. ids: all do."""
    chat_template: str | None = None
    """Name of a template in templates/chat or a path; default: the tokenizer's own (SFT)."""
    system_prompt: str | None = None
    """System message put in front of conversations that have none (SFT)."""
    default_system: Literal["keep", "none"] = "keep"
    """What stands in conversations without a system message and without `system_prompt`. keep: what the chat template writes by
    itself (Qwen2.5, SmolLM2 and Llama 3 do). none: nothing; templates that can't leave it out are refused."""
    thought_markers: Literal["keep", "think"] = "keep"
    """think: OpenThoughts' markers become <think> tags, and reasoning_content moves into the answer as <think>. keep: neither (SFT)."""
    check_thoughts: bool = True
    """Quarantine answers whose <think> tags are not closed, nested, repeated or behind text; false takes tags as any other text."""
    chat_control_tokens: Literal["refuse", "text"] = "refuse"
    """Control tokens written in a conversation (SFT), which could forge a turn. refuse: quarantine it. text: encode them as plain text."""
    max_tokens: PositiveInt | None = None
    """Longest SFT sample in tokens, see `over_length`; CPT documents are never cut."""
    over_length: Literal["drop", "error", "truncate_tail", "split"] = "drop"
    """What becomes of a conversation above max_tokens, counted in the manifest. drop: left out. error: the command stops.
    truncate_tail: cut at max_tokens, so that its end is not trained. split: between turns, each part with the system message; a turn
    that is too long by itself is cut inside, and the pieces that follow have no question in front."""
    validation_share: float = Field(default=0.005, ge=0.0, lt=0.5)
    """Share of documents held out for validation, chosen by document hash."""
    shard_tokens: PositiveInt = 268_435_456
    """Tokens per shard."""
    num_workers: PositiveInt = 1
    """Processes that tokenize; the result does not depend on it."""
    task_mb: PositiveInt | None = None
    """MiB of input in one task, the unit of going on after a stop; default: a 64th of all, between 16 and 512. The shards depend on it."""
    executor: Literal["local", "datatrove", "slurm", "ray"] = "local"
    """Who runs the tasks. local: processes of this command. The others are datatrove's executors (extra `cluster`): processes on this
    machine, a Slurm cluster, a Ray cluster."""
    cluster: ClusterConfig = ClusterConfig()
    """Settings of the other executors."""
    restart: bool = False
    """Begin again where `out` holds an unfinished preparation with other settings."""
    max_bad_rate: float = Field(default=0.001, ge=0.0, le=1.0)
    """Largest share of unreadable rows before the command fails; bad rows are listed in quarantine.jsonl."""


class DedupConfig(Settings):
    """Settings of `fp8ctl data dedup`."""

    kind: Literal["cpt", "sft"] = "cpt"
    """cpt: documents. sft: conversations, compared as a whole."""
    sources: tuple[SourceConfig, ...] = ()
    """What to look through, in order: of equal rows the first one stays."""
    out: str | None = None
    """Folder of the exclusion list to write, for `fp8ctl data prep exclude=[FOLDER]`."""
    method: Literal["exact", "minhash"] = "exact"
    """exact: equal after `normalise`. minhash: also those that share most of their word sequences (extra `dedup`)."""
    normalise: Literal["spaces", "raw"] = "spaces"
    """spaces: composed Unicode (NFC), every run of white space one space, none at the ends. raw: the text as it is."""
    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    """minhash: share of word sequences that two rows must have in common (Jaccard), computed from their text, not estimated."""
    ngram_words: PositiveInt = 5
    """minhash: words of one sequence; a shorter row is one sequence."""
    num_bands: PositiveInt = 20
    """minhash: rows meet as candidates when the hashes of one band agree; more bands find more and cost more."""
    rows_per_band: PositiveInt = 6
    """minhash: hashes per band; more of them make candidates rarer."""
    seed: int = Field(default=1, ge=0)
    """minhash: seed of the hash functions."""
    num_workers: PositiveInt = 1
    """Processes that read; the result does not depend on it."""
    task_mb: PositiveInt | None = None
    """MiB of input in one task; default: a 64th of all, between 16 and 512."""


class DecontaminateConfig(Settings):
    """Settings of `fp8ctl data decontaminate`."""

    kind: Literal["cpt", "sft"] = "cpt"
    """cpt: whole documents are searched. sft: what is not the assistant's, over all turns."""
    sources: tuple[SourceConfig, ...] = ()
    """What to look through."""
    against: tuple[str, ...] = ()
    """Files of eval sets (JSONL, JSON, Parquet, or text with one item a line), compressed or not; folders, patterns."""
    against_fields: tuple[str, ...] = ()
    """Fields of an eval item that are searched for; default: those of question, problem, prompt, instruction, input, query, text,
    content and messages that it has."""
    out: str | None = None
    """Folder to write to: the exclusion list (mode=drop), report.json and matches.jsonl. Needed for mode=drop."""
    mode: Literal["drop", "tag", "fail"] = "drop"
    """drop: an exclusion list for `fp8ctl data prep exclude=[FOLDER]`. tag: only the report. fail: the report, and exit code 1 when
    anything matched."""
    ngram_words: PositiveInt | None = None
    """Words in a row that an eval item and a row must have in common; default: 13 for cpt, 8 for sft."""
    min_words: PositiveInt | None = None
    """An eval item that is shorter than ngram_words is searched for as a whole if it has this many words; default: 8 for cpt, 5 for sft."""
    fuzzy_ratio: float | None = Field(default=95.0, gt=0.0, le=100.0)
    """sft: short prompts this similar (in percent) to a short eval item match too (extra `dedup`); null: only exact word sequences."""
    fuzzy_max_chars: PositiveInt = 400
    """sft: prompts and eval items up to this long are short."""
    num_workers: PositiveInt = 1
    """Processes that read; the result does not depend on it."""
    task_mb: PositiveInt | None = None
    """MiB of input in one task; default: a 64th of all, between 16 and 512."""


class InspectConfig(Settings):
    """Settings of `fp8ctl data inspect`."""

    sources: tuple[SourceConfig, ...] = ()
    """What to look at; `fp8ctl data inspect FILES` fills it in."""
    tokenizer: str | None = None
    """Folder of the tokenizer to count with; default: tokens are estimated from characters, and the time to prepare is not."""
    text_field: str | None = None
    """Field that must hold text; default: what the rows suggest, text or a conversation."""
    sample_rows: PositiveInt = 2000
    """Rows to look at, from the beginning, and where a file can be entered there from the middle, of up to 32 files."""
    max_missing_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Largest share of sampled rows without text or conversation before the command exits with 1."""
    num_workers: PositiveInt = 1
    """Processes that the time to prepare is told for."""
