"""`python -m mmdec` is the command line of `mmdec.cli`."""

from mmdec.cli import run_script

run_script()
