"""The fields of a payload's head, each of the type that the format says, or a `WireError` that names the field."""

from __future__ import annotations

from typing import Any, NoReturn

from omnikv.core.wire import PREFIX_NBYTES, show
from omnikv.core.wire_spans import MAX_INTEGER
from omnikv.errors import WireError, WireReason


def refuse(reason: WireReason, message: str, offset: int = PREFIX_NBYTES) -> NoReturn:
    """Never returns.

    Raises:
        WireError: always, with this reason.
    """
    raise WireError(message, reason=reason, offset=offset)


# What follows gives `value`, the field `what`, or raises WireError where it is something else.


def as_object(value: object, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        refuse(WireReason.HEADER_FIELD, f"{what} must be a JSON object, got {show(value)}")
    return value


def as_text(value: object, what: str) -> str:
    """Text that has a UTF-8 form."""
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        refuse(WireReason.HEADER_FIELD, f"{what} must be text that has a UTF-8 form, got {show(value)}")
    return value


def as_integer(value: object, what: str, reason: WireReason = WireReason.HEADER_FIELD, low: int = 0) -> int:
    """An integer from `low` to `MAX_INTEGER`."""
    # Not isinstance: JSON's true is a Python int.
    if type(value) is not int or not low <= value <= MAX_INTEGER:
        refuse(reason, f"{what} must be an integer from {low} to {MAX_INTEGER}, got {show(value)}")
    return value


def as_integers(value: object, what: str, low: int = 0) -> tuple[int, ...]:
    """A list of such integers."""
    if not isinstance(value, list):
        refuse(WireReason.HEADER_FIELD, f"{what} must be a list of integers, got {show(value)}")
    return tuple(as_integer(item, what, low=low) for item in value)


def as_optional_integer(value: object, what: str) -> int | None:
    """An integer from 0, or None where there is no such field."""
    return None if value is None else as_integer(value, what)
