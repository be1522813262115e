"""Whoever fills room from several threads has it to itself again afterwards, interrupted or not."""

import threading
from concurrent.futures import Future

import pytest
import torch

from omnikv.tensors.fill import fill

SOON_S = 30.0


class Slow:
    """A source whose helper writes on while its caller, done with its own part, is interrupted."""

    dtype, shape, device = torch.uint8, (1,), torch.device("cpu")

    def __init__(self):
        self.caller = threading.get_ident()
        self.helper_began, self.may_end = threading.Event(), threading.Event()
        self.helper_ended = False

    def write_into(self, out):
        if threading.get_ident() == self.caller:
            assert self.helper_began.wait(SOON_S)
            return
        self.helper_began.set()
        assert self.may_end.wait(SOON_S)
        out.fill_(1)
        self.helper_ended = True


def test_an_interrupted_fill_ends_once_no_helper_writes_any_more(monkeypatch):
    source, interruptions = Slow(), iter(range(2))
    wait_for = Future.exception

    def interrupted(future, timeout=None):
        if next(interruptions, None) is not None:
            raise KeyboardInterrupt
        source.may_end.set()
        return wait_for(future, timeout)

    monkeypatch.setattr(Future, "exception", interrupted)
    outs = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        fill([(source, out) for out in outs], threads=2)
    source.may_end.set()
    assert source.helper_ended
