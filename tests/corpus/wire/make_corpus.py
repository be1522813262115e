"""Writes the payloads beside it, each named for what a reader must say: `<reason>__<what is wrong>.bin`.

They are put together here by hand, from the format and not by omnikv's own writer; `valid__*.bin` must be read. All are
read as rank 0 of request "r". Run it after adding a case: `python tests/corpus/wire/make_corpus.py`.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import xxhash

HERE = Path(__file__).parent
ZEROES = "0" * 32
DATA = bytes(range(16))


def tensor(
    name: str, offset: int = 0, shape: object = (2, 2, 1), nbytes: object = None, **other: object
) -> dict[str, Any]:
    entry = {"n": name, "i": int(name.rsplit("_", 1)[1]), "d": "float16", "s": shape, "o": offset, "b": nbytes or 8}
    return entry | other


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def fields(td: list[Any] | None = None, **other: Any) -> dict[str, Any]:
    entries = [tensor("key_cache_0"), tensor("value_cache_0", 8)] if td is None else td
    return {"rid": "r", "bids": [4, 7], "meta": {"seq_len": 2}, "td": entries, "nl": len(entries) // 2} | other


def pack(header: bytes, data: bytes = DATA) -> bytes:
    return struct.pack(">I", len(header)) + header + data


def old(header: Any, data: bytes = DATA) -> bytes:
    """As a released engine writes: no padding, no extension, no checksum."""
    return pack(json.dumps(header, separators=(",", ":")).encode(), data)


def text(header: str) -> bytes:
    return pack(header.encode())


def ours(
    header: dict[str, Any] | None = None,
    data: bytes = DATA,
    scope: str = "all",
    tail: str | None = None,
    **extension: Any,
) -> bytes:
    """As omnikv writes: padded, with its extension, sealed. `tail` replaces the checksum entry."""
    own = {"v": 1, "n": len(data), "src": 1, "dst": 0} | extension
    start = json.dumps((header or fields()) | {"omnikv": own}, separators=(",", ":"))[:-1]
    entry = f',"ck":"xxh3_128.{scope}.{ZEROES}"' if tail is None else tail
    body = (start + entry + "}").encode()
    payload = pack(body + b" " * (-(4 + len(body)) % 64), data)
    if tail is not None:
        return payload
    covered = payload if scope == "all" else payload[: len(payload) - len(data)]
    return payload.replace(ZEROES.encode(), xxhash.xxh3_128(covered).hexdigest().encode(), 1)


def flip(payload: bytes, at: int) -> bytes:
    changed = bytearray(payload)
    changed[at] ^= 1
    return bytes(changed)


def shorten_padding(payload: bytes) -> bytes:
    """The header announced one byte shorter, so that its last space counts as data."""
    return struct.pack(">I", int.from_bytes(payload[:4], "big") - 1) + payload[4:]


def huge_layer_count() -> bytes:
    """67 bytes that announce a trillion layers."""
    header = '{"rid":"%s","bids":[],"meta":{},"td":[],"nl":999999999999}'
    return pack((header % ("r" * (63 - len(header) + 2))).encode(), b"")


def two_layers(**second_key: Any) -> dict[str, Any]:
    first = [tensor("key_cache_0"), tensor("value_cache_0", 8)]
    return fields([*first, tensor("key_cache_1", 16) | second_key, tensor("value_cache_1", 24)])


def pair(**key: Any) -> dict[str, Any]:
    """One layer whose key differs from the valid one."""
    return fields([tensor("key_cache_0") | key, tensor("value_cache_0", 8)])


VALID = {
    "released_engine": old(fields()),
    "released_engine_without_indices": old(fields([without(entry, "i") for entry in fields()["td"]])),
    "released_engine_with_gaps": old(fields([tensor("key_cache_0", 30), tensor("value_cache_0", 2)]), bytes(50)),
    "released_engine_with_spare_bytes": old(fields(), DATA + bytes(100)),
    "released_engine_no_layers": old(fields([]), b""),
    "released_engine_sliced_for_rank_0": old(fields(meta={"tp_head_slice": {"applied": True, "target_rank": 0}})),
    "missing_in_both": old(fields([{"n": "key_cache_0", "x": True}, {"n": "value_cache_0", "x": True}]), b""),
    "checksum_over_all": ours(),
    "checksum_over_header": ours(scope="header"),
    "aligned_gap": ours(fields([tensor("key_cache_0"), tensor("value_cache_0", 64)]), DATA[:8] + bytes(56) + DATA[8:]),
    "empty_tensors": ours(
        fields([tensor(f"{kind}_cache_0", shape=[0, 2, 1]) | {"b": 0} for kind in ("key", "value")]), b""
    ),
}

TRUNCATED = {
    "nothing": b"",
    "three_bytes": b"\0\0\0",
    "header_cut": old(fields())[:40],
    "last_tensor_cut": old(fields())[:-1],
    "data_gone": old(fields())[: -len(DATA)],
    "own_data_cut": ours()[:-1],
}
HEADER_TOO_LARGE = {
    "four_gib": b"\xff\xff\xff\xff{}",
    "one_over": struct.pack(">I", (8 << 20) + 1) + b"{}",
}
HEADER_NOT_JSON = {
    "empty": text(""),
    "spaces": text("    "),
    "cut_short": text('{"rid":"r",'),
    "two_values": text("{} {}"),
    "not_utf8": pack(b'{"rid":"\xff"}'),
    "utf16": pack(json.dumps(fields()).encode("utf-16")),
    "byte_order_mark": pack(b"\xef\xbb\xbf" + json.dumps(fields()).encode()),
    "nan": old(fields(meta={"x": float("nan")})),
    "infinity": old(fields(nl=float("inf"))),
    "overflowing_float": text(json.dumps(fields()).replace('"seq_len": 2', '"seq_len": 1e999')),
    "deep_nesting": text('{"meta":' + "[" * 60_000),
    "deep_nesting_closed": text(json.dumps(fields()).replace("[4, 7]", "[" * 60_000 + "]" * 60_000)),
    "integer_of_101_digits": text(json.dumps(fields()).replace('"seq_len": 2', '"seq_len": ' + "9" * 101)),
    "integer_of_5000_digits": text(json.dumps(fields()).replace('"nl": 1', '"nl": ' + "9" * 5000)),
    "key_twice": text(json.dumps(fields()).replace('"rid": "r"', '"rid": "q", "rid": "r"')),
    "key_twice_in_tensor": text(json.dumps(fields()).replace('"o": 8', '"o": 0, "o": 8')),
}
HEADER_FIELD = {
    "list": text("[]"),
    "null": text("null"),
    "no_request_id": old(without(fields(), "rid")),
    "request_id_number": old(fields(rid=7)),
    "request_id_surrogate": old(fields(rid="\ud800")),
    "no_block_ids": old(without(fields(), "bids")),
    "block_ids_text": old(fields(bids="4,7")),
    "block_id_boolean": old(fields(bids=[4, True])),
    "block_id_over_64_bits": old(fields(bids=[2**63])),
    "no_metadata": old(without(fields(), "meta")),
    "metadata_list": old(fields(meta=[1])),
    "tensor_is_text": old(fields(["key_cache_0", tensor("value_cache_0", 8)])),
    "missing_mark_number": old(fields([{"n": "key_cache_0", "x": 1}, {"n": "value_cache_0", "x": True}])),
    "extension_list": old(fields(omnikv=[1])),
    "extension_version_2": ours(v=2),
    "extension_version_true": ours(v=True),
    "extension_without_size": old(fields(omnikv={"v": 1})),
    "extension_size_negative": ours(n=-1),
    "extension_size_boolean": ours(n=True),
    "extension_rank_boolean": ours(dst=False),
    "extension_rank_negative": ours(src=-1),
    "extension_role_number": ours(role=3),
    "extension_attempt_text": ours(attempt="1"),
    "extension_heads_text": ours(heads="012"),
    "extension_head_fraction": ours(heads=[0, 1.5]),
}
LAYER_COUNT = {
    "67_bytes": huge_layer_count(),
    "absent": old(without(fields(), "nl")),
    "boolean": old(fields(nl=True)),
    "negative": old(fields(nl=-1)),
    "fraction": old(fields(nl=1.0)),
    "text": old(fields(nl="1")),
    "over_64_bits": old(fields(nl=2**63)),
    "more_layers_than_tensors": old(fields(nl=2)),
    "more_tensors_than_layers": old(two_layers() | {"nl": 1}, DATA * 2),
    "keys_only": old(fields([tensor("key_cache_0")], nl=1)),
    "tensors_object": old(fields() | {"td": {}}),
    "layer_outside": old(fields([tensor("key_cache_0"), tensor("value_cache_1", 8)])),
}
TENSOR_NAME = {
    "unknown": old(pair(n="query_cache_0")),
    "absent": old(fields([without(tensor("key_cache_0"), "n"), tensor("value_cache_0", 8)])),
    "number": old(pair(n=0)),
    "leading_zero": old(pair(n="key_cache_00")),
    "sign": old(pair(n="key_cache_-0")),
    "other_digits": old(pair(n="key_cache_\u0660")),
    "newline": old(pair(n="key_cache_0\n")),
    "four_thousand_digits": old(pair(n="key_cache_" + "1" * 4400)),
    "index_clash": old(two_layers(i=0), DATA * 2),
    "index_boolean": old(pair(i=False)),
    "index_fraction": old(pair(i=0.0)),
}
DUPLICATE_LAYER = {
    "key": old(fields([tensor("key_cache_0"), tensor("key_cache_0", 8)])),
    "value_of_two": old(fields([*two_layers()["td"][:3], tensor("value_cache_0", 24)]), DATA * 2),
    "missing_and_sent": old(fields([tensor("key_cache_0"), {"n": "key_cache_0", "x": True}])),
}
MISSING_LAYER = {
    "value": old(fields([tensor("key_cache_0"), {"n": "value_cache_0", "x": True}])),
    "key": old(fields([{"n": "key_cache_0", "x": True}, tensor("value_cache_0")])),
}
DTYPE = {
    "unknown": old(pair(d="float12")),
    "object": old(pair(d="object")),
    "with_module": old(pair(d="torch.float16")),
    "list": old(pair(d=["float16"])),
    "absent": old(fields([without(tensor("key_cache_0"), "d"), tensor("value_cache_0", 8)])),
}
SHAPE = {
    "negative": old(pair(s=[-2, -2, 1])),
    "boolean": old(pair(s=[2, 2, True])),
    "fraction": old(pair(s=[2.0, 2, 1])),
    "text": old(pair(s="221")),
    "absent": old(fields([without(tensor("key_cache_0"), "s"), tensor("value_cache_0", 8)])),
    "nine_dimensions": old(pair(s=[2, 2, 1, 1, 1, 1, 1, 1, 1])),
    "overflow": old(pair(s=[2**32, 2**31], b=0)),
    "overflow_to_zero": old(pair(s=[2**32, 2**32, 2], b=0)),
    "overflow_behind_zero": old(pair(s=[0, 2**40, 2**40], b=0)),
    "size_over_64_bits": old(pair(s=[2**64], b=8)),
    "bytes_too_few": old(pair(b=6)),
    "bytes_too_many": old(pair(b=10)),
    "bytes_negative": old(pair(b=-8)),
    "bytes_boolean": old(pair(s=[1], d="int8", b=True)),
    "bytes_absent": old(fields([without(tensor("key_cache_0"), "b"), tensor("value_cache_0", 8)])),
}
SPAN_OUT_OF_RANGE = {
    "behind_the_end": old(fields([tensor("key_cache_0"), tensor("value_cache_0", 9)])),
    "far_behind": old(pair(o=2**62)),
    "over_64_bits": old(pair(o=2**63)),
    "negative": old(pair(o=-8)),
    "boolean": old(pair(o=False)),
    "absent": old(fields([without(tensor("key_cache_0"), "o"), tensor("value_cache_0", 8)])),
    "own_behind_the_end": ours(fields([tensor("key_cache_0"), tensor("value_cache_0", 9)])),
    "empty_behind_the_end": old(pair(o=17, s=[0], b=0)),
}
SPAN_OVERLAP = {
    "one_byte": old(fields([tensor("key_cache_0"), tensor("value_cache_0", 7)])),
    "same_place": old(fields([tensor("key_cache_0"), tensor("value_cache_0", 0)])),
    "own": ours(fields([tensor("key_cache_0", 8), tensor("value_cache_0", 4)])),
}
SPAN_GAP = {
    "own_64_bytes": ours(fields([tensor("key_cache_0"), tensor("value_cache_0", 72)]), DATA[:8] + bytes(64) + DATA[8:]),
    "own_at_the_start": ours(fields([tensor("key_cache_0", 64), tensor("value_cache_0", 72)]), bytes(64) + DATA),
    "own_at_the_end": ours(data=DATA + b"\0"),
    "own_bytes_behind": ours() + b"\0",
    "own_padding_moved_into_data": shorten_padding(ours()),
}
WRONG_REQUEST = {"other": old(fields(rid="q")), "own_other": ours(fields(rid="R"))}
WRONG_RANK = {
    "slice_stamp": old(fields(meta={"tp_head_slice": {"applied": True, "target_rank": 3}})),
    "slice_stamp_boolean": old(fields(meta={"tp_head_slice": {"applied": True, "target_rank": False}})),
    "slice_stamp_text": old(fields(meta={"tp_head_slice": {"applied": True, "target_rank": "0"}})),
    "own": ours(dst=1),
    "own_right_stamp_wrong": ours(fields(meta={"tp_head_slice": {"target_rank": 2}})),
}
CHECKSUM = {
    "first_byte_flipped": flip(ours(), -16),
    "last_byte_flipped": flip(ours(), -1),
    "gap_flipped": flip(VALID["aligned_gap"], -20),
    "block_id_flipped": ours().replace(b'"bids":[4,7]', b'"bids":[5,7]'),
    "header_only_block_id_flipped": ours(scope="header").replace(b'"bids":[4,7]', b'"bids":[5,7]'),
    "scope_unknown": ours(tail=f',"ck":"xxh3_128.some.{ZEROES}"'),
    "scope_changed": ours().replace(b".all.", b".header.").replace(b"   ", b"", 1),
    "padding_moved_into_data": shorten_padding(ours(data=b" " * 16))[:-1],
    "digest_upper_case": ours(tail=',"ck":"xxh3_128.all.' + "A" * 32 + '"'),
    "digest_short": ours(tail=',"ck":"xxh3_128.all.' + "0" * 31 + '"'),
    "digest_wrong": ours(tail=',"ck":"xxh3_128.all.' + "0" * 32 + '"'),
    "algorithm_unknown": ours(tail=',"ck":"crc32.all.' + "0" * 32 + '"'),
    "absent": ours(tail=""),
    "renamed": ours().replace(b'"ck"', b'"cl"'),
    "not_last": ours(tail=',"ck":"xxh3_128.all.' + "0" * 32 + '","z":0'),
    "extension_renamed": ours().replace(b'"omnikv"', b'"omnikw"'),
}


def corpus() -> dict[str, bytes]:
    """Every payload by its file name."""
    groups = {
        "valid": VALID, "truncated": TRUNCATED, "header_too_large": HEADER_TOO_LARGE,
        "header_not_json": HEADER_NOT_JSON, "header_field": HEADER_FIELD, "layer_count": LAYER_COUNT,
        "tensor_name": TENSOR_NAME, "duplicate_layer": DUPLICATE_LAYER, "missing_layer": MISSING_LAYER,
        "dtype": DTYPE, "shape": SHAPE,
        "span_out_of_range": SPAN_OUT_OF_RANGE, "span_overlap": SPAN_OVERLAP, "span_gap": SPAN_GAP,
        "wrong_request": WRONG_REQUEST, "wrong_rank": WRONG_RANK, "checksum": CHECKSUM,
    }  # fmt: skip
    return {f"{reason}__{name}.bin": payload for reason, cases in groups.items() for name, payload in cases.items()}


if __name__ == "__main__":
    for stale in HERE.glob("*.bin"):
        stale.unlink()
    for file_name, payload in corpus().items():
        (HERE / file_name).write_bytes(payload)
