"""The command `overlap`: run, bench, --version; a usage error is one line and exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Optional

import typer

import overlap

app = typer.Typer(
    name="overlap",
    help="Data-parallel training whose gradient communication hides behind the backward pass.",
    no_args_is_help=True,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overlap {overlap.__version__}")
        raise typer.Exit()


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a positive number of seconds")
    return seconds


def _seconds_option(flag: str, help: str) -> Any:
    return typer.Option(flag, parser=_seconds, metavar="S", help=help)


@app.callback()
def _overlap(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A program, its arguments.")],
    num_proc: Annotated[
        int, typer.Option("-np", "-n", "--num-proc", parser=_size, metavar="N", help="How many ranks.")
    ],
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say what is started, and how each rank ends.")
    ] = False,
    timeout_s: Annotated[
        Optional[float],  # noqa: UP045 - typer reads the annotation
        _seconds_option("--timeout", "End after S seconds: exit code 124."),
    ] = None,
    start_timeout_s: Annotated[
        Optional[float],  # noqa: UP045 - typer reads the annotation
        _seconds_option("--start-timeout", "Ranks wait S seconds for each other to start."),
    ] = None,
    stall_warn_s: Annotated[
        Optional[float],  # noqa: UP045 - typer reads the annotation
        _seconds_option(
            "--stall-check-warning-time-seconds",
            "Name ranks that a named operation waits for after S seconds.",
        ),
    ] = None,
    stall_abort_s: Annotated[
        Optional[float],  # noqa: UP045 - typer reads the annotation
        _seconds_option(
            "--stall-check-shutdown-time-seconds", "Fail named operations that wait longer than S seconds."
        ),
    ] = None,
) -> None:
    """Run COMMAND as several ranks on this host; each line they print has its rank before it."""
    from overlap.launch.local import launch

    given = {
        "OVERLAP_START_TIMEOUT_S": start_timeout_s,
        "OVERLAP_STALL_WARN_S": stall_warn_s,
        "OVERLAP_STALL_ABORT_S": stall_abort_s,
    }
    os.environ.update({name: f"{seconds:g}" for name, seconds in given.items() if seconds is not None})
    raise typer.Exit(launch(command, num_proc, verbose, timeout_s))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Measure an allreduce or a training step: overlap bench --help."""
    # Imported here: it loads what `overlap run` does not need.
    from overlap.bench.cli import app as bench_app

    raise typer.Exit(_invoke(bench_app, list(context.args), "overlap bench"))


def _invoke(application: typer.Typer, arguments: list[str], name: str) -> int:
    """Run a typer application; returns its exit code."""
    command: Any = typer.main.get_command(application)
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        # Typer's own kinds of error, without its module names, which are other ones from version to version.
        if not hasattr(error, "format_message"):
            raise
        print(_usage_line(error, name), file=sys.stderr)  # noqa: T201
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


def _usage_line(error: Any, name: str) -> str:
    context = getattr(error, "ctx", None)
    name = context.command_path if context is not None else name
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{name}: {message[:1].lower()}{message[1:]} (see {name} --help)"


def main() -> None:
    """Run the command line's arguments, and exit."""
    try:
        code = _invoke(app, sys.argv[1:], "overlap")
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
