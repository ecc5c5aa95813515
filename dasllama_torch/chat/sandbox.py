"""Asks the process in which chat templates run (worker.py), and starts it when it is needed."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from dasllama_torch.errors import TemplateError

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dasllama_torch.chat.worker import main; main()"
_MAX_REPLY = 1 << 28  # bytes; the worker's own limits keep below
_ENDS = {-signal.SIGPROF: "it was stopped: it takes too much time", -signal.SIGKILL: "it was killed from outside"}


class Sandbox:
    """One worker process, shared by all threads. It ends with this one, or when a template made it end; the next
    question then starts another."""

    def __init__(self):
        self._lock = threading.Lock()
        self._worker: subprocess.Popen | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """In a fork: the worker answers the process that started it. Nothing that waits in a buffer may reach it."""
        self._lock = threading.Lock()
        if self._worker is not None:
            self._worker.stdin.raw.close()
            self._worker.stdout.raw.close()
            self._worker.returncode = 0  # not a child of this process, which so has nothing to wait for
            self._worker = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's reply to a request. TemplateError where the template ended the worker."""
        line = json.dumps(request).encode("ascii") + b"\n"
        with self._lock:
            if self._worker is None or self._worker.poll() is not None:
                self._worker = self._started()
            try:
                reply = self._exchange(line)
            except (
                BaseException
            ):  # such as KeyboardInterrupt: an answer that nobody read must not meet the next request
                self._stop(kill=True)
                raise
            if not reply.endswith(b"\n"):
                code = self._stop(kill=len(reply) > 0)
                raise TemplateError(_ENDS.get(code, f"it ended the process that runs templates, which returned {code}"))
        return json.loads(reply)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen:
        command = [sys.executable, "-I", "-c", _START, json.dumps(sys.path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _exchange(self, line: bytes) -> bytes:
        try:
            self._worker.stdin.write(line)
            self._worker.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._worker.stdout.readline(_MAX_REPLY)

    def _stop(self, *, kill: bool = False) -> int | None:
        """Ends the worker, if there is one, and says what it returned."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        if kill:
            worker.kill()
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read all
            worker.stdin.close()
        worker.stdout.close()
        return worker.wait()


SANDBOX = Sandbox()
