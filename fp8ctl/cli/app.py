"""The `fp8ctl` command: parses, calls, prints. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fp8ctl import __version__
from fp8ctl.cli import bench, data, evaluate, export, model, monitor, train
from fp8ctl.cli import doctor as doctor_command
from fp8ctl.cli import report as report_command
from fp8ctl.cli.console import print_error, stderr
from fp8ctl.errors import Fp8ctlError

app = typer.Typer(
    name="fp8ctl",
    help="Trains reasoning language models in FP8 on DeepSpeed and proves that it was worth it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"fp8ctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks.")] = False,
) -> None:
    """Settings after a command are Hydra overrides, for example precision=infir2 optim.peak_lr=1e-4; see docs/."""


app.command("doctor")(doctor_command.doctor)
app.add_typer(model.app, name="model")
app.add_typer(data.app, name="data")
app.add_typer(train.app, name="train")
app.add_typer(monitor.app, name="monitor")
app.add_typer(bench.app, name="bench")
app.command("eval")(evaluate.evaluate)
app.command("report")(report_command.report)
app.command("export")(export.export)


def main() -> None:
    """Runs the command line; turns errors meant for users into two lines and an exit code."""
    verbose = any(a in ("-v", "--verbose") for a in sys.argv[1:])
    # -v is understood anywhere, also behind a command
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in ("-v", "--verbose")]
    try:
        app()
    except Fp8ctlError as error:
        print_error(error)
        if verbose:
            stderr().print_exception()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        # The disk, permissions, a path that is a folder: the user's to mend, and the system's words say what it is.
        if verbose:
            raise
        print_error(
            Fp8ctlError(
                f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""),
                "run again with -v for the place",
            )
        )
        sys.exit(1)
