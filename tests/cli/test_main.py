"""`omnikv` itself: its version, and what it says when the command line's packages are missing."""

import subprocess
import sys

import omnikv


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_the_version_is_printed():
    done = run_python("-m", "omnikv.cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"omnikv {omnikv.__version__}\n")


def test_without_typer_the_command_that_installs_it_is_printed():
    # None in sys.modules makes the import fail as it does where the package is absent.
    program = "import sys; sys.modules['typer'] = None; from omnikv.cli.__main__ import main; main()"

    done = run_python("-c", program)

    assert done.returncode == 1
    assert "needs typer, which is not installed" in done.stderr
    assert f"{sys.executable} -m pip install 'omnikv[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_starts_without_torch_or_transformers():
    program = "import sys, omnikv.cli.app; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert run_python("-c", program).stdout == "[]\n"
