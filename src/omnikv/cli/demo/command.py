"""`omnikv demo`, from its options to its exit status."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnikv.cli.console import (
    EXIT_FAILED,
    console,
    exit_status_of,
    require_writable,
    steps_shown,
    stopped_by_sigterm,
    write_json,
)
from omnikv.cli.demo.fetch import SMOLLM2, cache_directory, fetch_model, require_packages
from omnikv.cli.demo.plan import DemoRequest
from omnikv.cli.demo.report import print_result
from omnikv.cli.demo.result import DemoResult
from omnikv.cli.demo.run import run_demo
from omnikv.errors import OmniKVError

DEFAULT_PROMPT = "Why is the sky blue?"


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A local Llama-like model in the safetensors format, instead of SmolLM2-135M.")
    ] = None,
    prefill_tp: Annotated[int, typer.Option(help="How many tensor-parallel processes run the prompt.")] = 3,
    decode_tp: Annotated[int, typer.Option(help="How many tensor-parallel processes continue the text.")] = 1,
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = DEFAULT_PROMPT,
    max_tokens: Annotated[int, typer.Option(help="How many tokens to generate at most.")] = 24,
    kill_rank: Annotated[
        int | None, typer.Option(help="Kill this prefill rank before it sends, to see what every rank does.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the outcome to this file as JSON.")] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after this many seconds.")] = 300.0,
) -> None:
    """Prefill a real model on some processes, decode on others, and compare with a single process.

    The exit status is 0 only when the text is identical.
    """
    notes = console(stderr=True)
    try:
        request = DemoRequest(
            prompt=prompt,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            kill_rank=kill_rank,
        )
        require_writable("--json", json_file)
        result = _run(request, model, notes)
        # Shown first: what took minutes is not lost to a full disk.
        print_result(console(stderr=False), result)
        if json_file is not None:
            write_json(result.as_json(), json_file)
    except OmniKVError as error:
        raise typer.Exit(exit_status_of(notes, error)) from error
    if not result.identical:
        raise typer.Exit(EXIT_FAILED)


def _run(request: DemoRequest, model: Path | None, notes: Console) -> DemoResult:
    require_packages(["transformers", "safetensors"])
    with stopped_by_sigterm(), steps_shown(notes) as say:
        if model is None:
            require_packages(["gguf", "accelerate"])
            model = fetch_model(SMOLLM2, cache_directory(os.environ), say)
        return run_demo(request, model, say)
