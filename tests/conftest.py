"""What every test shares: one thread of torch, and property tests that do not fail because a machine is busy."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.support.gangs import Gangs, opened_nursery

torch.set_num_threads(1)

settings.register_profile(
    "omnikv",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples on every run of CI: a change is judged by its own doing. Elsewhere new ones are tried.
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("omnikv")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """A process from which tests fork real ranks."""
    with opened_nursery(tmp_path_factory.mktemp("nursery")) as opened:
        yield opened


@pytest.fixture
def gangs(nursery):
    """Gangs of real ranks."""
    return Gangs(nursery)
