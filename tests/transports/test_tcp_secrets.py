"""Where a tcp transport's secret comes from, who may connect with it, and what is said where there is none."""

import os
import stat
import threading
from contextlib import suppress

import pytest
from tcp_ends import TcpWorld, free_address, make_certificates

from omnikv.errors import ConfigError, ConnectError, TransportError
from omnikv.transports.shared_secret import find_secret, user_secret
from omnikv.transports.tls import Tls, as_tls

SECRET = "known to all ranks of this test"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def test_the_callers_function_comes_before_the_environment(secret_file):
    environ = {"OMNIKV_SECRET": "the environment's own secret", "OMNIKV_SECRET_FILE": str(secret_file)}
    assert find_secret(lambda: "the function's own secret", None, environ) == b"the function's own secret"
    assert find_secret(None, secret_file, environ) == SECRET.encode()
    assert find_secret(None, None, environ) == b"the environment's own secret"
    assert find_secret(None, None, {"OMNIKV_SECRET_FILE": str(secret_file)}) == SECRET.encode()
    assert find_secret(None, None, {}) is None


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda: "short", "at least 16"),
        (lambda: "", "0 bytes"),
        (lambda: 7, "text or bytes"),
        ("a secret as an option's value", "must be a function"),
    ],
)
def test_a_secret_that_is_none_is_refused(callback, words):
    with pytest.raises(ConfigError, match=words):
        find_secret(callback, None, {})


def test_a_secret_given_twice_is_refused(secret_file):
    with pytest.raises(ConfigError, match="not both"):
        find_secret(lambda: SECRET, secret_file, {})


