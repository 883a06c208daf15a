"""For worker processes of the builders, which need nothing of mmdec: they end when the builder does, even if killed."""

import ctypes
import os
import signal
import sys
import threading
import time


def end_with_parent(parent: int) -> None:
    """Called first of all by the process that `parent` started. Linux ends it; elsewhere it looks every second."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
