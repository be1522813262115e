"""A process of a test's own that is told one line of JSON at a time, and ends with its input."""

import contextlib
import json
import os
import subprocess
import sys


class ToldProcess:
    """A Python program in a process of its own; `before` is a command that runs it, `more` goes to its environment."""

    def __init__(self, program, arguments, *, before=(), more=None):
        self.process = subprocess.Popen(
            [*before, sys.executable, str(program), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(more or {})},
        )

    def tell(self, message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def line(self):
        return self.process.stdout.readline()

    def kill(self):
        self.process.kill()
        self.end()

    def end(self):
        if self.process.stdout.closed:
            return
        # A killed process has closed its pipe's other end already.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class AnsweringProcess(ToldProcess):
    """One that answers each call by name; `call` waits for its answer, `begin` and `finish` are its two halves."""

    def __init__(self, program, arguments, **more):
        super().__init__(program, arguments, **more)
        self.pid = self.call("pid")

    def begin(self, name, *arguments):
        self.tell([name, *arguments])

    def finish(self):
        answer = json.loads(self.line())
        assert "error" not in answer, answer
        return answer["value"]

    def call(self, name, *arguments):
        self.begin(name, *arguments)
        return self.finish()