def test_a_secrets_file_that_others_may_read_is_refused(secret_file):
    secret_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_secret(None, secret_file, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        find_secret(None, secret_file.with_name("nothing"), {})


def test_a_users_secret_is_made_once_by_whoever_comes_first(tmp_path):
    place = tmp_path / "own"
    found = []
    threads = [threading.Thread(target=lambda: found.append(user_secret(place))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in place.iterdir()] == ["tcp-secret"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "tcp-secret").stat().st_mode) == 0o600


def test_a_users_secret_that_others_may_have_put_there_is_refused(tmp_path):
    place = tmp_path / "open"
    place.mkdir(mode=0o755)
    with pytest.raises(TransportError, match="others may use it"):
        user_secret(place)
    place.chmod(0o700)
    user_secret(place)
    (place / "tcp-secret").chmod(0o644)
    with pytest.raises(TransportError, match="others may use it"):
        user_secret(place)
    (place / "tcp-secret").unlink()
    (place / "elsewhere").write_text(SECRET)
    os.symlink(place / "elsewhere", place / "tcp-secret")
    with pytest.raises(TransportError, match="cannot be made or read"):
        user_secret(place)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:5600", "host.example:5600"])
def test_an_address_beyond_loopback_needs_a_secret_or_tls(stack, address, monkeypatch):
    monkeypatch.delenv("OMNIKV_SECRET", raising=False)
    world = TcpWorld(stack)
    with pytest.raises(ConfigError, match=r"OMNIKV_SECRET .* tls="):
        world.source(listen=address)
    if not address.startswith(("0.", "[::]")):
        with pytest.raises(ConfigError, match=r"OMNIKV_SECRET .* tls="):
            world.target(peers={0: address})


def test_an_address_beyond_loopback_that_is_told_later_needs_one_too(stack, monkeypatch):
    monkeypatch.delenv("OMNIKV_SECRET", raising=False)
    world = TcpWorld(stack)
    target = world.target(peers=lambda rank: "10.1.2.3:5600")
    with pytest.raises(ConnectError, match=r"10.1.2.3:5600 .* another host.*OMNIKV_SECRET"):
        target.get(world.payload("r1"), deadline=1e12)


def test_all_interfaces_may_be_listened_at_with_a_secret(stack):
    world = TcpWorld(stack)
    source = world.source(listen="0.0.0.0:0", secret=lambda: SECRET)
    port = source.address.rsplit(":", 1)[1]
    target = world.target(peers={0: f"127.0.0.1:{port}"}, secret=lambda: SECRET)
    assert_it_works(world, source, target)


def test_unlike_secrets_are_told_to_whoever_waits_and_counted_at_both_ends(stack):
    world = TcpWorld(stack)
    source, target = world.source(secret=lambda: SECRET), world.target(secret=lambda: SECRET.upper())
    with pytest.raises(ConnectError, match="does not know the secret: both ends must be given the same one"):
        target.get(world.payload("r1"), deadline=1e12)
    assert target.counters["refused_proof"] >= 1
    assert set(source.counters) <= {"refused_proof"}


def assert_it_works(world, source, target):
    with source.reserve(world.payload("works"), 5) as slot:
        slot.buffer[:] = b"works"
        slot.publish()
    with target.get(world.payload("works"), deadline=1e12) as lease:
        assert bytes(lease.buffer) == b"works"
        lease.acknowledge()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    try:
        return make_certificates(directory)
    except FileNotFoundError:
        pytest.skip("makes certificates with the openssl tool")


def test_certificates_of_one_authority_know_each_other(stack, certificates):
    world = TcpWorld(stack)
    source, target = world.source(tls=certificates.source), world.target(tls=certificates.target)
    assert_it_works(world, source, target)


def test_a_certificate_of_another_authority_is_refused_at_both_ends(stack, certificates):
    world = TcpWorld(stack)
    source, stranger = world.source(tls=certificates.source), world.target(tls=certificates.stranger)
    with pytest.raises(ConnectError, match="no encryption that both ends take"):
        stranger.get(world.payload("r1"), deadline=1e12)
    assert source.counters["refused_tls"] >= 1


def test_a_certificate_for_another_host_is_refused_by_the_caller_unless_told_not_to_look(stack, certificates):
    world = TcpWorld(stack)
    source = world.source(listen="127.0.0.2:0", tls=certificates.source)
    target = world.target(tls=certificates.target)
    with pytest.raises(ConnectError, match="no encryption that both ends take"):
        target.get(world.payload("r1"), deadline=1e12)
    target.close()
    assert_it_works(world, source, world.target(tls={**certificates.target, "check_host": False}))


@pytest.mark.parametrize("who", ["source", "target"])
def test_an_end_with_tls_and_one_without_do_not_deal(stack, certificates, who):
    world = TcpWorld(stack)
    source = world.source(tls=certificates.source if who == "source" else None)
    target = world.target(tls=certificates.target if who == "target" else None)
    with source.reserve(world.payload("r1"), 1) as slot:
        slot.publish()
    with suppress(ConnectError):
        # Said where the end that encrypts is the one that calls; the other sees a connection that ends.
        assert target.get(world.payload("r1"), deadline=0.0) is None
    assert source.drain(deadline=0.0) == 1


def test_a_secret_may_be_asked_for_over_tls_as_well(stack, certificates):
    world = TcpWorld(stack)
    source = world.source(tls=certificates.source, secret=lambda: SECRET)
    assert_it_works(world, source, world.target(tls=certificates.target, secret=lambda: SECRET))
    with_none = world.target(rank=0, tls=certificates.target)
    with pytest.raises(ConnectError, match="no secret, the other with one"):
        with_none.get(world.payload("r1"), deadline=1e12)


@pytest.mark.parametrize(
    "setting",
    [
        "certificate.pem",
        {},
        {"certificate": "c", "key": "k"},
        {"certificate": "", "key": "", "authority": "", "ca": ""},
    ],
)
def test_tls_settings_that_are_none_are_refused(setting):
    with pytest.raises(ConfigError, match="certificate, key"):
        as_tls(setting)


def test_tls_files_that_are_missing_are_named(tmp_path):
    tls = Tls(certificate=tmp_path / "c", key=tmp_path / "k", authority=tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be used"):
        tls.accepting()


def test_free_addresses_are_loopback():
    assert free_address().startswith("127.0.0.1:")
