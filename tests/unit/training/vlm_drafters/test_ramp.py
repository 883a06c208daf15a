"""MSD's ramp: the published values, and its ends for any number of epochs."""

import pytest

from mmdec.training.vlm_drafters.data import Ramp
from mmdec.types import InputError


def test_the_papers_forty_epochs() -> None:
    ramp = Ramp(40)
    shares = [ramp.share(epoch) for epoch in range(40)]
    assert shares[:20] == [0.0] * 20
    assert shares[20:39] == pytest.approx([0.05 * step for step in range(1, 20)])
    assert shares[39] == 1.0
    assert ramp.share(50) == 1.0


@pytest.mark.parametrize("epochs", [1, 2, 3, 7, 12])
def test_any_number_of_epochs(epochs: int) -> None:
    shares = [Ramp(epochs).share(epoch) for epoch in range(epochs)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(share == 0.0 for share in shares[: epochs // 2 if epochs > 1 else 0])


def test_no_epochs_are_refused() -> None:
    with pytest.raises(InputError, match="`epochs` must be at least 1"):
        Ramp(0)
