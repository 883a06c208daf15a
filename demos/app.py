"""Starts the demo page: `python demos/app.py`, the same as `mmdec demo`. A Space names its own address and port."""

import os

from mmdec.demo.page import serve

if __name__ == "__main__":
    names = f"{os.environ.get('SPACE_HOST', '')},{os.environ.get('MMDEC_DEMO_HOSTS', '')}"
    serve(
        host=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"),
        port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")),
        names=[name.strip() for name in names.split(",") if name.strip()],
    )
