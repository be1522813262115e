"""The commands of `omnikv`."""

from __future__ import annotations

from typing import Annotated

import typer

import omnikv
from omnikv.cli.demo.command import demo
from omnikv.cli.pipeline.command import pipeline
from omnikv.cli.plan.command import plan

app = typer.Typer(name="omnikv", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(plan)
app.command()(pipeline)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omnikv {omnikv.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Hands KV caches from one stage of an inference pipeline to the next, rank by rank."""
