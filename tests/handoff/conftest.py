"""Small stages over either transport, for the tests of handoffs."""

from __future__ import annotations

import itertools
import os

import pytest

_names = (f"handoff-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(params=["memory", "shm"])
def transport(request):
    return request.param


@pytest.fixture
def namespace():
    return next(_names)
