"""A coverage-guided fuzz target for payload reading; never collected by pytest.

Run it beside the tests, for as long as you like, on the corpus as seeds:

    pip install atheris
    mkdir -p /tmp/wire-findings
    python tests/fuzz/atheris_wire.py /tmp/wire-findings tests/corpus/wire -max_len=4096 -max_total_time=600

A crash is anything but a value or a `WireError`; libFuzzer leaves the input in the current directory. Name it for the
reason it should be refused for, add it to tests/corpus/wire/make_corpus.py, and mend the reader.
"""

from __future__ import annotations

import sys


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["omnikv", "json"]):
        from omnikv.errors import WireError
        from omnikv.tensors.pack import decode_payload

    def read(payload: bytes) -> None:
        for verify in (True, False):
            try:
                decoded = decode_payload(payload, verify=verify)
            except WireError:
                continue
            nbytes = sum(tensor.nbytes for layer in decoded.layers if layer for tensor in layer)
            if nbytes > len(payload):
                raise AssertionError(f"{nbytes} bytes of tensors came out of {len(payload)}")

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
