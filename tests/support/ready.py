"""Programs in processes of their own, without their imports: `start` stands for `subprocess.Popen`.

One process a session, `python -m tests.support.ready`, imports what programs need; each program is a fork of it that
takes the folder, the environment, the words and the streams that it was given, and ends as a program does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
COMMANDS = ("torch", "transformers", "mmdec.cli.jobs")
TRAINING = ("mmdec.training.__main__", "lightning.pytorch.cli")
LARGEST = 1 << 17  # bytes of a request


class Program:
    """A program that runs, as `subprocess.Popen` shows it."""

    def __init__(self, request: dict[str, Any], streams: Sequence[int]) -> None:
        self._told, there = socket.socketpair()
        with there:
            socket.send_fds(_parent(), [json.dumps(request).encode()], [*streams, there.fileno()])
        self.returncode: int | None = None
        self.pid = int(self._line())

    def _line(self) -> str:
        """The next number that is told of the program: its process, then how it ended."""
        found = b""
        while not found.endswith(b"\n"):
            more = self._told.recv(1)
            assert more, "the process that starts programs has died"
            found += more
        return found.decode()

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        """How it ended. Raises: `subprocess.TimeoutExpired` where it runs for longer."""
        if self.returncode is None:
            if not select.select([self._told], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired("program", seconds or 0.0)
            self.returncode = int(self._line())
            self._told.close()
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    words: Sequence[str],
    imports: Sequence[str] = COMMANDS,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    streams: Sequence[IO[bytes] | int] = (subprocess.DEVNULL,) * 3,
) -> Program:
    """Run `python -m WORDS`, or `python -c CODE ...`.

    imports: modules that are loaded before; they stay so for later programs. quiet: warnings are ignored, as by
        `-W ignore`.
    env: of the program, without what its imports read. streams: files of stdin, stdout and stderr.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    request = {"words": [*words], "imports": [*imports], "cwd": str(cwd), "env": surroundings, "quiet": quiet}
    with open(os.devnull, "r+b") as nothing:
        files = [nothing if stream == subprocess.DEVNULL else stream for stream in streams]
        return Program(request, [file if isinstance(file, int) else file.fileno() for file in files])


def said(code: str, imports: Sequence[str] = COMMANDS) -> str:
    """What `python -W ignore -c CODE` writes to stdout. Raises: what it writes to stderr, where it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ended = start(["-c", code], imports, quiet=True, streams=(subprocess.DEVNULL, out, err)).wait()
        for file in (out, err):
            file.seek(0)
        assert ended == 0, err.read().decode()
        return out.read().decode()


@cache
def _parent() -> socket.socket:
    """Where requests are sent. The process ends when this one does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-m", "tests.support.ready", str(there.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a program for each request, until there are no more. Returns in the program, what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for programs are waited for by nobody
    while True:
        content, files, _, _ = socket.recv_fds(requests, LARGEST, 4)
        if not content:
            os._exit(0)
        request = json.loads(content)
        for name in request["imports"]:
            importlib.import_module(name)
        gc.freeze()  # what is shared stays shared, and a program's end need not look through it
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if program == 0:
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                for file in files:
                    os.close(file)
                return request
            _wait_for(program, files)
        for file in files:
            os.close(file)


def _wait_for(program: int, files: Sequence[int]) -> None:
    """Tell the program's number, and how it ends."""
    for file in files[:3]:
        os.close(file)
    for number in (0, 1, 2):
        os.close(number)  # a reader waits for the program alone
    os.write(files[3], f"{program}\n".encode())
    _, status = os.waitpid(program, 0)
    os.write(files[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def main() -> None:
    """Command line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["quiet"]:
        warnings.simplefilter("ignore")
    sys.argv = request["words"]
    _end(_run())


def _run() -> int:
    """Run the program that `sys.argv` names. Returns: its exit status."""
    try:
        if sys.argv[0] == "-c":
            exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End as Python does, but for the destructors of libraries: a fork has not the threads that they would wait for,
    and some abort."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
