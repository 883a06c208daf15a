"""Runs programs in separate processes without the time of their imports: `start` replaces `subprocess.Popen`.

One process for each test session, `python -m tests.support.warm_processes`, imports the modules that programs need.
Each program is a fork of it with its own folder, environment, arguments and streams, and ends as a Python program
does.
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
# modules to import for `mmdec` commands, and for training
COMMANDS = ("torch", "transformers", "mmdec.cli.outcomes", "mmdec.cli.progress")
TRAINING = ("mmdec.training.__main__", "lightning.pytorch.cli")
LARGEST = 1 << 17  # the most bytes of a request


class Program:
    """A running program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, request: dict[str, Any], streams: Sequence[int]) -> None:
        self._told, there = socket.socketpair()
        with there:
            socket.send_fds(_parent(), [json.dumps(request).encode()], [*streams, there.fileno()])
        self.returncode: int | None = None
        self.pid = int(self._line())

    def _line(self) -> str:
        """Read the next line about the program: first its process id, later its exit status."""
        result = b""
        while not result.endswith(b"\n"):
            more = self._told.recv(1)
            assert more, "the process that starts programs has died"
            result += more
        return result.decode()

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the exit status. Raises `subprocess.TimeoutExpired` if the program runs for longer."""
        if self.returncode is None:
            if not select.select([self._told], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired("program", seconds or 0.0)
            self.returncode = int(self._line())
            self._told.close()
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL if the program still runs."""
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

    imports: modules to import before the fork; they stay imported for later programs. quiet: ignore warnings, as
        `-W ignore` does.
    env: environment variables to add; modules that are imported already do not see them. streams: files for stdin,
        stdout and stderr.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    request = {"words": [*words], "imports": [*imports], "cwd": str(cwd), "env": surroundings, "quiet": quiet}
    with open(os.devnull, "r+b") as nothing:
        files = [nothing if stream == subprocess.DEVNULL else stream for stream in streams]
        return Program(request, [file if isinstance(file, int) else file.fileno() for file in files])


def python_output(code: str, imports: Sequence[str] = COMMANDS) -> str:
    """Return what `python -W ignore -c CODE` writes to stdout. Raises AssertionError with its stderr if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ended = start(["-c", code], imports, quiet=True, streams=(subprocess.DEVNULL, out, err)).wait()
        for file in (out, err):
            file.seek(0)
        assert ended == 0, err.read().decode()
        return out.read().decode()


@cache
def _parent() -> socket.socket:
    """Start the process that forks programs, once. Returns the socket for requests. The process ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-m", "tests.support.warm_processes", str(there.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a program for each request, until there are no more. Returns only in a program: its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children that wait for programs
    while True:
        content, files, _, _ = socket.recv_fds(requests, LARGEST, 4)
        if not content:
            os._exit(0)
        request = json.loads(content)
        for name in request["imports"]:
            importlib.import_module(name)
        gc.freeze()  # shared objects stay shared, and a program's garbage collector need not scan them
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
    """Write the program's process id, wait for it, and write its exit status. files: the fourth is written to."""
    for file in files[:3]:
        os.close(file)
    for number in (0, 1, 2):
        os.close(number)  # so that pipes close when the program ends
    os.write(files[3], f"{program}\n".encode())
    _, status = os.waitpid(program, 0)
    os.write(files[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def main() -> None:
    """Run the command line."""
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
    """Run the program that `sys.argv` names. Returns its exit status."""
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
    """End as Python does, but without the destructors of libraries: some wait for threads, which a fork does not have,
    and some abort."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have closed it
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
