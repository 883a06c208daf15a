"""Warnings of Lightning's that a test of a recipe cannot do anything about: `pytestmark = [*LIGHTNING, ...]`."""

import pytest

LIGHTNING = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Lightning's and jsonargparse's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.* exists and is not empty"),
]
