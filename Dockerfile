# docker build -t mmdec . && docker run --rm -p 8000:8000 -e MMDEC_TOKEN=... mmdec
# The shipped models are inside. Others:
# docker run --rm -p 8000:8000 -e MMDEC_TOKEN=... -v /models:/models mmdec /models/whisper-base --host 0.0.0.0
FROM python:3.12-slim
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
WORKDIR /mmdec
COPY . .
RUN pip install --no-cache-dir '.[serve]' && useradd --create-home server
USER server
WORKDIR /home/server
EXPOSE 8000
ENTRYPOINT ["mmdec", "serve"]
CMD ["--host", "0.0.0.0"]
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
