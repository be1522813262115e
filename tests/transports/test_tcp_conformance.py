"""The tcp transport passes the suite that is shipped for strangers' ones: with its user's secret, a given one, TLS."""

import shutil

import pytest
from tcp_ends import TcpPair, make_certificates

from omnikv.testing.conformance import transport_scenarios

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl tool")


@pytest.fixture(scope="module")
def options_of(tmp_path_factory):
    """How the ends of each kind of pair are opened."""

    def find(kind):
        if kind == "secret":
            return {"secret": lambda: "known to both ends of this pair"}
        if kind == "tls":
            directory = tmp_path_factory.getbasetemp() / "certificates"
            if not directory.exists():
                directory.mkdir()
                make_certificates(directory)
            names = {"certificate": "source.pem", "key": "source.key", "authority": "authority.pem"}
            return {"tls": {setting: str(directory / name) for setting, name in names.items()}}
        return {"lanes": 1} if kind == "one lane" else {}

    return find


@pytest.mark.parametrize(
    ("name", "check"), transport_scenarios(), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("kind", ["plain", "secret", pytest.param("tls", marks=needs_openssl), "one lane"])
def test_tcp_conforms(kind, name, check, options_of):
    check(TcpPair(options=options_of(kind)))
