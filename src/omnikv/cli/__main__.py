"""The entry point of `omnikv`; also `python -m omnikv.cli`."""

from __future__ import annotations

import sys

MISSING = """omnikv: the command line needs {name}, which is not installed. Install it with

    {python} -m pip install 'omnikv[cli]'
"""


def main() -> None:
    """Run the command line and exit with its status; without typer or rich, say how to install them and exit with 1."""
    try:
        from omnikv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(MISSING.format(name=error.name, python=sys.executable))
        raise SystemExit(1) from error
    app()


if __name__ == "__main__":
    main()
