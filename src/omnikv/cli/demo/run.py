"""The order of events of a demo, from the first process to the last token.

Nothing is sent before every decode rank waits for it and the reference is done: only then do the times say something
about the handoff rather than about models that are still loading on the same cores.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from omnikv.cli.demo.plan import DemoRequest, ModelShape, RankJob, Role, read_model_shape
from omnikv.cli.demo.result import DemoResult, make_result
from omnikv.cli.ranks.errors import RunFailed
from omnikv.cli.ranks.processes import RankProcess, RankProcesses

Say = Callable[[str], None]
# Senders are ready when the wait begins, so this bounds the fallback even where a death could not be noticed.
RECEIVE_TIMEOUT_S = 15.0


def run_demo(request: DemoRequest, model_dir: Path, say: Say) -> DemoResult:
    """What happened; `say` is told each step in words.

    Raises:
        ConfigError: the model cannot be spread as asked; nothing was started.
        RunFailed: a rank died or the deadline passed. Its logs are kept, and every process is gone.
    """
    shape = read_model_shape(model_dir)
    request.require_fit(shape)
    started_s = time.monotonic()
    run_dir = Path(tempfile.mkdtemp(prefix="omnikv-demo-"))
    keeps_logs = False
    try:
        with RankProcesses(run_dir, deadline=started_s + request.timeout_s) as processes:
            prefill, decode, reference = _start(request, model_dir, shape, run_dir, processes, say)
            _hand_over(request, prefill, decode, reference, processes, say)
        return make_result(request, model_dir, prefill, decode, reference, total_s=time.monotonic() - started_s)
    except RunFailed:
        keeps_logs = True
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(run_dir, ignore_errors=True)


def _start(
    request: DemoRequest, model_dir: Path, shape: ModelShape, run_dir: Path, processes: RankProcesses, say: Say
) -> tuple[list[RankProcess[RankJob]], list[RankProcess[RankJob]], RankProcess[RankJob]]:
    namespace = f"demo-{uuid.uuid4().hex[:16]}"

    def job(role: Role, rank: int) -> RankJob:
        return RankJob(
            role=role,
            rank=rank,
            model_dir=str(model_dir.resolve()),
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            prefill_tp=request.prefill_tp,
            decode_tp=request.decode_tp,
            namespace=namespace,
            group_file=str(run_dir / f"{role}.group"),
            receive_timeout_s=min(RECEIVE_TIMEOUT_S, request.timeout_s / 2),
            timeout_s=request.timeout_s,
        )

    say(f"Starting {request.prefill_tp} prefill and {request.decode_tp} decode processes, and one for the reference")
    prefill = [processes.start(job("prefill", rank)) for rank in range(request.prefill_tp)]
    decode = [processes.start(job("decode", rank)) for rank in range(request.decode_tp)]
    return prefill, decode, processes.start(job("reference", 0))


def _hand_over(
    request: DemoRequest,
    prefill: list[RankProcess[RankJob]],
    decode: list[RankProcess[RankJob]],
    reference: RankProcess[RankJob],
    processes: RankProcesses,
    say: Say,
) -> None:
    processes.wait_for("ready", [*prefill, *decode])
    say("The prompt is prefilled; waiting for the reference")
    processes.wait_for("finished", [reference])
    for rank in decode:
        rank.order("receive")
    processes.wait_for("waiting", decode)
    senders = [rank for rank in prefill if rank.job.rank != request.kill_rank]
    say("Handing the KV over")
    for rank in senders:
        rank.order("send")
    processes.wait_for("sent", senders)
    for rank in prefill:
        if rank not in senders:
            say(f"Killing {rank.job.title} (process {rank.pid}) before it sends")
            rank.kill()
    processes.wait_for("outcome", decode)
    say("Decoding")
    processes.wait_for("finished", decode)
    processes.wait_for("drained", senders)
