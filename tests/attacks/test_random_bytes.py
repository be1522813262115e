"""Attack: bytes without meaning, of any length (D29): refused, counted, one line a kind."""

import random

import pytest

from omnikv.core.authentication import OPENING_NBYTES


@pytest.mark.parametrize("nbytes", [OPENING_NBYTES, 4096, 1 << 20])
def test_d29_random_bytes_are_refused(attacked, ended, warnings_of, nbytes):
    noise = random.Random(nbytes)
    for _ in range(5):
        stranger = attacked.connect()
        try:
            stranger.sendall(noise.randbytes(nbytes))
        except ConnectionError:
            continue
        assert ended(stranger)
    attacked.until_counted("refused_opening", 5)
    assert len(warnings_of("is refused")) == 1
    attacked.works()


def test_a_word_of_another_protocol_is_refused(attacked, ended):
    stranger = attacked.connect()
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: kv.example\r\nUser-Agent: curl\r\nAccept: */*\r\n".ljust(200, b"\n"))
    assert ended(stranger)
    assert attacked.the_source.counters == {"refused_opening": 1}
    attacked.works()
