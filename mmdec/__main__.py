"""`python -m mmdec` is the command line of `mmdec.cli`."""

from mmdec.cli import main

main()
