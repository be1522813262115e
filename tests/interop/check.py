"""Released engine to omnikv and omnikv to released engine, byte for byte: `make interop`.

Each stage is a process of its own. A line says what was checked; the exit status is 1 where anything differs.
"""

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("stage.py")
SIZES = ((1, 1), (4, 2), (2, 4))
QUIET = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# What the published formula adds to a configured port, and the distance between two ranks.
PORT_OFFSET, RANK_STRIDE, MOST_RANKS = 100, 16, 4


class StageProcess:
    def __init__(self, kind, python, log):
        self.kind = kind
        self.process = subprocess.Popen(
            [python, str(PROGRAM), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **QUIET},
        )

    def begin(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def finish(self):
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the {self.kind} process ended"}
        if "error" in answer:
            raise SystemExit(f"{self.kind}: {answer['error']}")
        return answer["value"]

    def call(self, name, *arguments):
        self.begin(name, *arguments)
        return self.finish()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def free_base_port():
    """A port from which every rank's, by the published formula, is free."""
    while True:
        base = 20000 + secrets.randbelow(20000)
        ports = [base + PORT_OFFSET + rank * RANK_STRIDE for rank in range(MOST_RANKS)]
        if all(_is_free(port) for port in ports):
            return base


def _is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def connector_settings(connector):
    """A configuration file's settings, and what an orchestrator would tell receivers of the sender."""
    if connector == "SharedMemoryConnector":
        return {"type": connector, "shm_threshold_bytes": 65536}, None
    base = free_base_port()
    settings = {
        "type": connector,
        "host": "127.0.0.1",
        "zmq_port": base,
        "protocol": "tcp",
        "memory_pool_size": 16 << 20,
        "memory_pool_device": "cpu",
    }
    return settings, {"host": "127.0.0.1", "zmq_port": base + PORT_OFFSET}


def check(sender, receiver, connector, sizes):
    settings, sender_info = connector_settings(connector)
    request_id = f"interop-{secrets.token_hex(6)}"
    if not all(sender.call("open", "send", settings, *sizes) + receiver.call("open", "receive", settings, *sizes)):
        return ["a connector did not open"]
    # The receivers wait already: nothing is there when they first ask.
    receiver.begin("receive", request_id, sender_info)
    sender.call("send", request_id)
    wrong = receiver.finish()
    for stage in (receiver, sender):
        stage.call("close")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connectors", default="SharedMemoryConnector,MooncakeTransferEngineConnector")
    parser.add_argument("--released", required=True, help="a Python with the released engine")
    parser.add_argument("--log", default="interop.log", help="where both processes' own words go")
    arguments = parser.parse_args()
    failed = False
    with open(arguments.log, "w", encoding="utf-8") as log:
        # Where the engine is installed our settings would open its own connectors, so ours run without it.
        pythons = {"released": arguments.released, "omnikv": sys.executable}
        stages = {kind: StageProcess(kind, python, log) for kind, python in pythons.items()}
        for stage in stages.values():
            assert stage.finish() == "ready"
        for connector in arguments.connectors.split(","):
            for sending, receiving in (("released", "omnikv"), ("omnikv", "released")):
                for sizes in SIZES:
                    wrong = check(stages[sending], stages[receiving], connector, sizes)
                    failed = failed or bool(wrong)
                    what = f"{connector}: {sending} TP {sizes[0]} -> {receiving} TP {sizes[1]}"
                    print(f"{'FAILED' if wrong else 'equal '}  {what}", *wrong, sep="\n        ", flush=True)  # noqa: T201
        for stage in stages.values():
            stage.end()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
