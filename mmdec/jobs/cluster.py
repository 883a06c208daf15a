"""Processes a list of many inputs on many machines with Ray Data. The only file that imports Ray.

The rows of the list are divided into parts, as for a single process (`mmdec.jobs.many`). Each Ray actor loads the
model and processes whole parts. If an actor is killed, Ray starts it again and gives its part to another actor; a part
that is processed twice writes the same file twice. Actors receive paths, not audio or images. So all machines must have
the input files and the result folder under the same paths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, final

from mmdec import InputError
from mmdec.jobs.many import Part, PartWorker, Work

log = logging.getLogger(__name__)


@final
class Actor:
    """A Ray actor: loads the model once, and processes parts of the list."""

    def __init__(self, work: Work) -> None:
        self._worker = PartWorker(work)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Process some parts of the list.

        Args:
            batch: A column `number` with the index of each part, and a column `rows` with its rows.

        Returns:
            Columns `rows` and `failed`, with each part's number of rows and number of failed rows.
        """
        done = [self._worker.process(part) for part in zip(map(int, batch["number"]), batch["rows"], strict=True)]
        return {"rows": [rows for rows, _ in done], "failed": [failed for _, failed in done]}


def run_on_ray(work: Work, parts: Sequence[Part], workers: int | None = None) -> Iterator[tuple[int, int]]:
    """Process parts of a list on the Ray cluster that the environment variable RAY_ADDRESS names, else on this machine.

    Args:
        work: What to do with each row.
        parts: (index, rows) of each part.
        workers: Number of actors; each loads the model. None: one for each GPU, or without GPUs one for each CPU.

    Yields:
        For each part, the number of its rows and the number of rows that failed.

    Raises:
        InputError: If Ray is not installed, or a model or an option is wrong.
    """
    if not parts:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no usage reports
    try:
        ray: Any = import_module("ray")
        data: Any = import_module("ray.data")
    except ImportError as error:
        raise InputError("`engine` must be local without Ray, but is ray. Run `pip install 'mmdec[ray]'`.") from error
    began = not ray.is_initialized()
    if began:
        ray.init(logging_level=logging.ERROR, include_dashboard=False)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    gpus = int(ray.cluster_resources().get("GPU", 0)) if work.device != "cpu" else 0
    size = workers or gpus or int(ray.cluster_resources()["CPU"])
    log.info("%d actors, %d GPUs", size, gpus)
    try:
        dataset = data.from_items(
            [{"number": number, "rows": list(rows)} for number, rows in parts], override_num_blocks=len(parts)
        )
        done = dataset.map_batches(
            Actor,
            fn_constructor_args=(work,),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=size),
            num_cpus=work.options.get("threads") or 1,
            num_gpus=min(1.0, gpus / size) if gpus else 0,
        )
        for part in done.iter_rows():
            yield int(part["rows"]), int(part["failed"])
    except ray.exceptions.RayError as error:
        raise _cause(error) from error
    finally:
        if began:
            ray.shutdown()


def _cause(error: Exception) -> Exception:
    """Return the InputError that caused an error of Ray; if there is none, Ray's error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return error
