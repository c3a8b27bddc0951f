"""Errors that a user can act on: what happened, and a hint how to mend it.

Everything raised on purpose for a user's eyes is an `Fp8ctlError`. The command line prints `error:` and `hint:` and exits with
`exit_code`; a traceback is shown only with `-v`. Programmers' mistakes stay `assert` and plain exceptions.
"""

from __future__ import annotations


class Fp8ctlError(Exception):
    """Base of all errors meant for users.

    `message` says what is wrong in one sentence without a full stop; `hint` says what to do. `exit_code` is 2 for a
    mistake in what the user asked for and 1 for a run that failed.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(Fp8ctlError):
    """Settings that are unknown, of the wrong type, or don't fit together."""


class DataError(Fp8ctlError):
    """Input text, shards or conversations that are missing, empty or damaged."""


class ModelError(Fp8ctlError):
    """Model folders and weight files that can't be read or don't match."""


class PrecisionError(Fp8ctlError):
    """A precision plan that can't be made or was not carried out."""


class CheckpointError(Fp8ctlError):
    """Checkpoints that can't be written, are incomplete, or belong to another run."""

    exit_code = 1


class LaunchError(Fp8ctlError):
    """A job that could not be started, or whose ranks died."""

    exit_code = 1


class MissingPackageError(Fp8ctlError):
    """An optional package that is absent or broken, named with the command that installs it."""
