"""The pytest plugin, in pytest sessions of their own over small projects of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

PLUGIN = "omnikv.integrations.vllm_omni.pytest_plugin"
SPECIFICATION = Path(__file__).parents[4] / "shared" / "spec" / "tests"

SPEAKS_PUBLISHED_NAMES = """
    import sys
    from unittest.mock import patch

    import pytest

    from vllm_omni.diffusion.request import OmniDiffusionRequest

    pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

    class TestRequest:
        def test_is_ours(self):
            assert OmniDiffusionRequest.__module__ == "omnikv.integrations.vllm_omni.request"

        def test_a_patch_reaches_our_code(self):
            with patch("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", return_value=6):
                from omnikv.integrations.vllm_omni import vllm_parallel_state
                assert vllm_parallel_state.get_tensor_model_parallel_rank() == 6

    @pytest.fixture(scope="module", autouse=True)
    def names_are_there_until_the_modules_last_fixture_is_torn_down():
        yield
        import vllm_omni.diffusion.distributed.parallel_state
"""

KNOWS_NO_PUBLISHED_NAME = """
    import importlib.util
    import sys

    def names():
        return [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_omni")]

    AT_COLLECTION = names(), importlib.util.find_spec("vllm_omni")

    def test_there_was_no_published_name_at_collection():
        assert AT_COLLECTION == ([], None)

    def test_there_is_no_published_name_now():
        assert names() == [] and importlib.util.find_spec("vllm_omni") is None
"""

# Looks once the session is over, after every plugin has unconfigured.
LOOKS_AFTERWARDS = """
    import sys
    import pytest

    status = pytest.main(sys.argv[1:])
    left = [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_omni")]
    finders = [finder for finder in sys.meta_path if type(finder).__module__.startswith("omnikv")]
    print("left behind:", left, finders)
    sys.exit(status)
"""
NOTHING_LEFT = "left behind: [] []"


def configuration(*lines: str) -> str:
    return "\n".join(
        [
            "[tool.pytest.ini_options]",
            'filterwarnings = ["error"]',
            f'addopts = "-p {PLUGIN} -p no:cacheprovider --strict-markers --strict-config --import-mode=importlib"',
            *lines,
            "",
        ]
    )


@pytest.fixture
def project(write_files):
    """Both kinds of test modules, either side of each other in the order of collection."""
    return write_files(
        {
            "look.py": LOOKS_AFTERWARDS,
            "pyproject.toml": configuration('omnikv_alias_paths = ["tests/distributed"]'),
            "tests/a/test_before.py": KNOWS_NO_PUBLISHED_NAME,
            "tests/distributed/omni_connectors/test_published.py": SPEAKS_PUBLISHED_NAMES,
            "tests/distributed_not/test_similar_path.py": KNOWS_NO_PUBLISHED_NAME,
            "tests/z/test_after.py": KNOWS_NO_PUBLISHED_NAME,
        }
    )


def test_names_are_there_for_the_configured_paths_and_gone_everywhere_else(run_python, project):
    done = run_python("look.py", "tests")
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout


def test_one_test_of_a_configured_path_can_be_run_by_its_node_id(run_python, project):
    done = run_python("look.py", "tests/distributed/omni_connectors/test_published.py::TestRequest::test_is_ours")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("how", [["-p", PLUGIN], [f"-p{PLUGIN}"]], ids=["apart", "joined"])
def test_asked_for_by_hand_the_whole_session_has_the_names(run_python, project, how):
    done = run_python("look.py", *how, "tests")
    assert "6 failed" in done.stdout, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr


def test_without_configured_paths_the_whole_session_has_the_names(run_python, project):
    (project / "pyproject.toml").write_text(configuration())
    (project / "tests/distributed/conftest.py").write_text("import vllm_omni.diffusion.request\n")
    done = run_python("look.py", "tests/distributed")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr


def test_the_command_line_alone_turns_it_on(run_python, write_files):
    write_files({"look.py": LOOKS_AFTERWARDS, "pytest.ini": "[pytest]\n", "test_it.py": SPEAKS_PUBLISHED_NAMES})
    done = run_python("look.py", "-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "test_it.py")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr


def test_a_test_module_that_fails_to_import_leaves_no_name_behind(run_python, project):
    (project / "tests/distributed/test_broken.py").write_text("import vllm_omni.diffusion.request\n1 / 0\n")
    done = run_python("look.py", "tests")
    assert "1 error" in done.stdout, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stdout, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr


def test_names_that_were_there_before_the_session_stay_after_it(run_python, write_files):
    write_files(
        {
            "look.py": "from omnikv.integrations.vllm_omni import install\ninstall()\n"
            "import sys, pytest\nstatus = pytest.main(sys.argv[1:])\n"
            "import vllm_omni.diffusion.request\nsys.exit(status)\n",
            "pyproject.toml": configuration(),
            "test_it.py": SPEAKS_PUBLISHED_NAMES,
        }
    )
    done = run_python("look.py", "test_it.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("args", [["tests"], ["-p", PLUGIN, "tests"]], ids=["configured paths", "whole session"])
def test_beside_an_engine_the_session_ends_with_the_reason(run_python, project, engine, args):
    done = run_python("-m", "pytest", *args, path=engine)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "install(replace=True)" in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_the_plugin_itself_loads_neither_torch_nor_any_engine(run_program):
    run_program(
        f"""
        import {PLUGIN}
        assert "torch" not in sys.modules and engine_modules() == {{}} and not is_installed()
        """
    )


@pytest.mark.skipif(not SPECIFICATION.is_dir(), reason="the specification is not beside this checkout")
@pytest.mark.parametrize("args", [["tests/distributed"], ["-p", PLUGIN, "tests"]], ids=["configured", "by hand"])
def test_the_specification_passes_where_the_projects_own_tests_lie(run_python, write_files, args):
    root = write_files(
        {"look.py": LOOKS_AFTERWARDS, "pyproject.toml": (Path(__file__).parents[3] / "pyproject.toml").read_text()}
    )
    shutil.copytree(SPECIFICATION, root / "tests")
    done = run_python("look.py", *args, "-p", "no:cacheprovider")
    assert "66 passed" in done.stdout, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert NOTHING_LEFT in done.stdout, done.stdout + done.stderr
