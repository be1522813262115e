"""Every payload in tests/corpus/wire is read, or refused for the reason that its file name states."""

from __future__ import annotations

import importlib.util
import tracemalloc
from pathlib import Path

import pytest

from omnikv.core.wire import MAX_HEADER_MARKS, MAX_TENSORS, Header, encode_head
from omnikv.core.wire_decode import decode
from omnikv.errors import ConfigError, WireError, WireReason
from omnikv.tensors.pack import decode_payload

CORPUS = Path(__file__).parents[1] / "corpus" / "wire"
FILES = sorted(CORPUS.glob("*.bin"))
REFUSED = [file for file in FILES if not file.name.startswith("valid__")]
VALID = [file for file in FILES if file.name.startswith("valid__")]


def reason_of(file: Path) -> WireReason:
    return WireReason(file.name.partition("__")[0])


# What the head alone cannot tell: an identity that the caller expects, a checksum's value.
BEYOND_THE_HEAD = {WireReason.WRONG_REQUEST, WireReason.WRONG_RANK, WireReason.CHECKSUM}
OF_THE_HEAD = [file for file in REFUSED if reason_of(file) not in BEYOND_THE_HEAD]


def refuse(payload: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_payload(payload, request_id="r", target_rank=0)
    return caught.value


@pytest.mark.parametrize("file", REFUSED, ids=lambda file: file.stem)
def test_payload_is_refused_for_the_reason_in_its_name(file):
    payload = file.read_bytes()
    error = refuse(payload)
    assert error.reason is reason_of(file)
    assert 0 <= error.offset <= max(len(payload), 2**63 + 2**20)
    assert str(error).isprintable()
    assert len(str(error)) < 500


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
def test_payload_is_read(file):
    decoded = decode_payload(file.read_bytes(), request_id="r", target_rank=0)
    assert decoded.header.request_id == "r"
    assert len(decoded.layers) == decoded.header.num_layers


@pytest.mark.parametrize("file", OF_THE_HEAD, ids=lambda file: file.stem)
def test_the_head_alone_gives_the_same_answer(file):
    """`core.wire_decode` knows every rule but identity and checksum values."""
    with pytest.raises(WireError) as caught:
        decode(file.read_bytes())
    assert caught.value.reason is reason_of(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_reading_takes_memory_in_proportion_to_the_payload(file):
    payload = file.read_bytes()
    tracemalloc.start()
    try:
        decode(payload)
    except WireError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # A nested list is two bytes of JSON and some 60 of Python; the constant covers the error and its texts.
    assert peak <= 64 * len(payload) + (64 << 10)


def test_67_bytes_that_announce_a_trillion_layers_allocate_nothing():
    payload = (CORPUS / "layer_count__67_bytes.bin").read_bytes()
    assert len(payload) == 67
    assert b"999999999999" in payload
    assert refuse(payload).reason is WireReason.LAYER_COUNT


def test_every_reason_has_a_payload():
    assert {reason_of(file) for file in REFUSED} == set(WireReason)


def test_the_files_are_what_the_script_writes():
    spec = importlib.util.spec_from_file_location("make_corpus", CORPUS / "make_corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {file.name: file.read_bytes() for file in FILES} == module.corpus()


def head_of(**fields: str) -> bytes:
    """A payload without data whose header has these fields, as JSON."""
    spelled = {"rid": '"r"', "bids": "[]", "meta": "{}", "td": "[]", "nl": "0", **fields}
    body = ("{" + ",".join(f'"{name}":{value}' for name, value in spelled.items()) + "}").encode()
    return len(body).to_bytes(4, "big") + body


def entries(num_layers: int) -> str:
    names = (f"{kind}_cache_{layer}" for layer in range(num_layers) for kind in ("key", "value"))
    return "[" + ",".join(f'{{"n":"{name}","d":"float16","s":[0],"o":0,"b":0}}' for name in names) + "]"


@pytest.mark.parametrize(
    "fields",
    [
        {"bids": "[" + ",".join(["1"] * (MAX_HEADER_MARKS + 1)) + "]"},
        {"meta": '{"a":[' + ",".join(["[]"] * MAX_HEADER_MARKS) + "]}"},
        {"meta": "{" + ",".join(f'"{number}":{{}}' for number in range(MAX_HEADER_MARKS // 3)) + "}"},
        {"td": "[" + ",".join(["{}"] * MAX_HEADER_MARKS) + "]"},
    ],
    ids=["block ids", "lists", "keys", "tensors"],
)
def test_a_header_of_more_values_than_are_read_is_refused_before_it_is_parsed(fields, monkeypatch):
    monkeypatch.setattr("omnikv.core.wire_decode.parse_json", lambda text: pytest.fail("it was parsed"))
    assert refuse(head_of(**fields)).reason is WireReason.HEADER_TOO_LARGE


def test_more_tensors_than_any_model_has_are_refused_and_as_many_as_allowed_are_read():
    most = MAX_TENSORS // 2
    assert decode(head_of(td=entries(most), nl=str(most))).num_layers == most
    error = refuse(head_of(td=entries(most + 1), nl=str(most + 1)))
    assert (error.reason, f"lists {MAX_TENSORS + 2} tensors" in str(error)) == (WireReason.LAYER_COUNT, True)


@pytest.mark.parametrize(
    "header",
    [
        Header(request_id="r", num_layers=0, spans=(), data_nbytes=0, block_ids=tuple(range(MAX_HEADER_MARKS + 1))),
        Header(request_id="r", num_layers=MAX_TENSORS // 2 + 1, spans=(), data_nbytes=0),
    ],
    ids=["block ids", "tensors"],
)
def test_what_no_reader_takes_is_not_written(header):
    with pytest.raises(ConfigError, match="at most 16384 are allowed, or has more than 524288"):
        encode_head(header)
