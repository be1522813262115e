"""Every built-in transport passes the suite that is shipped for strangers' ones, and so does a slow, stuttering one."""

import pytest

from omnikv.testing.conformance import NamedPair, transport_scenarios

TROUBLED = {"inner": "memory", "faults": {"duplicate": 1.0, "delay": 0.5, "delay_s": 0.002}}
PAIRS = {
    "memory": NamedPair(transport="memory"),
    "shm": NamedPair(transport="shm"),
    "faulty(memory)": NamedPair(transport="faulty", options=TROUBLED),
}


@pytest.mark.parametrize(
    ("name", "check"), transport_scenarios(), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("transport", PAIRS)
def test_the_transport_conforms(transport, name, check):
    pair = PAIRS[transport]
    check(NamedPair(transport=pair.transport, options=pair.options))
