"""Real ranks of a group with a channel, forked from one process that has imported everything: seconds saved each.

`python agreement_nursery.py` reads one JSON line a rank on stdin and forks it. A rank joins its group over gloo, forms
its channel, and then does what it is told over the Unix socket at `control`, a JSON line each way.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from omnikv.core.messages import Ballot, RoleBallot, spell_facts
from omnikv.errors import VerdictInDoubt
from omnikv.groups.channel import Channel
from omnikv.groups.torch_dist import TorchDistGroup

FACTS = spell_facts({"tokens": "7"})


def ballot_of(standing, number):
    cause = {"have": "", "missing": "is not there yet", "failed": "receiving raised RuntimeError('torn page')"}[
        standing
    ]
    role = RoleBallot("primary", standing, True, cause, FACTS if standing == "have" else "")
    return Ballot(number, True, (role,))


class Marked:
    """A connection whose rank gets a signal when so many of its reads and writes have passed."""

    def __init__(self, connection, countdown):
        self.connection, self.countdown = connection, countdown

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def send(self, *args):
        sent = self.connection.send(*args)
        self.countdown.pass_one()
        return sent

    def recv(self, *args):
        data = self.connection.recv(*args)
        self.countdown.pass_one()
        return data


class Countdown:
    def __init__(self, left, signal_number):
        self.left, self.signal_number = left, signal_number
        if not left:
            os.kill(os.getpid(), signal_number)

    def pass_one(self):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), self.signal_number)


def run_rank(task):
    # The watchdog: a rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(task["control"])
        lines = control.makefile("rw")

        def say(**facts):
            lines.write(json.dumps(facts) + "\n")
            lines.flush()

        say(rank=task["rank"], pid=os.getpid())
        dist.init_process_group(
            "gloo",
            init_method=f"file://{task['store']}",
            rank=task["rank"],
            world_size=task["size"],
            timeout=timedelta(seconds=60),
        )
        with Channel.form(TorchDistGroup(), facts={"timeout_s": "30.0"}, deadline=time.monotonic() + 40) as channel:
            say(state="formed")
            for line in lines:
                vote(channel, json.loads(line), say)
    # Peers may be dead or stopped, so nothing of the group is asked to end in order.
    os._exit(0)


def vote(channel, order, say):
    deadline = time.monotonic() + order["timeout_s"]
    ballot = ballot_of(order["standing"], order["round"])
    if order["signal"] is not None:
        countdown = Countdown(*order["signal"])
        for link in channel._switchboard._links.values():
            link.connection = Marked(link.connection, countdown)
    try:
        if order["way"] == "agree":
            ruling = channel.agree(order["key"], ballot, deadline=deadline)
        else:
            pending = channel.submit(order["key"], ballot, deadline=deadline)
            say(state="voted")
            ruling = pending.result()
        said = {"kind": ruling.kind, "causes": ruling.causes}
    except VerdictInDoubt as error:
        said = {"kind": "in doubt", "words": str(error)}
    say(state="ruled", late_s=time.monotonic() - deadline, **said)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            os.close(0)
            run_rank(json.loads(line))


if __name__ == "__main__":
    main()
