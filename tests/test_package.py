"""The package as a whole: cheap to import, typed, with one error tree."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import omnikv
from omnikv import errors

PROBE = """
import sys, time
started = time.perf_counter()
import omnikv
spent_ms = (time.perf_counter() - started) * 1e3
heavy = sorted({"torch", "numpy", "msgspec", "xxhash", "asyncio"} & set(sys.modules))
print(f"{spent_ms:.2f}", *heavy)
"""


def test_importing_omnikv_takes_under_50_ms_and_loads_nothing_heavy():
    lines = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(5)
    ]
    assert all(len(line) == 1 for line in lines), f"heavy modules came along: {lines[0][1:]}"
    # The best of five: the cost of the import itself, not of a machine that is busy with something else.
    assert min(float(line[0]) for line in lines) < 50


@pytest.mark.parametrize("name", [name for name in omnikv.__all__ if name != "__version__"])
def test_every_public_name_loads(name):
    assert getattr(omnikv, name).__name__ == name
    assert name in dir(omnikv)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'KVSander'"):
        omnikv.KVSander  # noqa: B018


def test_the_package_is_typed():
    assert (Path(omnikv.__file__).parent / "py.typed").exists()


ALL_ERRORS = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_says_what_a_caller_needs_and_survives_pickling(kind):
    assert issubclass(kind, errors.OmniKVError)
    extra = {"reason": errors.WireReason.DTYPE, "offset": 7} if kind is errors.WireError else {}
    error = kind("what happened", request_id="r1", **extra)
    assert (str(error), error.request_id) == ("what happened", "r1")
    assert isinstance(error.retryable, bool)
    assert isinstance(error.consumed, bool)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args, vars(copy)) == (kind, "what happened", error.args, vars(error))


@pytest.mark.parametrize(
    ("kind", "built_in"),
    [
        (errors.ConfigError, ValueError),
        (errors.TopologyError, ValueError),
        (errors.LocalProtocolError, RuntimeError),
        (errors.WireError, ValueError),
        (errors.TransportUnavailable, ImportError),
        (errors.ConnectError, ConnectionError),
        (errors.TransportTimeout, TimeoutError),
        (errors.ReceiveTimeout, TimeoutError),
        (errors.PayloadLost, RuntimeError),
        (errors.AliasError, ImportError),
    ],
)
def test_code_that_knows_nothing_of_omnikv_still_catches_them(kind, built_in):
    assert issubclass(kind, built_in)


def test_only_what_was_used_or_lost_is_consumed():
    assert {kind for kind in ALL_ERRORS if kind.consumed} == {errors.AlreadyConsumed, errors.PayloadLost}


def test_every_module_imports_alone():
    root = Path(omnikv.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__main__" or parts[:1] == ("cli",):
            continue
        importlib.import_module(".".join(("omnikv", *(part for part in parts if part != "__init__"))))


def test_the_contract_on_msgspec_names_every_module_of_core():
    project = Path(__file__).parents[1] / "pyproject.toml"
    contract = project.read_text().split('name = "msgspec in core only for messages"')[1].split("]")[0]
    core = Path(omnikv.__file__).parent / "core"
    modules = {path.stem for path in core.glob("*.py")} - {"__init__", "messages"}
    assert set(re.findall(r'"omnikv\.core\.(\w+)"', contract)) == modules
