"""Programs in interpreters of their own, and an engine that is only files, for tests of what importing does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

# What an installed engine looks like to the import system; no torch, so that these tests are quick.
ENGINE_FILES = {
    "vllm_omni/__init__.py": "",
    "vllm_omni/distributed/__init__.py": "",
    "vllm_omni/distributed/omni_connectors/__init__.py": "",
    "vllm_omni/distributed/omni_connectors/factory.py": "WHOSE = 'engine'\n",
    "vllm_omni/distributed/omni_connectors/kv_transfer_manager.py": """
        WHOSE = "engine"

        class OmniKVTransferManager:
            made_by = "engine"

            @classmethod
            def from_od_config(cls, config):
                return cls()

            @classmethod
            def from_vllm_config(cls, vllm_config, model_config):
                return cls()
    """,
    "vllm_omni/distributed/omni_connectors/utils/__init__.py": "",
    "vllm_omni/distributed/omni_connectors/utils/kv_utils.py": "WHOSE = 'engine'\n",
    "vllm_omni/diffusion/__init__.py": "",
    "vllm_omni/diffusion/request.py": "WHOSE = 'engine'\n",
    "vllm_omni/diffusion/distributed/__init__.py": "",
    "vllm_omni/diffusion/distributed/parallel_state.py": "WHOSE = 'engine'\n",
    "vllm_omni/runner.py": """
        from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager

        def make_manager(config):
            return OmniKVTransferManager.from_od_config(config)
    """,
}

VLLM_FILES = {
    "vllm/__init__.py": "",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": "WHOSE = 'vllm'\n",
}

PREAMBLE = """\
import importlib, sys
from omnikv.errors import AliasError
from omnikv.integrations.vllm_omni import install, is_installed, rebind, uninstall
from omnikv.integrations.vllm_omni.aliases import MANAGER, TABLE

def engine_modules():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("vllm", "vllm_omni")}

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except AliasError as error:
        return str(error)
    raise AssertionError("nothing was refused")

"""


def _write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes files by relative name below a folder of this test, and gives the folder."""
    return lambda files: _write_files(tmp_path, files)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A folder that holds an installed engine and its vllm."""
    return _write_files(tmp_path / "site", {**ENGINE_FILES, **VLLM_FILES})


@pytest.fixture
def vllm_alone(tmp_path: Path) -> Path:
    """A folder that holds a vllm and no engine."""
    return _write_files(tmp_path / "site", VLLM_FILES)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """What came of a fresh interpreter run in this test's folder, with `path` at the front of its import path."""

    def run(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_CURRENT_TEST", "LOCAL_RANK"):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, *args],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture
def run_program(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., None]:
    """Runs a program of assertions to its end in a fresh interpreter, and fails with that program's traceback."""

    def run(text: str, path: Path | None = None) -> None:
        done = run_python("-W", "error", "-c", PREAMBLE + textwrap.dedent(text), path=path)
        assert done.returncode == 0, done.stderr

    return run
