"""Starts the demo page: `python demos/app.py`, the same as `mmdec demo`."""

from mmdec.demo.page import serve

if __name__ == "__main__":
    serve()
