"""Ends of tcp transports for tests: addresses that nobody else has, certificates of the test's own, bare callers."""

import secrets
import socket
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from omnikv.core.authentication import NONCE_NBYTES, Claim, Proved, awaited_nbytes, call, digest_edge, step
from omnikv.core.keys import Edge, PayloadId
from omnikv.core.messages import PROTOCOL_VERSION, Hello
from omnikv.testing.conformance import NamedPair
from omnikv.transports.base import Endpoint
from omnikv.transports.proved_link import encode
from omnikv.transports.shared_secret import user_secret
from omnikv.transports.stream_frames import FrameCutter, frame
from omnikv.transports.tcp import TcpTransport


def free_address(host="127.0.0.1"):
    """An address at which nobody listens now."""
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpPair(NamedPair):
    """The ends of one edge over tcp; a rank keeps its address when it is opened again, as a restarted process does."""

    transport: str = "tcp"
    addresses: dict[int, str] = field(default_factory=dict)

    def address_of(self, rank):
        return self.addresses.setdefault(rank, free_address())

    def source_options(self, rank):
        return {"listen": self.address_of(rank)}

    def target_options(self, sources):
        return {"peers": {rank: self.address_of(rank) for rank in sources}}


class TcpWorld:
    """One edge in a namespace of its own, and everything that a test opened on it."""

    def __init__(self, stack):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=f"test-{secrets.token_hex(8)}")
        self.addresses = {}
        self.stack = stack

    def payload(self, transfer_id, source=0, target=0, **more):
        return PayloadId(edge=self.edge, transfer_id=transfer_id, source_rank=source, target_rank=target, **more)

    def endpoint(self, side, rank=0, peers=(0,), **more):
        return Endpoint(edge=self.edge, side=side, rank=rank, peer_ranks=peers, **more)

    def source(self, rank=0, targets=(0,), readers=1, **options):
        listen = options.pop("listen", self.addresses.get(rank, "127.0.0.1:0"))
        transport = TcpTransport(self.endpoint("source", rank, targets, num_readers=readers), listen=listen, **options)
        self.stack.callback(transport.close)
        self.addresses[rank] = transport.address
        return transport

    def target(self, rank=0, sources=(0,), **options):
        peers = options.pop("peers", {source: self.addresses.get(source) or free_address() for source in sources})
        transport = TcpTransport(self.endpoint("target", rank, sources), peers=peers, **options)
        self.stack.callback(transport.close)
        return transport

    def caller(self, address, **changes):
        """A bare connection to a source, with what its greeting needs; nothing was said yet."""
        caller = BareCaller(self.edge, address, **changes)
        self.stack.callback(caller.close)
        return caller


class BareCaller:
    """A blocking connection that speaks the transport's bytes by itself, rightly or wrongly."""

    def __init__(self, edge, address, *, rank=0, purpose="control", secret=None, timeout_s=30.0, **claim):
        host, port = address.rsplit(":", 1)
        self.edge = edge
        self.secret = user_secret() if secret is None else secret
        self.claim = Claim(
            purpose=purpose,
            side="target",
            rank=rank,
            **{"reader": 0, "edge": digest_edge(edge.encode()), "life": secrets.token_bytes(16), **claim},
        )
        self.connection = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._cutter = FrameCutter(1 << 16)
        self._frames = []

    def greet(self, claim=None):
        """The state after a whole greeting."""
        state, out = call(claim or self.claim, secrets.token_bytes(NONCE_NBYTES), self.secret)
        self.connection.sendall(out)
        while needed := awaited_nbytes(state):
            state, out = step(state, self.receive(needed))
            if out:
                self.connection.sendall(out)
        return state

    def enter(self, **changes):
        """Proved and greeted in words, as a target that may ask from now on; the source's Hello is read."""
        assert isinstance(self.greet(), Proved)
        self.say(self.hello(**changes))
        assert b"hello" in self.hear()
        return self

    def hello(self, **changes):
        said = Hello(
            version=PROTOCOL_VERSION,
            namespace=self.edge.namespace,
            from_stage=self.edge.from_stage,
            to_stage=self.edge.to_stage,
            replica=0,
            side="target",
            rank=self.claim.rank,
            pid=1,
            incarnation=self.claim.life.hex(),
            facts={},
            reader=self.claim.reader,
        )
        return type(said)(**{**{name: getattr(said, name) for name in said.__struct_fields__}, **changes})

    def say(self, message):
        self.connection.sendall(frame(encode(message)))

    def hear(self):
        """The next message's bytes, or none at the end of the connection."""
        while not self._frames:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return b""
            self._frames += self._cutter.feed(data)
        return self._frames.pop(0)

    def receive(self, nbytes):
        received = b""
        while len(received) < nbytes:
            data = self.connection.recv(nbytes - len(received))
            if not data:
                raise ConnectionResetError
            received += data
        return received

    def is_ended(self):
        """Whether the other side ends the connection; whatever it still says is read away."""
        try:
            while self.connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True

    def close(self):
        self.connection.close()


def with_claim(caller, **changes):
    """The caller's claim, with something else in it."""
    return replace(caller.claim, **changes)


def make_certificates(directory: Path):
    """An authority, two certificates that it signed for 127.0.0.1, and one of a stranger's own; by the openssl tool."""

    def run(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = {}
    for authority in ("authority", "strange-authority"):
        names = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", f"/CN={authority}")
        run("req", "-x509", *new_key, *names)
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name, authority in (("source", "authority"), ("target", "authority"), ("stranger", "strange-authority")):
        run("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
        made[name] = {
            "certificate": str(directory / f"{name}.pem"),
            "key": str(directory / f"{name}.key"),
            "authority": str(directory / "authority.pem"),
        }
    return SimpleNamespace(**made)
