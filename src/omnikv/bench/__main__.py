"""`python -m omnikv.bench same-host`, `across`, `soak`, `agreement --ranks 2,4,8` or `plan`; all with `--json FILE`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from omnikv.bench.across import measure_across, measure_small_across, new_lane, rounds_at
from omnikv.bench.across_engines import engines_here, measure_engine, measure_engine_death
from omnikv.bench.across_report import Across, across_to_json, across_to_text, judge_across, make_lanes
from omnikv.bench.agreement import agreement_to_json, agreement_to_text, judge_agreement, measure_agreement
from omnikv.bench.peer import receiving_process
from omnikv.bench.plan import judge_plans, measure_plans, plans_to_json, plans_to_text
from omnikv.bench.receiver import serve
from omnikv.bench.report import BAR_SIZES_MIB, SameHost, judge, to_json, to_text
from omnikv.bench.same_host import hand_over_once, measure_size
from omnikv.bench.small import measure_small
from omnikv.bench.soak import run_soak, soak_to_json, soak_to_text
from omnikv.bench.workload import Workload
from omnikv.errors import OmniKVError

EXIT_OK, EXIT_BAR_MISSED, EXIT_FAILED = 0, 1, 2
MIN_ROUNDS = 5
MIN_TRIES = 200
MIN_STREAM = 100
# Beyond what 32 bits can count.
HUGE_MIB = 4224
MIN_VERDICTS = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 where content was wrong or `--check` found a missed bar, or 2 where it could not run."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "same-host" and options.check and not set(BAR_SIZES_MIB) & set(options.sizes):
        sizes = ", ".join(map(str, BAR_SIZES_MIB))
        parser.error(f"--check needs one of {sizes} among --sizes: the bars are set for them")
    given = sys.argv[1:] if arguments is None else arguments
    runs = {
        "same-host": run_same_host,
        "across": run_across,
        "soak": run_the_soak,
        "agreement": run_agreement,
        "plan": run_plan,
    }
    run = runs[options.command]
    try:
        return run(options, " ".join(["python -m omnikv.bench", *given]))
    except OmniKVError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m omnikv.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    same_host = commands.add_parser("same-host", help="two processes on this host over shared memory")
    same_host.add_argument("--sizes", type=_several(1), default=BAR_SIZES_MIB, help="payloads in MiB, e.g. 64,256")
    same_host.add_argument("--rounds", type=_at_least(MIN_ROUNDS), default=7, help="counted rounds a size, 5 or more")
    same_host.add_argument("--tries", type=_at_least(MIN_TRIES), default=500, help="small requests, one by one")
    same_host.add_argument("--stream", type=_at_least(MIN_STREAM), default=4000, help="requests of 1 MiB in flight")
    same_host.add_argument("--no-huge", action="store_true", help=f"send no payload of {HUGE_MIB} MiB")
    same_host.add_argument("--threads", type=_at_least(1), default=torch.get_num_threads(), help="torch's threads")
    across = commands.add_parser("across", help="two processes over TCP, and over engines that are installed")
    across.add_argument("--sizes", type=_several(1), default=BAR_SIZES_MIB, help="payloads in MiB, e.g. 64,256")
    across.add_argument(
        "--rounds",
        type=_at_least(MIN_ROUNDS),
        default=9,
        help="counted rounds of 1 GiB, 5 or more; small sizes take more",
    )
    across.add_argument("--stream", type=_at_least(MIN_STREAM), default=2000, help="requests of 1 MiB in flight")
    across.add_argument("--deaths", type=_at_least(1), default=10, help="senders that are killed")
    soak = commands.add_parser("soak", help="two processes for minutes, with kills, failures and aborts")
    soak.add_argument("--minutes", type=_minutes, default=5.0, help="how long, e.g. 5 or 0.1")
    soak.add_argument("--seed", type=int, default=1, help="decides sizes, content, failures and kills")
    soak.add_argument("--json", type=_file_to_write, help="also write what was found to this file")
    agreement = commands.add_parser("agreement", help="verdicts among processes on this host, beside gloo's own means")
    agreement.add_argument("--ranks", type=_several(2), default=(2, 4, 8), help="numbers of ranks, e.g. 2,4,8")
    agreement.add_argument("--rounds", type=_at_least(MIN_VERDICTS), default=200, help="counted rounds, 25 or more")
    plan = commands.add_parser("plan", help="plans of many ranks, and how they grow")
    plan.add_argument("--rounds", type=_at_least(MIN_ROUNDS), default=50, help="counted rounds a plan, 5 or more")
    for command in (same_host, across, agreement, plan):
        command.add_argument("--json", type=_file_to_write, help="also write everything measured to this file")
        command.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser


def run_same_host(options: argparse.Namespace, command: str) -> int:
    """The exit status, after measuring, printing and writing what was asked for.

    Raises:
        OmniKVError: the handoff failed.
    """
    torch.set_num_threads(options.threads)
    # A fresh receiver for each: what one left in its memory must not hide what the next one takes.
    with receiving_process(serve, options.threads) as pipe:
        small = measure_small(pipe, options.tries, options.stream)
    sizes = []
    for size in options.sizes:
        with receiving_process(serve, options.threads) as pipe:
            sizes.append(measure_size(pipe, Workload(size_mib=size), options.rounds))
    huge_ok = None
    if not options.no_huge:
        with receiving_process(serve, options.threads) as pipe:
            huge_ok = hand_over_once(pipe, Workload(size_mib=HUGE_MIB, pool_factor=1))
    run = SameHost(sizes=sizes, small=small, huge_mib=HUGE_MIB, huge_ok=huge_ok)
    sys.stdout.write(to_text(run, command))
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(run, command), indent=2) + "\n")
    missed = options.check and not all(bar.passed for bar in judge(run))
    return EXIT_BAR_MISSED if missed or not run.content_ok else EXIT_OK


def run_the_soak(options: argparse.Namespace, command: str) -> int:
    """The exit status: 1 where a payload was wrong, an outcome unexpected, or something was left.

    Raises:
        OmniKVError: a process hangs.
    """
    result = run_soak(60 * options.minutes, options.seed)
    sys.stdout.write(soak_to_text(result, command))
    if options.json is not None:
        options.json.write_text(json.dumps(soak_to_json(result, command), indent=2) + "\n")
    return EXIT_OK if result.passed else EXIT_BAR_MISSED


def run_across(options: argparse.Namespace, command: str) -> int:
    """The exit status, after measuring, printing and writing what was asked for.

    Raises:
        OmniKVError: the handoff failed.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        lanes = make_lanes(Path(directory))
        sizes = [measure_across(size, rounds_at(size, options.rounds), lanes) for size in options.sizes]
    small = measure_small_across(new_lane("small"), new_lane("death"), options.stream, options.deaths)
    engines = engines_here()
    run = Across(
        sizes=sizes,
        small=small,
        engines=[
            measure_engine(name, size, rounds_at(size, options.rounds)) for name in engines for size in options.sizes
        ],
        engine_deaths=[measure_engine_death(name, options.deaths) for name in engines],
    )
    sys.stdout.write(across_to_text(run, command))
    if options.json is not None:
        options.json.write_text(json.dumps(across_to_json(run, command), indent=2) + "\n")
    missed = options.check and not all(bar.passed for bar in judge_across(run))
    return EXIT_BAR_MISSED if missed or not run.content_ok else EXIT_OK


