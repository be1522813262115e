"""Which dtype may become which between two stages, by name."""

from __future__ import annotations

FLOATS = ("float32", "bfloat16", "float16")
FLOATS8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def convertible(from_dtype: str, to_dtype: str) -> bool:
    """Whether values of `from_dtype` may be handed over as `to_dtype` by whoever receives them.

    The floats of 16 and 32 bits become one another, and 8-bit floats become them with the scales that come along. The
    way back, to 8 bits, is the sender's: it alone sees all that a scale must cover, and every receiver then reads the
    same values. From one 8-bit format to another a value would be rounded twice.
    """
    return from_dtype == to_dtype or (to_dtype in FLOATS and from_dtype in FLOATS + FLOATS8)
