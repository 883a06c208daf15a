"""Warnings of Lightning's that a test of a recipe cannot do anything about: `pytestmark = [*LIGHTNING, ...]`."""

import pytest

LIGHTNING = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Lightning's and jsonargparse's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.* exists and is not empty"),
]

FITTING = [  # of runs of a few steps, by the command line called as a function
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # pytest has arguments of its own
]
