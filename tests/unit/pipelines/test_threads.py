"""torch's threads are those of the call within it, and those of before behind it."""

from __future__ import annotations

import pytest
import torch

from mmdec.pipelines.threads import with_threads
from mmdec.types import InputError


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with with_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="`threads` must be a whole number from 1"), with_threads(0):
        pass
