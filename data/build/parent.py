"""For worker processes of the builders, which need nothing of mmdec: they end when the builder does, even if killed."""

import os
import signal
import threading
import time


def end_with_parent(parent: int) -> None:
    """Called first of all by the process that `parent` started: it looks every second whether `parent` still runs."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
