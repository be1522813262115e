"""Ctrl-C at every place where the interpreter looks for it: calls and returns, one place after the other."""

import contextlib
import sys


class Interruption:
    """What came of one attempt: `came` says whether there were so many places."""

    came = False


@contextlib.contextmanager
def interrupted_at(number, is_place):
    """The body is interrupted at the `number`-th event, from 1, for which `is_place(frame, event)` is true.

    A `KeyboardInterrupt` that comes of it ends here.
    """
    outcome = Interruption()
    left = number

    def look(frame, event, argument):
        nonlocal left
        # A lock that was taken is released, and one that is released stays so: nothing comes in between.
        name = getattr(argument, "__name__", "") if event.startswith("c_") else ""
        if name == "__exit__" or (name == "__enter__" and event != "c_call"):
            return
        if outcome.came or not is_place(frame, event):
            return
        left -= 1
        if left == 0:
            outcome.came = True
            raise KeyboardInterrupt

    before = sys.getprofile()
    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(look)
        try:
            yield outcome
        finally:
            sys.setprofile(before)
