"""The command line, called in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from gear_loader.cli import app

__all__ = ["run"]


def run(*words: str) -> tuple[int, str]:
    """Exit code and output of `gear-loader ...` in this process."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
