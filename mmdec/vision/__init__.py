"""Answers about pictures by vision-language models; `describe.py` is the call, `chat.py` the dialogue."""
