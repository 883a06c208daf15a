"""An HTTP server with OpenAI's endpoints: `mmdec serve`. The only home of FastAPI and uvicorn."""
