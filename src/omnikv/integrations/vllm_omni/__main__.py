"""Runs a program that finds the published names over omnikv, as `python` would run it otherwise."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from omnikv.errors import AliasError
from omnikv.integrations.vllm_omni.aliases import install

_USAGE = """\
usage: python -m omnikv.integrations.vllm_omni [--replace] (-m MODULE | SCRIPT) [ARGUMENT...]

Runs MODULE or SCRIPT with an engine's published KV transfer names leading to omnikv.

  --replace   where the engine is installed, replace its KV transfer manager and nothing else
"""


def main(args: list[str]) -> int:
    """The exit status, once the program that `args` name has run; a program that exits by itself never gets here."""
    if args[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    replace = args[:1] == ["--replace"]
    program = args[1:] if replace else args
    module = program[1:2] if program[:1] == ["-m"] else []
    if not program or (program[0].startswith("-") and not module):
        return _refuse("name a script, or a module with -m" if not program else f"cannot read {program[0]!r}")
    if not module and not os.path.exists(program[0]):
        return _refuse(f"no such script: {program[0]!r}")
    try:
        install(replace=replace)
    except AliasError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return _run_module(module[0], program[2:]) if module else _run_script(program[0], program[1:])


def _refuse(why: str) -> int:
    sys.stderr.write(f"{_USAGE}\nerror: {why}\n")
    return 2


def _run_module(name: str, args: list[str]) -> int:
    # `python -m` has put the working directory on the path for us already, and it serves the next module as well.
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        sys.stderr.write(f"error: no module named {name!r}\n")
        return 1
    sys.argv[:] = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _run_script(path: str, args: list[str]) -> int:
    sys.argv[:] = [path, *args]
    # A script finds its neighbours, not the working directory; with -P or -I nothing was prepended to replace.
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    runpy.run_path(path, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
