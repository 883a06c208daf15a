"""The voice for any text: phones to log-mel frames, FastSpeech 2 by itself. The vocoder makes sound of the frames.

It knows neither spelling (`phonetics/spelling.py`) nor the graph whose states speak in DASpeech.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.fastspeech2 import FastSpeech2, FastSpeech2Config

PAD, EOS = 1, 2  # ids of the first special phones: <s>, <pad>, </s>, <unk>


class PhoneVoice(nn.Module):
    """Phones in, log-mel frames for `Vocoder` out. A row does not depend on the other rows of its batch.

    config: sizes. num_phones: names in `phones.json`, the four special ones first.
    """

    def __init__(self, config: FastSpeech2Config, num_phones: int) -> None:
        super().__init__()
        self.config = config
        self.tts = FastSpeech2(config, num_phones)  # as in the acoustic stage of training: its checkpoints fit

    def forward(self, phones: Tensor, lengths: Tensor, max_frames: int = 2048) -> tuple[Tensor, Tensor]:
        """Speak phones: without pauses at the ends, without <s> and </s>.

        phones: (B, N) ids; whatever stands beyond a row's length is not read.
        lengths: (B,) phones; 0 gives no frames.
        max_frames: rows are cut there (16 ms a frame).

        Returns: mel (B, F, 80), natural log, zeros beyond a row's frames; frames (B,).
        """
        places = torch.arange(phones.shape[1] + 1, device=phones.device)
        units = F.pad(phones, (0, 1)).masked_fill(places >= lengths[:, None], PAD)  # (B, N + 1)
        units = units.masked_fill(places == lengths[:, None], EOS)
        output = self.tts(self.tts.embed(units), lengths + 1, max_frames=max_frames)
        return output.mel, output.mel_lengths
