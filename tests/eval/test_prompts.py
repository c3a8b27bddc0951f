"""Prompts are what fine-tuning trained on, and every way to end an answer is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fp8ctl.config.schema import ModelShape
from fp8ctl.data.chat import render
from fp8ctl.data.reasoning_gym import SYSTEM_PROMPT, iter_questions, messages
from fp8ctl.errors import DataError, ModelError
from fp8ctl.eval.prompts import Prompter, check_prompts

LAST_MESSAGE = "{{ messages[-1].content }}"


def test_prompt_is_the_beginning_of_the_trained_conversation(model_folder: Path) -> None:
    prompter = Prompter(model_folder)
    for asked in iter_questions("spell_backward", 3, 5):
        ids, mask = render(messages(asked), prompter.template, prompter.tokenizer)
        prompt = prompter.prompt_ids(asked.question, SYSTEM_PROMPT)
        assert prompt == tuple(ids[: mask.argmax()].tolist())
        assert ids[mask.nonzero()[0][-1]] in prompter.stop_ids()


def test_no_system_prompt_leaves_the_templates_own(model_folder: Path) -> None:
    prompter = Prompter(model_folder)
    text = prompter.tokenizer.decode(list(prompter.prompt_ids("1 + 1 =", "")))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n")


def test_data_without_the_templates_own_is_asked_without_it(model_folder: Path) -> None:
    prompter = Prompter(model_folder, "smollm2", "none")
    text = prompter.tokenizer.decode(list(prompter.prompt_ids("1 + 1 =", "")))
    assert text == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"


def copy_with(model_folder: Path, folder: Path, **files: object) -> Path:
    shutil.copytree(model_folder, folder)
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_stop_tokens_come_from_all_places(model_folder: Path, tmp_path: Path) -> None:
    one = copy_with(model_folder, tmp_path / "one", generation_config={"eos_token_id": 77})
    assert Prompter(one).stop_ids() == {77, 0, 2}  # eos of the folder, of the tokenizer, end of turn
    none = copy_with(
        model_folder, tmp_path / "none", generation_config={"eos_token_id": None}, config={"eos_token_id": [8, 9]}
    )
    assert Prompter(none).stop_ids() == {8, 9, 0, 2}


def test_what_is_said_about_a_folder_that_can_not_chat(model_folder: Path, tmp_path: Path) -> None:
    endless = copy_with(
        model_folder,
        tmp_path / "endless",
        generation_config=None,
        config={},
        tokenizer_config={"chat_template": LAST_MESSAGE},
    )
    with pytest.raises(ModelError, match="no token ends an answer in") as caught:
        Prompter(endless).stop_ids()
    assert "eos_token_id" in (caught.value.hint or "")
    broken = copy_with(model_folder, tmp_path / "broken", generation_config="[1")
    with pytest.raises(DataError, match=r"generation_config\.json is not JSON"):
        Prompter(broken)
    odd = copy_with(model_folder, tmp_path / "odd", generation_config="[1]")
    with pytest.raises(ModelError, match=r"generation_config\.json is not a JSON object"):
        Prompter(odd).stop_ids()
    base = copy_with(model_folder, tmp_path / "base", tokenizer_config={"eos_token": "<|endoftext|>"})
    with pytest.raises(DataError, match="has no chat template") as caught_data:
        Prompter(base)
    assert "set chat_template to one of" in (caught_data.value.hint or "")
    assert Prompter(base, "qwen2_5").prompt_ids("1 + 1 =", "Count.")


SHAPE = ModelShape(
    family="llama",
    num_layers=1,
    hidden_size=8,
    ffn_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_size=8,
    vocab_size=10,
    max_positions=20,
)


def test_prompts_that_the_model_can_not_take() -> None:
    check_prompts([(1, 2), (9,)], SHAPE, 18)
    with pytest.raises(ModelError, match="the tokenizer gives token 10, the model's vocabulary has 10"):
        check_prompts([(1, 10)], SHAPE, 1)
    with pytest.raises(
        ModelError, match="prompts of up to 2 tokens and answers of 19 exceed the model's 20 positions"
    ) as caught:
        check_prompts([(1, 2), (9,)], SHAPE, 19)
    assert caught.value.hint == "set suite.max_new_tokens=18 or less"
    with pytest.raises(ModelError) as caught:
        check_prompts([tuple([1] * 20)], SHAPE, 5)
    assert caught.value.hint == "this model is too short for the suite"
