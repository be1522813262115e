"""Offers the published names while pytest collects and runs tests that import them.

    pytest -p omnikv.integrations.vllm_omni.pytest_plugin tests        the names are there for the whole session

With the ini option `omnikv_alias_paths` set, and the plugin turned on by the configuration rather than by the one who
calls pytest, they are there only while a module under one of those paths is collected or run. Either way no name is
left behind. A conftest.py is loaded before its tests are collected: let it import published names in its fixtures.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from omnikv.errors import AliasError
from omnikv.integrations.vllm_omni.aliases import install, is_installed, uninstall

_INI_OPTION = "omnikv_alias_paths"
_MARKERS = (
    "core_model: a test of a published core model path; a label only",
    "cpu: a test that runs without an accelerator; a label only",
)
_Result = TypeVar("_Result")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        _INI_OPTION,
        "paths, relative to the configuration file, whose tests import an engine's published names from omnikv",
        type="paths",
        default=[],
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if _alias_paths(early_config) is None and not is_installed():
        _install_or_explain()
        early_config.add_cleanup(uninstall)


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with _names_for(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, _Result, _Result]:
    with _names_for(item):
        return (yield)


@contextmanager
def _names_for(node: pytest.Item | pytest.Collector) -> Generator[None, None, None]:
    paths = _alias_paths(node.config)
    if paths is None or is_installed() or not any(node.path.is_relative_to(path) for path in paths):
        yield
        return
    _install_or_explain()
    try:
        yield
    finally:
        uninstall()


def _alias_paths(config: pytest.Config) -> list[Path] | None:
    """The paths that the names are limited to; None if they are there for the whole session."""
    paths: list[Path] = config.getini(_INI_OPTION)
    return None if not paths or _asked_for_by_hand(config.invocation_params.args) else paths


def _asked_for_by_hand(args: Sequence[object]) -> bool:
    words = [str(arg) for arg in args]
    return f"-p{__name__}" in words or ("-p", __name__) in itertools.pairwise(words)


def _install_or_explain() -> None:
    try:
        install()
    except AliasError as error:
        raise pytest.UsageError(f"{__name__}: {error}") from error
