"""Reports to the caller's `progress` how much of the sound of a call is done."""

from __future__ import annotations

from typing import final

from mmdec.whisper.options import Progress


@final
class ProgressReport:
    """Adds up the seconds of all parts of the sound that are done, and passes the sum to the caller's `progress`.

    Args:
        progress: Called with the seconds done and in total, or None.
        total: Seconds of sound in the call.
    """

    def __init__(self, progress: Progress | None, total: float) -> None:
        self._progress, self._total = progress, total
        self._parts = list[PartProgress]()

    def part(self, seconds: float) -> PartProgress:
        """Add a part of the sound, which is decoded by itself, and lasts so many seconds."""
        self._parts.append(PartProgress(self, seconds))
        return self._parts[-1]

    def send(self) -> None:
        """Report the seconds done."""
        if self._progress is not None:
            self._progress(min(sum(part.done for part in self._parts), self._total), self._total)

    def end(self) -> None:
        """Report that all is done, silence included, which is no part."""
        if self._progress is not None:
            self._progress(self._total, self._total)


@final
class PartProgress:
    """The progress of one part.

    Args:
        report: The call's report.
        seconds: Duration of the part.
    """

    def __init__(self, report: ProgressReport, seconds: float) -> None:
        self._report, self._seconds, self.done = report, seconds, 0.0

    def reach(self, seconds: float) -> None:
        """Report that so many seconds are done. A window may begin after the end of the sound, in its padding."""
        self.done = min(seconds, self._seconds)
        self._report.send()

    def end(self) -> None:
        """Report that the part is done."""
        self.reach(self._seconds)
