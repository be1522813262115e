"""One rank of a gang (`gangs.py`): joins its process group, runs its function, and tells what that returned."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
from datetime import timedelta

import torch
import torch.distributed as dist


def work(channel):
    # The watchdog: a rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_num_threads(1)
    task = channel.next_message()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['store']}",
        rank=task["rank"],
        world_size=task["size"],
        timeout=timedelta(seconds=60),
    )
    module, name = task["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    talks = {"channel": channel} if "channel" in inspect.signature(function).parameters else {}
    channel.tell("done", result=function(rank=task["rank"], **talks, **task["args"]))
    # Peers may be dead, so nothing of the group is asked to end in order; the test ends this process.
    channel.next_message()
