"""`python -m omnikv.integrations.vllm_omni` runs a program as `python` would, with the published names there."""

from __future__ import annotations

import json

import pytest

PACKAGE = "omnikv.integrations.vllm_omni"
TELL = """
    import json, os, sys
    import vllm_omni.diffusion.request as request

    print(json.dumps({
        "name": __name__,
        "argv": sys.argv,
        "path0": os.path.realpath(sys.path[0]),
        "file": os.path.realpath(__file__),
        "package": __package__,
        "request": request.__name__,
    }))
"""


def test_a_script_is_main_with_its_own_arguments_and_folder(run_python, write_files):
    root = write_files({"scripts/tell.py": TELL + "\n    import neighbour\n", "scripts/neighbour.py": ""})
    done = run_python("-m", PACKAGE, "scripts/tell.py", "--flag", "-m", "x")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "__main__",
        "argv": ["scripts/tell.py", "--flag", "-m", "x"],
        "path0": str((root / "scripts").resolve()),
        "file": str((root / "scripts/tell.py").resolve()),
        "package": "",
        "request": f"{PACKAGE}.request",
    }


def test_a_module_is_main_with_its_own_arguments_and_the_working_directory(run_python, write_files):
    root = write_files({"pkg/__init__.py": "", "pkg/tell.py": TELL})
    done = run_python("-m", PACKAGE, "-m", "pkg.tell", "--replace", "x")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    file = str((root / "pkg/tell.py").resolve())
    assert told == {
        "name": "__main__",
        "argv": [file, "--replace", "x"],
        "path0": str(root.resolve()),
        "file": file,
        "package": "pkg",
        "request": f"{PACKAGE}.request",
    }


@pytest.mark.parametrize(
    ("ending", "status"),
    [("sys.exit(7)", 7), ("sys.exit('why')", 1), ("raise ValueError('boom')", 1), ("pass", 0)],
)
@pytest.mark.parametrize("how", ["script", "module"])
def test_the_programs_exit_status_is_the_exit_status(run_python, write_files, how, ending, status):
    write_files({"ends.py": f"import sys\n{ending}\n"})
    done = run_python("-m", PACKAGE, *(["ends.py"] if how == "script" else ["-m", "ends"]))
    assert done.returncode == status, done.stderr
    assert ("ValueError: boom" in done.stderr) == ("boom" in ending)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "name a script"),
        (["--replace"], "name a script"),
        (["-m"], "cannot read '-m'"),
        (["--unknown", "x.py"], "cannot read '--unknown'"),
        (["missing.py"], "no such script: 'missing.py'"),
    ],
)
def test_a_call_that_names_nothing_to_run_explains_the_usage(run_python, args, why):
    done = run_python("-m", PACKAGE, *args)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert why in done.stderr
    assert done.stdout == ""


def test_help_is_the_usage(run_python):
    done = run_python("-m", PACKAGE, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert "--replace" in done.stdout


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module"])
def test_a_module_that_is_not_there_is_named(run_python, name):
    done = run_python("-m", PACKAGE, "-m", name)
    assert done.returncode == 1
    assert done.stderr == f"error: no module named {name!r}\n"


def test_beside_an_engine_it_is_refused_unless_replacing_is_asked_for(run_python, write_files, engine):
    write_files(
        {
            "whose.py": """
            import vllm_omni.diffusion.request
            import vllm_omni.distributed.omni_connectors.kv_transfer_manager as manager

            print(vllm_omni.diffusion.request.WHOSE, manager.__name__)
            """
        }
    )
    refused = run_python("-m", PACKAGE, "whose.py", path=engine)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert "replace" in refused.stderr
    replaced = run_python("-m", PACKAGE, "--replace", "whose.py", path=engine)
    assert replaced.stdout == f"engine {PACKAGE}.manager\n", replaced.stderr
