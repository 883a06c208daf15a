"""An HTTP server with OpenAI's endpoints: `mmdec serve`. Only this folder imports FastAPI and uvicorn."""
