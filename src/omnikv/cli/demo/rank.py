"""One rank of a demo, as a process of its own: `python -m omnikv.cli.demo.rank FD`.

FD is this rank's end of a socket pair; its first message says which rank of which stage this is. What the rank tells:

    prefill    ready (the prompt is in its cache)  ->  [send]  ->  sent  ->  drained (nothing of it is unread any more)
    decode     ready (the model is loaded)  ->  [receive]  ->  waiting  ->  outcome (the verdict)  ->  finished
    reference  ready  ->  finished

The words in brackets are the orchestrator's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from omnikv.cli.demo.engine import Engine, join_stage
from omnikv.cli.demo.plan import REQUEST_ID, RankJob
from omnikv.cli.ranks.channel import RankChannel
from omnikv.errors import RemoteProtocolError
from omnikv.groups.base import Group
from omnikv.groups.threads import ThreadGroup
from omnikv.groups.torch_dist import TorchDistGroup
from omnikv.handoff.api import KVReceiver, KVSender, Outcome
from omnikv.integrations.transformers import cache_from_layers, layers_from_cache

# The pool touches a whole segment when it makes one; a single request of a small model needs no more than this.
SHM_OPTIONS = {"segment_nbytes": 4 << 20}


def main() -> None:
    """Work on the job that comes over the inherited descriptor, and exit."""
    work(RankChannel(int(sys.argv[1])))


def work(channel: RankChannel) -> None:
    """Work on the job that comes over `channel`."""
    job = RankJob.from_message(channel.next_message())
    {"prefill": run_prefill, "decode": run_decode, "reference": run_reference}[job.role](job, channel)


def run_prefill(job: RankJob, channel: RankChannel) -> None:
    """Run the prompt, send this rank's heads to whoever needs them, and stay until they are read."""
    with _sender(job) as sender:
        engine = _load(job)
        prompt_ids = engine.encode(job.prompt)
        cache, first_token = engine.prefill(prompt_ids)
        channel.tell("ready", num_tokens=len(prompt_ids))
        _wait_for("send", channel)
        metadata = {"first_token": first_token, "num_tokens": len(prompt_ids)}
        started_s = time.monotonic()
        report = sender.send(REQUEST_ID, layers_from_cache(cache), metadata=metadata)
        sent_s = time.monotonic()
        channel.tell("sent", started_s=started_s, sent_s=sent_s, nbytes=report.nbytes)
        channel.tell("drained", num_unread=sender.drain(timeout_s=job.timeout_s))


def run_decode(job: RankJob, channel: RankChannel) -> None:
    """Receive this rank's heads and continue the text; when the stage drops them, run the prompt again instead."""
    with _receiver(job) as receiver:
        engine = _load(job)
        receiver.join(_lockstep(job))
        channel.tell("ready")
        _wait_for("receive", channel)
        channel.tell("waiting")
        started_s = time.monotonic()
        outcome = receiver.receive_together(REQUEST_ID, timeout_s=job.receive_timeout_s)
        channel.tell("outcome", started_s=started_s, decided_s=time.monotonic(), **_facts(outcome))
        if outcome.verdict == "drop":
            # Nobody will ask for these parts again; their senders wait to hear that.
            receiver.discard(REQUEST_ID)
        cache, first_token = _import(outcome, engine, job)
    tokens = engine.continue_greedily(cache, first_token, job.max_tokens)
    channel.tell("finished", tokens=tokens, text=engine.decode(tokens))


def run_reference(job: RankJob, channel: RankChannel) -> None:
    """Generate the text in this one process, without any handoff."""
    engine = _load(job)
    channel.tell("ready")
    tokens = engine.generate(engine.encode(job.prompt), job.max_tokens)
    channel.tell("finished", tokens=tokens, text=engine.decode(tokens))


def _sender(job: RankJob) -> KVSender:
    return KVSender(job.route(), job.rank, transport="shm", options=SHM_OPTIONS, model=job.model_facts())


def _receiver(job: RankJob) -> KVReceiver:
    return KVReceiver(job.route(), job.rank, transport="shm", options=SHM_OPTIONS, model=job.model_facts())


def _load(job: RankJob) -> Engine:
    if job.tp_size > 1:
        join_stage(job.group_file, job.rank, job.tp_size, timeout_s=job.timeout_s)
    return Engine(Path(job.model_dir), job.tp_size)


def _lockstep(job: RankJob) -> Group:
    # A stage of one rank agrees with itself, by the same code.
    return TorchDistGroup() if job.tp_size > 1 else ThreadGroup.create(1)[0]


def _import(outcome: Outcome, engine: Engine, job: RankJob) -> tuple[Any, int]:
    """The cache to go on with and the token that follows it: handed over, or computed here when it was dropped."""
    if outcome.kv is None:
        return engine.prefill(engine.encode(job.prompt))
    with outcome.kv as kv:
        return cache_from_layers(kv.layers, engine.config), int(kv.metadata["first_token"])


def _facts(outcome: Outcome) -> dict[str, Any]:
    kv = outcome.kv
    return {
        "verdict": outcome.verdict,
        "causes": {str(rank): outcome.cause_of(rank) for rank, _, _ in outcome.causes},
        "nbytes": kv.nbytes if kv is not None else 0,
        "sources": [[piece.source_rank, piece.waited_s] for piece in kv.sources] if kv is not None else [],
    }


def _wait_for(command: str, channel: RankChannel) -> None:
    message = channel.next_message()
    if message.get("command") != command:
        raise RemoteProtocolError(f"this rank waits to be told {command!r}, but was told {message!r}")


if __name__ == "__main__":
    main()
