"""Filters for Lightning's warnings that tests of recipes cannot avoid. Use: `pytestmark = [*LIGHTNING, ...]`."""

import pytest

LIGHTNING = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Lightning's and jsonargparse's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.* exists and is not empty"),
]

FITTING = [  # for runs of a few steps that call the command line as a function
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # sys.argv has pytest's arguments
]
