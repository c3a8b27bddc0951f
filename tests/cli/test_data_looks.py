"""dedup, decontaminate, inspect, verify and cat as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fp8ctl.cli.app import app

QUESTION = "How many of the forty travellers who left the station at nine had reached the old town by noon?"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", *words], catch_exceptions=True)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = ["one \x1b[31mred", "two", "one \x1b[31mred", QUESTION]
    path = tmp_path / "a b.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def test_dedup(tmp_path: Path, documents: Path) -> None:
    out = tmp_path / "list"
    done = run("dedup", str(documents), f"out={out}")
    assert done.exit_code == 0
    assert "4 rows with text, 1 duplicates, 0 near-duplicates: 25.00% of the rows" in done.stdout
    assert "one \\x1b[31mred" in done.stdout and "\x1b" not in done.stdout
    assert "about 4 rows: " in done.stderr and "of memory" in done.stderr
    assert f"use it with `fp8ctl data prep exclude=[{out}]`" in done.stderr
    as_json = run("dedup", str(documents), f"out={tmp_path / 'other'}", "--json")
    assert json.loads(as_json.stdout)["duplicates"] == 1


def test_decontaminate(tmp_path: Path, documents: Path) -> None:
    evals = tmp_path / "eval.jsonl"
    evals.write_text(json.dumps({"question": QUESTION}))
    words = ("decontaminate", str(documents), f"against=[{evals}]")
    done = run(*words, f"out={tmp_path / 'list'}")
    assert done.exit_code == 0 and "1 of 4 rows hold eval items (25.00%)" in done.stdout
    assert "line 4: " in done.stdout and "exclusion list written" in done.stderr
    tagged = run(*words, "mode=tag", "--json")
    assert tagged.exit_code == 0 and json.loads(tagged.stdout)["contaminated"] == 1
    assert run(*words, "mode=fail").exit_code == 1
    evals.write_text(json.dumps({"question": "zero " * 30}))
    assert run(*words, "mode=fail").exit_code == 0


def test_inspect(documents: Path) -> None:
    done = run("inspect", str(documents))
    assert done.exit_code == 0
    assert "text in field 'text'" in done.stdout and "\x1b" not in done.stdout
    assert "fp8ctl data prep source=cpt_local" in done.stderr
    assert json.loads(run("inspect", str(documents), "--json").stdout)["rows"] == 4
    missing = run("inspect", str(documents), "text_field=body")
    assert missing.exit_code == 1
    assert "100.00% of the sampled rows hold no text (allowed are 1.00%)" in missing.stderr
    assert "4 rows: no field 'body' (the first: " in missing.stdout
    assert run("inspect", str(documents), "text_field=body", "max_missing_share=1").exit_code == 0


def test_a_users_mistake(tmp_path: Path) -> None:
    for words, error in (
        (("dedup", "none.jsonl", "out=x"), "error: no jsonl files in none.jsonl"),
        (("dedup", "out=x"), "error: sources: no sources"),
        (("dedup", "a.bin", "out=x"), "error: the name of a.bin does not tell its format"),
        (("dedup", "a.jsonl", "outt=x"), "hint: did you mean out?"),
        (("decontaminate", "a.jsonl"), "against: no eval sets"),
        (("inspect",), "error: no files to look at"),
        (("inspect", "none.jsonl"), "error: no jsonl files in none.jsonl"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "fp8ctl", "data", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert error in done.stderr and "Traceback" not in done.stderr, words
        assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []


def test_documents_can_not_steer_the_terminal(tmp_path: Path, documents: Path, tokenizer: Path) -> None:
    out = tmp_path / "data"
    words = ("prep", f"sources=[{{kind: jsonl, paths: ['{documents}']}}]", f"tokenizer={tokenizer}", f"out={out}")
    assert run(*words, "validation_share=0").exit_code == 0
    shown = run("cat", str(out))
    assert shown.stdout.startswith("one \\x1b[31mred") and "\x1b" not in shown.stdout
    checked = run("verify", str(out))
    assert checked.exit_code == 0 and "all is as the manifest says" in checked.stdout
    lines = [line for line in checked.stdout.splitlines() if line.startswith("train ")]
    assert len(lines) == 3 and "\x1b" not in checked.stdout
    (tokenizer / "tokenizer.json").unlink()
    assert "no document was decoded" in run("verify", str(out)).stderr


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder
