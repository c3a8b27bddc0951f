import pytest

from fp8ctl.errors import ModelError
from fp8ctl.model.gguf_tokenizer import pre_tokenizer


def pieces(name, text):
    """Words of a rule, with byte-level spelling turned back (ASCII only)."""
    return [
        word.replace("\u0120", " ").replace("\u010a", "\n") for word, _ in pre_tokenizer(name).pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", "  ", " 1234", " cats", "!", "\n", "\n", "x"]),
        ("smollm", ["It", "'s", "   ", "1", "2", "3", "4", " cats", "!", "\n", "\n", "x"]),
        ("llama-bpe", ["It", "'s", "  ", " ", "123", "4", " cats", "!\n\n", "x"]),
        ("qwen2", ["It", "'s", "  ", " ", "1", "2", "3", "4", " cats", "!\n\n", "x"]),
    ],
)
def test_rules_cut_as_their_models_were_trained(name, expected):
    assert pieces(name, "It's   1234 cats!\n\nx") == expected


def test_no_rule_loses_a_character():
    text = "D'accord, IT'LL be 3.14159 -- \t\r\n (okay?)\n  end "
    for name in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        words = pre_tokenizer(name).pre_tokenize_str(text)
        assert "".join(text[a:b] for _, (a, b) in words) == text


def test_unknown_rules_are_refused():
    with pytest.raises(ModelError, match="tokenizer rule 'default' is not known") as e:
        pre_tokenizer("default")
    assert "Hugging Face folder" in e.value.hint
