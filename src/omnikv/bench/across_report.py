"""What the benchmark across hosts says: bars, a table to read, and JSON to keep; and the lanes that it compares."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnikv.bench.across import AcrossResult, LaneResult, SmallResult, new_lane
from omnikv.bench.across_engines import EngineDeath, EngineResult
from omnikv.bench.across_peer import Lane
from omnikv.bench.measure import Spread
from omnikv.bench.report import Bar, machine, spell_bar

CONTIGUOUS, GIVEN_SECRET, TLS = "tcp, contiguous", "  with a given secret", "  with TLS"
PAGED, CHECKED = "tcp, paged, gather included", "  with checksum"
MIN_CONTIGUOUS_X = 0.95
MIN_PAGED_X = 0.9
MIN_SECRET_X = 0.95
MIN_ENGINE_X = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """Everything that a run measured."""

    sizes: Sequence[AcrossResult]
    small: SmallResult
    engines: Sequence[EngineResult] = ()
    engine_deaths: Sequence[EngineDeath] = ()

    @property
    def content_ok(self) -> bool:
        """Whether every payload that was looked at held what was sent."""
        ours = all(lane.content_ok for size in self.sizes for lane in size.lanes)
        return ours and all(result.content_ok for result in self.engines)


def make_lanes(directory: Path) -> list[Lane]:
    """The lanes that are compared, each at an address of its own; TLS where the tool `openssl` makes certificates."""
    lanes = [
        new_lane(CONTIGUOUS),
        new_lane(GIVEN_SECRET, secret="a secret that both ends were given"),
        new_lane(PAGED, is_paged=True),
        new_lane(CHECKED, is_paged=True, checksum=True),
    ]
    if shutil.which("openssl") is not None:
        lanes.insert(2, new_lane(TLS, tls=_make_certificate(directory)))
    return lanes


def _make_certificate(directory: Path) -> dict[str, str]:
    """A certificate for 127.0.0.1 that is its own authority; enough where both ends are one's own."""
    key, certificate = str(directory / "key.pem"), str(directory / "certificate.pem")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=omnikv-bench", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", *kind, *names, "-days", "2", "-keyout", key, "-out", certificate)
    subprocess.run(made, check=True, capture_output=True)
    return {"certificate": certificate, "key": key, "authority": certificate}


def judge_across(run: Across) -> list[Bar]:
    """The bars that these results can be held to."""
    bars = []
    for size in run.sizes:
        contiguous, paged = (size.lane(name).rate_x.median for name in (CONTIGUOUS, PAGED))
        secret = _secret_x(size).median
        bars += [
            _at_least(f"tcp, {size.size_mib} MiB contiguous", contiguous, MIN_CONTIGUOUS_X, "x bare"),
            _at_least(f"tcp, {size.size_mib} MiB paged", paged, MIN_PAGED_X, "x bare"),
            _at_least(f"given secret, {size.size_mib} MiB", secret, MIN_SECRET_X, "x contiguous"),
        ]
    bars += [
        _at_least(f"{result.engine}, {result.size_mib} MiB", result.rate_x.median, MIN_ENGINE_X, "x bare engine")
        for result in run.engines
    ]
    return bars


def across_to_json(run: Across, command: str) -> dict[str, Any]:
    """Everything that was measured, where, and by which command, as JSON values."""
    return {
        "command": command,
        "machine": machine(),
        "sizes": [{**asdict(size), "secret_x": asdict(_secret_x(size))} for size in run.sizes],
        "small": asdict(run.small),
        "engines": [asdict(result) for result in run.engines],
        "engine_deaths": [asdict(death) for death in run.engine_deaths],
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in judge_across(run)],
    }


def across_to_text(run: Across, command: str) -> str:
    """The same as a table to read: rates as multiples of the bare loop of the same round, median (least-most)."""
    lines = [
        f"{command}   (CPUs {os.cpu_count()}, load {os.getloadavg()[0]:.1f})",
        "",
        f"{'':30}" + "".join(f"{f'{size.size_mib} MiB, {size.rounds} rounds':>24}" for size in run.sizes),
        f"{'bare socket loop, ms':30}" + "".join(f"{_spell(size.bare_ms, 1):>24}" for size in run.sizes),
        "rates, x bare",
    ]
    lines += [
        f"{rows[0].name:30}" + "".join(f"{_spell_lane(lane):>24}" for lane in rows)
        for rows in zip(*(size.lanes for size in run.sizes), strict=True)
    ]
    death = run.small.death_noticed_ms
    lines += [
        f"{'given secret, x contiguous':30}" + "".join(f"{_spell(_secret_x(size), 2):>24}" for size in run.sizes),
        "",
        f"1 MiB in flight               {run.small.requests_per_s:.0f} requests/s ({run.small.requests})",
        f"a killed sender is known after {death.median:.1f} ms ({death.least:.1f}-{death.most:.1f})",
        *_spell_engines(run),
        "",
        *(spell_bar(bar) for bar in judge_across(run)),
    ]
    return "\n".join(lines) + "\n"


def _spell_engines(run: Across) -> list[str]:
    lines = ["", "engines by their own TCP, each beside itself driven bare" if run.engines else "engines: none here"]
    for result in run.engines:
        rate = _spell(result.rate_x, 2) if result.content_ok else "WRONG CONTENT"
        bare, ours = _spell(result.bare_ms, 1), _spell(result.ours_ms, 1)
        lines.append(f"{result.engine}, {result.size_mib} MiB: bare {bare} ms, ours {ours} ms, {rate} x bare")
    lines += [
        f"{death.engine}: a killed sender is known after {_spell(death.noticed_ms, 1)} ms"
        for death in run.engine_deaths
    ]
    return lines


def _secret_x(size: AcrossResult) -> Spread:
    return size.lane(GIVEN_SECRET).beside(size.lane(CONTIGUOUS))


def _at_least(name: str, value: float, limit: float, unit: str) -> Bar:
    return Bar(name=name, value=value, limit=limit, unit=unit, at_least=True)


def _spell(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.least:.{digits}f}-{spread.most:.{digits}f})"


def _spell_lane(lane: LaneResult) -> str:
    return _spell(lane.rate_x, 2) if lane.content_ok else "WRONG CONTENT"
