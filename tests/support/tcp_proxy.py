"""A host between two ends that may delay what they say, cut it off in the middle, or hold it back."""

import contextlib
import selectors
import socket
import threading
import time

# In the first bytes of a connection: whether it is a lane.
_IS_LANE_AT = 5


class Proxy:
    """Forwards every connection to `target`, until `close`.

    A lane is cut after `lane_nbytes` towards the target, if that is not None; the first `stalls` of them stand still
    instead, for good. `delay_s` passes before each piece goes on.
    """

    def __init__(self, target, *, lane_nbytes=None, stalls=0, delay_s=0.0):
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.lane_nbytes = lane_nbytes
        self.stalls = stalls
        self.delay_s = delay_s
        self.lanes_cut = 0
        self.forwarded_nbytes = 0
        self.is_holding = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        self.is_holding = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in list(self._threads):
            thread.join()

    def cut_all(self):
        """Every connection ends now, without a word to either side."""
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _end_lane(self, near):
        self.lanes_cut += 1
        if self.stalls:
            self.stalls -= 1
            # Nothing moves until the target ends it.
            near.settimeout(None)
            while near.recv(65536):
                continue

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._forward, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, near):
        with near, contextlib.suppress(OSError), socket.create_connection(self._target) as far:
            self._sockets += [near, far]
            selector = selectors.DefaultSelector()
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(one, selectors.EVENT_READ)
            is_lane, passed = None, 0
            with selector:
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(65536)
                        if not data:
                            return
                        if is_lane is None:
                            is_lane = bool(data[_IS_LANE_AT])
                        while self.is_holding:
                            time.sleep(0.005)
                        time.sleep(self.delay_s)
                        if is_lane and key.fileobj is far and self.lane_nbytes is not None:
                            passed += len(data)
                            if passed > self.lane_nbytes:
                                self._end_lane(near)
                                return
                        (near if key.fileobj is far else far).sendall(data)
                        self.forwarded_nbytes += len(data)
