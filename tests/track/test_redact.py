from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ctl.track.redact import REDACTED, is_secret_name, redact, redact_argv, redact_text, secret_places

SECRET = "zQ7pLm2vX9rT4kB8nW3y"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "hf_token", "token", "hub.token", "--auth-token", "accessToken", "WANDB_API_KEY", "apiKey",
        "api-key", "APIKey",
        "OPENAI_APIKEY", "password", "PGPASSWORD", "db_passwd", "MYSQL_PWD", "client_secret", "AWS_SECRET_ACCESS_KEY",
        "aws_access_key_id", "private_key", "GITHUB_PAT", "basic_auth", "connection_string", "Authorization",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer", "max_tokens", "max_new_tokens", "tokens", "num_tokens", "tokens_seen", "eos_token", "pad_token",
        "bos_token",
        "pad_token_id", "loss_per_token", "seq_len_tokens", "key", "num_kv_heads", "monkey", "PWD", "OLDPWD",
        "SSH_AUTH_SOCK", "path",
        "passes", "author", "AUTHOR_NAME", "DB_PASSWORD_FILE", "append_eos", "secretary", "", "123", "keys",
    ],
)  # fmt: skip
def test_names_that_only_look_so(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "aB3" * 12, "sk-proj-" + "a1B2" * 8, "sk-ant-api03-" + "x_Y" * 10, "ghp_" + "a1" * 18,
        "github_pat_" + "A1_b" * 8,
        "glpat-" + "a-1" * 7, "AKIA" + "ABCD1234" * 2, "AIza" + "Sy-_" * 9, "xoxb-123456789012-abcdef",
        "nvapi-" + "a1-_" * 8,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "dapi" + "0a" * 16, "gsk_" + "a1" * 12,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----", "pypi-AgE" + "IcHlwaS5vcmc_" * 3,
    ],
)  # fmt: skip
def test_shapes(text: str) -> None:
    assert redact_text(text) == REDACTED
    assert redact_text(f"error at '{text}', line 3") == f"error at '{REDACTED}', line 3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"https://user:{SECRET}@host:5000/x", f"https://{REDACTED}@host:5000/x"),
        (f"https://{SECRET}@host/x.git", f"https://{REDACTED}@host/x.git"),
        (f"postgresql://me:p@ss/{SECRET}@db/runs", f"postgresql://{REDACTED}@db/runs"),
        (f"https://h/x?a=1&token={SECRET}&b=2", f"https://h/x?a=1&token={REDACTED}&b=2"),
        (f"https://h/b?X-Amz-Signature={SECRET}", f"https://h/b?X-Amz-Signature={REDACTED}"),
        (f"https://h/b?sv=1&sig={SECRET}#top", f"https://h/b?sv=1&sig={REDACTED}#top"),
        (f"Authorization: Basic {SECRET}", f"Authorization: {REDACTED}"),
        (f"{{'Authorization': 'Bearer {SECRET}'}}", f"{{'Authorization': '{REDACTED}'}}"),
        (f"curl -H 'X: bearer {SECRET}'", f"curl -H 'X: bearer {REDACTED}'"),
        (f"https://hooks.slack.com/services/T0/B0/{SECRET}", f"https://hooks.slack.com/services/{REDACTED}"),
        (f"WANDB_API_KEY={SECRET} python x.py", f"WANDB_API_KEY={REDACTED} python x.py"),
        (f'{{"api_key": "{SECRET}", "n": 1}}', f'{{"api_key": "{REDACTED}", "n": 1}}'),
        (f"password: '{SECRET} with words'", f"password: '{REDACTED}'"),
        (f"fetch --api-key {SECRET} --n 3", f"fetch --api-key {REDACTED} --n 3"),
        (f"++hub.token={SECRET}", f"++hub.token={REDACTED}"),
    ],
)
def test_places(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "loss 2.31 nats/token: 5.2e-1", "eos_token='<|im_end|>' max_tokens=4096",
        "tokenizer=/models/smol/tokenizer.json",
        "model.layers.0.mlp.down_proj", "sqlite:////home/me/runs/mlflow.db", "http://localhost:5000/#/experiments/1",
        "commit 302e05d3f0a1b2c3d4e5f60718293a4b5c6d7e8f", "rank 0: CUDA error: device-side assert",
        "task-based-scheduling-of-work-items",
        "password=", "basic training of a token classifier", "see https://docs.example.org/a?page=2&q=x",
        "12:30:05 step=3",
    ],
)  # fmt: skip
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_values_of_secret_environment_variables_are_found_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hex_key = "0123456789abcdef0123456789abcdef01234567"  # reads like a commit: only its value can give it away
    monkeypatch.setenv("WANDB_API_KEY", hex_key)
    monkeypatch.setenv("DB_PASSWORD", "a b/c+d e")
    assert redact_text(f"401 for {hex_key}!") == f"401 for {REDACTED}!"
    assert redact_text("q=a%20b%2Fc%2Bd%20e or a b/c+d e") == f"q={REDACTED} or {REDACTED}"
    monkeypatch.setenv("API_KEY", "true")
    assert redact_text("is true") == "is true"


def test_plain_data_is_walked() -> None:
    config = {
        "track": {
            "mlflow_uri": f"https://u:{SECRET}@h",
            "token": SECRET,
            "password": 123456,
            "has_password": True,
            "secret": None,
        },
        "paths": (Path("/a/b"), f"--token={SECRET}"),
        "max_tokens": 5,
        "token": 7,
        "credentials": {"user": "u", "key": SECRET},
        "x": 1.5,
    }
    assert redact(config) == {
        "track": {
            "mlflow_uri": f"https://{REDACTED}@h",
            "token": REDACTED,
            "password": REDACTED,
            "has_password": True,
            "secret": None,
        },
        "paths": ["/a/b", f"--token={REDACTED}"],
        "max_tokens": 5,
        "token": 7,
        "credentials": REDACTED,
        "x": 1.5,
    }


def test_places_of_secrets_are_named() -> None:
    settings = {
        "track": {"mlflow_uri": "https://u:p@h/", "experiment": "x", "token": SECRET, "max_tokens": 5},
        "sources": [{"path": Path("/a")}, {"path": f"https://h/?sig={SECRET}"}],
        "credentials": {"a": 1},
        "token": 7,
        "password": None,
    }
    assert secret_places(settings) == ["track.mlflow_uri", "track.token", "sources.1.path", "credentials"]
    assert secret_places({"a": {"b": [1, "c"]}}) == []


def test_command_lines() -> None:
    argv = [
        "fp8ctl",
        "train",
        "--hf-token",
        SECRET,
        "-v",
        "--api-key=" + SECRET,
        "track.mlflow_uri=http://u:p@h",
        "--max-tokens",
        "5",
    ]
    assert redact_argv(argv) == [
        "fp8ctl", "train", "--hf-token", REDACTED, "-v", "--api-key=" + REDACTED,
        f"track.mlflow_uri=http://{REDACTED}@h", "--max-tokens", "5",
    ]  # fmt: skip
    assert redact_argv(["x", "--token", "--verbose"]) == ["x", "--token", "--verbose"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*"ab :/@=\"'?&-_.[]{},\n", "token", "password", "://", "Bearer ", "Authorization: ", REDACTED]
        ),
        max_size=40,
    )
)
def test_redacting_twice_changes_nothing_more(pieces: list[str]) -> None:
    once = redact_text("".join(pieces))
    assert redact_text(once) == once
