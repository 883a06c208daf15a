"""How many training rows' features can be computed in a given time. They are computed once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmdec.audio import load_audio
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.cvss import SpeechPair, read_pairs
from mmdec.training.daspeech.acoustic_data import EnglishSpeech
from mmdec.training.daspeech.acoustic_targets import acoustic_targets
from mmdec.training.daspeech.features import FeatureStore, extract
from mmdec.training.timed_run import Allowance
from mmdec.types import InputError

SAMPLE = 24  # recordings that are timed


def affordable_rows(data: dict[str, Any], time: Allowance, acoustic: bool) -> int | None:
    """Training rows whose features can be computed by `time`; None where those of all can, or are there.

    data: the options of `SpeechTranslationData`. acoustic: whether the English half is needed, too.
    """
    common_voice, cvss = Path(data["common_voice"]), Path(data["cvss"])
    admission = Admission(data.get("allow_absolute_paths", False))
    rows, _ = read_pairs(common_voice, cvss, "train", admission=admission)
    heard = FeatureStore.ready(cvss.parent / "cache" / "train", [row.clip for row in rows])
    spoken = not acoustic or EnglishSpeech.ready(cvss, "train", admission=admission)
    if heard and spoken:
        return None
    some = rows[:: max(1, len(rows) // SAMPLE)]
    each = 0.0
    extract(str(some[0].clip))  # the first call pays for what is set up once
    if not heard:
        each += time.spent_on(lambda: sum(len(extract(str(row.clip))) for row in some))[1] / data.get("jobs", 2)
    if not spoken:
        each += time.spent_on(lambda: sum(map(_spoken, some)))[1]
    most = int(max(time.left, 0.0) * len(some) / max(each, 1e-9))
    return None if most >= len(rows) else max(most, min(len(rows), 2 * SAMPLE))


def _spoken(row: SpeechPair) -> int:
    try:
        return len(acoustic_targets(load_audio(row.recording), row.alignment).mel)
    except InputError:  # counted, and named, where the features are made
        return 0
