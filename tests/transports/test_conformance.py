"""Every built-in transport passes the suite that is shipped for strangers' ones."""

import pytest

from omnikv.testing.conformance import NamedPair, transport_scenarios


@pytest.mark.parametrize(
    ("name", "check"), transport_scenarios(), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_the_transport_conforms(transport, name, check):
    check(NamedPair(transport=transport))
