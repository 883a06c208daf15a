"""Whisper's input: the log-mel features of a recording."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import WhisperFeatureExtractor

FRAME_BLOCK = 64  # the number of mel frames that are computed is a multiple of this number, so that few shapes occur


def recording_features(extractor: WhisperFeatureExtractor, samples: Tensor, rate: int, long: bool) -> dict[str, Tensor]:
    """Compute the same features of a recording as transformers' extractor, bit for bit.

    Short recordings take a fifth of the extractor's time: the frames of the silence that fills a window are all alike,
    so they are not computed, but copied from the last computed frame.

    Args:
        extractor: The model's feature extractor.
        samples: (T,) of the recording.
        rate: Samples per second.
        long: Keep the whole recording, instead of one window.

    Returns:
        `input_features` (1, mels, F) and `attention_mask` (1, F).
    """
    call = partial(extractor, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
    if long:
        return dict(call(samples.numpy(), padding="longest", truncation=False))
    hop, window = extractor.hop_length, extractor.nb_max_frames
    # Number of frames to compute. The last of them contains only silence, as do all later frames of the window.
    computed = -(-(len(samples) + extractor.n_fft) // (hop * FRAME_BLOCK)) * FRAME_BLOCK
    if computed >= window or extractor.dither or type(extractor) is not WhisperFeatureExtractor:
        return dict(call(samples.numpy()))
    sound = pad(samples, (0, computed * hop - len(samples)))
    extracted = call(sound.numpy(), padding="longest", truncation=False)
    features, mask = extracted["input_features"], extracted["attention_mask"]
    silence = features[..., -1:].expand(*features.shape[:-1], window - computed)
    real = torch.arange(window)[None] * hop < len(samples)
    return {"input_features": torch.cat([features, silence], -1), "attention_mask": real.to(mask.dtype)}
