"""`omnikv pipeline`, from its options to its exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from omnikv.cli.console import (
    EXIT_FAILED,
    console,
    exit_status_of,
    require_writable,
    steps_shown,
    stopped_by_sigterm,
    write_json,
)
from omnikv.cli.pipeline.plan import FAULTS, Fault, PipelineRequest
from omnikv.cli.pipeline.report import print_result
from omnikv.cli.pipeline.run import run_pipeline
from omnikv.errors import OmniKVError

DEFAULT_PROMPT = "A lighthouse at dusk"


def pipeline(
    ar_tp: Annotated[int, typer.Option(help="How many tensor-parallel processes understand the prompt.")] = 2,
    dit_tp: Annotated[int, typer.Option(help="How many tensor-parallel places the stage that draws has.")] = 2,
    cfg: Annotated[int, typer.Option(help="How many processes share the branches of guidance.")] = 3,
    sp: Annotated[int, typer.Option(help="How many processes share the latents of a picture.")] = 1,
    replicas: Annotated[int, typer.Option(help="How many replicas draw a picture each, at once.")] = 1,
    steps: Annotated[int, typer.Option(help="How many steps from noise to picture.")] = 8,
    prompt: Annotated[str, typer.Option(help="What to draw, as an untrained model does.")] = DEFAULT_PROMPT,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="The model keeps one cache for all branches of guidance.")
    ] = False,
    fault: Annotated[str, typer.Option(help=f"What goes wrong: {', '.join(FAULTS)}.")] = "none",
    fault_rank: Annotated[int, typer.Option(help="On which rank of its stage, or of its replica.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the first picture to this PNG file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the outcome to this file as JSON.")] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after this many seconds.")] = 170.0,
) -> None:
    """Understand a prompt on some processes, draw on others, and compare with a single process.

    The model is a small one with seeded random weights; the processes, groups, caches and failures are real. The exit
    status is 0 only when every picture matches and every cache that was handed over is the same byte for byte.
    """
    notes = console(stderr=True)
    try:
        request = PipelineRequest(
            prompt=prompt,
            ar_tp=ar_tp,
            dit_tp=dit_tp,
            cfg=cfg,
            sp=sp,
            replicas=replicas,
            steps=steps,
            shared_prefix=shared_prefix,
            fault=cast(Fault, fault),
            fault_rank=fault_rank,
            timeout_s=timeout_s,
        )
        require_writable("--out", out)
        require_writable("--json", json_file)
        with stopped_by_sigterm(), steps_shown(notes) as say:
            result = run_pipeline(request, say, picture_path=out)
        # Shown first: what took a while is not lost to a full disk.
        print_result(console(stderr=False), result, out)
        if json_file is not None:
            write_json(result.as_json(), json_file)
    except OmniKVError as error:
        raise typer.Exit(exit_status_of(notes, error)) from error
    if not result.matches:
        raise typer.Exit(EXIT_FAILED)
