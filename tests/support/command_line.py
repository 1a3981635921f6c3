"""Commands of gossamer, invoked in this process."""

from __future__ import annotations

from click import Command
from click.testing import CliRunner

from gossamer.cli.main import gossamer


def output_of(command: Command, *arguments: str) -> tuple[int, str]:
    """The exit code and what was printed."""
    result = CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.output


def refusal(*arguments: str) -> str:
    """What `gossamer ARGUMENTS` says instead of succeeding."""
    result = CliRunner().invoke(gossamer, list(arguments))
    assert result.exit_code != 0
    return f"{result.output} {result.exception}"
