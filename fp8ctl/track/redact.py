"""Keeps secrets out of everything a run writes: by the name they stand under, by their shape, and by value.

Names must not catch a language model's own words (`eos_token`, `max_tokens`, `tokenizer`), so they are compared word by
word, never as substrings. What no rule of name or shape can know (a 40-digit hex key reads like a commit) is caught by
value: whatever a secret-named environment variable of this process holds is replaced wherever it turns up.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

REDACTED = "[redacted]"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    [
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "secret",
        "secrets",
        "apikey",
        "apikeys",
        "credential",
        "credentials",
        "authorization",
        "cookie",
    ]
)
_SECRET_PAIRS = frozenset(
    (first, "key")
    for first in [
        "api",
        "access",
        "private",
        "secret",
        "account",
        "auth",
        "encryption",
        "signing",
        "ssh",
        "master",
        "service",
    ]
) | {("connection", "string")}
_SECRET_ENDINGS = frozenset(["token", "auth", "pat", "pwd"])
_PLACES = frozenset(["file", "path", "dir", "folder", "name"])
"""Last words that make a name say where a secret lies, not what it is."""
_MODEL_TOKENS = frozenset(
    [
        "eos",
        "bos",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "stop",
        "end",
        "start",
        "special",
        "image",
        "per",
        "turn",
        "text",
        "first",
        "last",
        "next",
        "max",
        "min",
        "added",
        "new",
        "each",
        "a",
        "the",
    ]
)
"""Words before `token` that make it a token of a language model."""

_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}                     # Hugging Face
    | sk-[A-Za-z0-9_-]{20,} | [rs]k_live_[A-Za-z0-9]{16,}                # OpenAI, Anthropic; Stripe
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,} # GitHub, GitLab
    | (?:AKIA|ASIA)[A-Z0-9]{16}                                          # AWS
    | AIza[\w-]{30,} | ya29\.[\w-]{20,}                                  # Google
    | xox[abeprs]-[\w-]{10,}                                             # Slack
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                                    # JSON web token
    | nvapi-[\w-]{20,} | dapi[0-9a-f]{32} | gsk_[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{20,}
    | pypi-AgE[\w-]{20,} | npm_[A-Za-z0-9]{30,} | dckr_pat_[\w-]{20,}
    )""",
    re.VERBOSE,
)
_SLACK_HOOK = re.compile(r"(hooks\.slack\.com/services/)[\w/]+")
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z)", re.DOTALL)
# user:password@ and token@ of a URL; the password may hold @ and, against the standard, /
_URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#@:\"']{0,99}:[^\s\"']{0,499}|[^\s/?#\"']{0,499})@(?=[^\s@\"'])")
_URL_QUERY = re.compile(r"([?&#])([A-Za-z0-9_.-]+)=([^&\s#\"']+)")
_URL_SECRETS = frozenset(
    ["sig", "signature", "key", "x-amz-signature", "x-amz-credential", "x-goog-signature", "x-goog-credential"]
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")
_AUTHORIZATION = re.compile(r"""(?i)\b((?:proxy-)?authorization["']?\s*[:=]\s*["']?)(?:[A-Za-z]+[ ]+)?[^\s"',]+""")
_VALUE = r"""(?:\[redacted\]|"[^"\n]*"|'[^'\n]*'|[^\s"',;&(){}\[\]]+)"""
_ASSIGNMENT = re.compile(rf"""(?<!\w)([A-Za-z_][\w.-]{{0,99}})(["']?\s*[=:]\s*)({_VALUE})""")
_FLAG = re.compile(rf"""(?<![\w-])(--?[A-Za-z][\w-]*)([ ]+)(?!-)({_VALUE})""")
_NUMBER = re.compile(r"[-+]?\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a value under this name (key, flag, environment variable; any case style) must never be shown."""
    words = [w.lower() for w in _WORDS.findall(name)]
    if not words or words[-1] in _PLACES:
        return False
    if any(w in _SECRET_WORDS or w.endswith("password") for w in words) or not _SECRET_PAIRS.isdisjoint(
        zip(words, words[1:], strict=False)
    ):
        return True
    if words[-1] == "pwd":
        return len(words) > 1  # PWD alone is the working directory
    return words[-1] in _SECRET_ENDINGS and not (words[-1] == "token" and len(words) > 1 and words[-2] in _MODEL_TOKENS)


def redact_text(text: str) -> str:
    """The text without what looks like a secret; ordinary text comes back as it was. Idempotent."""
    for secret in _environment_secrets():
        text = text.replace(secret, REDACTED)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _SHAPES.sub(REDACTED, text)
    text = _SLACK_HOOK.sub(rf"\1{REDACTED}", text)
    text = _URL_LOGIN.sub(f"{REDACTED}@", text)
    text = _URL_QUERY.sub(_redact_query, text)
    text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    text = _FLAG.sub(_redact_named, text)
    return _ASSIGNMENT.sub(_redact_named, text)


def redact(value: Any, name: str = "") -> Any:
    """Plain data without secrets: dicts, lists and tuples are copied (tuples as lists), paths become strings.

    A value under a secret name is replaced whole, whatever it holds; None, booleans and empty text stay, since they
    say only that there is no secret.
    """
    if isinstance(value, Path):
        value = str(value)
    if name and is_secret_name(name) and not (value is None or isinstance(value, bool) or value == ""):
        return value if _is_count(name, value) else REDACTED
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item) for item in value]
    return value


def secret_places(value: Any, name: str = "") -> list[str]:
    """Dotted names of the values in nested plain data that `redact` would change: where secrets stand and must not."""
    if isinstance(value, Mapping) and not (name and is_secret_name(name)):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)) and not (name and is_secret_name(name)):
        items = list(enumerate(value))
    else:
        plain = str(value) if isinstance(value, Path) else value
        return [name] if redact(plain, name.rpartition(".")[2]) != plain else []
    return [place for key, item in items for place in secret_places(item, f"{name}.{key}" if name else str(key))]


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token X`, `--token=X`, Hydra's `a.password=X`, and every known shape."""
    out: list[str] = []
    is_value_secret = False
    for argument in argv:
        if is_value_secret and not argument.startswith("-"):
            out.append(REDACTED)
        else:
            out.append(redact_text(argument))
        is_value_secret = argument.startswith("-") and "=" not in argument and is_secret_name(argument)
    return out


def _is_count(name: str, value: Any) -> bool:
    # "loss per token: 2.1", {"token": 7}: a bare number under `token` is a count or an id, never a credential
    return name.lower().endswith("token") and _NUMBER.fullmatch(str(value)) is not None


def _redact_named(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    if not is_secret_name(name) or _is_count(name, value) or not value.strip("\"'"):
        return match.group()
    quotes = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quotes}{REDACTED}{quotes}"


def _redact_query(match: re.Match[str]) -> str:
    mark, name, _ = match.groups()
    is_secret = name.lower() in _URL_SECRETS or is_secret_name(name)
    return f"{mark}{name}={REDACTED}" if is_secret else match.group()


def _environment_secrets() -> list[str]:
    # Shorter values are words ("true", "0") that would blot out half the text.
    values = {v for name, v in os.environ.items() if len(v) >= 8 and is_secret_name(name)}
    return sorted(values | {quote(v, safe="") for v in values}, key=len, reverse=True)