def run_agreement(options: argparse.Namespace, command: str) -> int:
    """The exit status, after measuring, printing and writing what was asked for.

    Raises:
        OmniKVError: a rank failed.
    """
    results = [measure_agreement(ranks, options.rounds) for ranks in options.ranks]
    sys.stdout.write(agreement_to_text(results, command))
    if options.json is not None:
        options.json.write_text(json.dumps(agreement_to_json(results, command), indent=2) + "\n")
    missed = options.check and not all(bar.passed for bar in judge_agreement(results))
    return EXIT_BAR_MISSED if missed else EXIT_OK


def run_plan(options: argparse.Namespace, command: str) -> int:
    """The exit status, after measuring, printing and writing what was asked for."""
    results = measure_plans(options.rounds)
    sys.stdout.write(plans_to_text(*results, command))
    if options.json is not None:
        options.json.write_text(json.dumps(plans_to_json(*results, command), indent=2) + "\n")
    missed = options.check and not all(bar.passed for bar in judge_plans(*results))
    return EXIT_BAR_MISSED if missed else EXIT_OK


def _file_to_write(text: str) -> Path:
    path = Path(text)
    # Asked before anything is measured, which takes minutes.
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return minutes


def _several(least: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        return tuple(_at_least(least)(part) for part in text.split(","))

    parse.__name__ = "list of whole numbers"
    return parse


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {number}")
        return number

    # argparse names the type where the text is no number at all.
    parse.__name__ = "whole number"
    return parse


if __name__ == "__main__":
    sys.exit(main())
