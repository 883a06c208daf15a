"""Loads pretrained language, vision-language and audio language models of transformers, and drafters for them.

Two modules serve the loaded models: `plain_text.py` keeps special tokens in a caller's text apart from those of the
prompt, and `image_familiarity.py` tells how far an image is from the training images.
"""

DEFAULT_VLM = "vlm-scenes"  # here, because the command line reads it without loading transformers
