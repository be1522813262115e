"""The receiving process as its sender sees it: started, given orders, listened to, and ended whatever happens."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from omnikv.bench.receiver import TIMEOUT_S
from omnikv.errors import TransportError

_ENDED_EARLY = "the benchmark's receiving process ended early; its own error output says why"


@contextmanager
def receiving_process(serve: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """The pipe to a process that runs `serve(pipe, *arguments)`, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True, name="bench-receiver")
    process.start()
    there.close()
    try:
        yield here
        give_order(here, None)
        process.join(TIMEOUT_S)
    finally:
        here.close()
        process.kill()
        process.join()
        process.close()


def give_order(pipe: Connection, order: object) -> None:
    """Nothing; the receiving process carries out `order` next, or ends where it is None.

    Raises:
        TransportError: it is gone.
    """
    try:
        pipe.send(order)
    except OSError as error:
        raise TransportError(_ENDED_EARLY) from error


def hear(pipe: Connection) -> object:
    """What the receiving process says next.

    Raises:
        TransportError: it is gone, or silent.
    """
    try:
        if pipe.poll(TIMEOUT_S):
            said: object = pipe.recv()
            return said
    except (EOFError, OSError) as error:
        raise TransportError(_ENDED_EARLY) from error
    raise TransportError(f"the benchmark's receiving process said nothing for {TIMEOUT_S} s")
