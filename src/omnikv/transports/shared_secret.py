"""Where the secret comes from that the ends of a transport across hosts prove to each other.

In this order: what the caller names (a function, or a file), the variable `OMNIKV_SECRET`, the file that
`OMNIKV_SECRET_FILE` names. Where nothing of that is set, ends that stay on one host use a secret of their user's: a
file that only this user can read, made by whoever comes first. To know it is to be the same user, so loopback, where
any process of the host may call, is as closed as a Unix socket that asks the kernel for the peer's user.

A secret is never an option's value: settings are compared between ranks, logged and shown.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from omnikv.core.authentication import MIN_SECRET_NBYTES
from omnikv.errors import ConfigError, TransportError

SecretCallback: TypeAlias = "Callable[[], str | bytes]"

SECRET_VARIABLE = "OMNIKV_SECRET"
SECRET_FILE_VARIABLE = "OMNIKV_SECRET_FILE"
_USER_SECRET_NAME = "tcp-secret"
_ONLY_OWNER = 0o077


def find_secret(
    callback: SecretCallback | None, file: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> bytes | None:
    """The secret that somebody set, or None where nobody did.

    Raises:
        ConfigError: both `callback` and `file` are given, a secret is too short, or its file cannot be read or may be
            read by others.
    """
    if callback is not None and file is not None:
        raise ConfigError("tcp: give either secret= (a function) or secret_file=, not both")
    if callback is not None:
        if not callable(callback):
            raise ConfigError(
                f"tcp: secret must be a function that returns the secret, got a {type(callback).__name__}; put the "
                f"text into {SECRET_VARIABLE} or into a file instead, options are shown in logs"
            )
        return _checked(callback(), "what the function secret= returned")
    if file is not None:
        return _read(Path(file), "secret_file")
    if environ.get(SECRET_VARIABLE):
        return _checked(environ[SECRET_VARIABLE], SECRET_VARIABLE)
    if environ.get(SECRET_FILE_VARIABLE):
        return _read(Path(environ[SECRET_FILE_VARIABLE]), SECRET_FILE_VARIABLE)
    return None


def user_secret(directory: Path | None = None) -> bytes:
    """The secret of this process's user on this host; made when it is asked for first.

    It lies in `directory`, or in the user's runtime directory (`/run/user/UID`), or where there is none in
    `/tmp/omnikv-UID`: a place that does not depend on a process's environment, so that all of a user's find it.

    Raises:
        TransportError: the directory or the file belongs to somebody else, may be read by others, or cannot be made.
    """
    place = directory or _runtime_directory()
    path = place / _USER_SECRET_NAME
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        _require_own(place, place.lstat(), stat.S_ISDIR)
        if not path.exists():
            _make_once(path)
        return _read_own(path)
    except OSError as error:
        raise TransportError(
            f"tcp: this user's secret {path} cannot be made or read ({error.strerror or error}): set {SECRET_VARIABLE} "
            "to the same text at all ranks instead",
            transport="tcp",
        ) from error


def _runtime_directory() -> Path:
    own = Path(f"/run/user/{os.geteuid()}")
    return own / "omnikv" if own.is_dir() and os.access(own, os.W_OK) else Path(f"/tmp/omnikv-{os.geteuid()}")


def _make_once(path: Path) -> None:
    """Linked into place whole, so that two who come first at once agree on one of the two."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_own(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _require_own(path, os.fstat(file.fileno()), stat.S_ISREG)
        return _checked(file.read(), str(path))


def _require_own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & _ONLY_OWNER or not is_kind(status.st_mode):
        raise TransportError(
            f"tcp: {path} is not this user's own, or others may use it (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}): remove it, or set {SECRET_VARIABLE}",
            transport="tcp",
        )


def _read(path: Path, setting: str) -> bytes:
    try:
        readable = path.stat().st_mode & _ONLY_OWNER
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tcp: {setting} names {path}, which cannot be read ({error.strerror or error})") from error
    if readable:
        raise ConfigError(f"tcp: {setting} names {path}, which others than its owner may use: chmod 600 {path}")
    return _checked(content, f"{setting} {path}")


def _checked(secret: str | bytes, origin: str) -> bytes:
    if not isinstance(secret, (str, bytes)):
        raise ConfigError(f"tcp: {origin} must be text or bytes, got a {type(secret).__name__}")
    # A file's last line end is its editor's, not the secret's.
    content = secret.encode() if isinstance(secret, str) else secret
    content = content.rstrip(b"\r\n")
    if len(content) < MIN_SECRET_NBYTES:
        raise ConfigError(
            f"tcp: {origin} holds a secret of {len(content)} bytes, at least {MIN_SECRET_NBYTES} are needed: make one "
            "with `openssl rand -hex 32`"
        )
    return content
