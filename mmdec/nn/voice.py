"""The voice for any text: FastSpeech 2 makes log-mel frames from phones. The vocoder makes sound from the frames.

It does not depend on spelling (`phonetics/spelling.py`), nor on the graph, whose states DASpeech speaks from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.fastspeech2 import FastSpeech2, FastSpeech2Config

PAD, EOS = 1, 2  # ids of the first special phones: <s>, <pad>, </s>, <unk>


class PhoneVoice(nn.Module):
    """Phones in, log-mel frames for `Vocoder` out. A row does not depend on the other rows of its batch.

    config: sizes. num_phones: number of phones in `phones.json`, which begins with the four special ones.
    """

    def __init__(self, config: FastSpeech2Config, num_phones: int) -> None:
        super().__init__()
        self.config = config
        self.tts = FastSpeech2(config, num_phones)  # as in the acoustic stage of training: its checkpoints fit

    def forward(self, phones: Tensor, lengths: Tensor, max_frames: int = 2048) -> tuple[Tensor, Tensor]:
        """Speak phones.

        phones: (B, N) ids without <s>, </s> and pauses at the ends; values beyond a row's length are not read.
        lengths: (B,) number of phones; 0 gives no frames.
        max_frames: the most frames of a row, 16 ms each; longer rows are cut.

        Returns: mel (B, F, 80), natural log, zeros beyond a row's frames; frames (B,).
        """
        places = torch.arange(phones.shape[1] + 1, device=phones.device)
        units = F.pad(phones, (0, 1)).masked_fill(places >= lengths[:, None], PAD)  # (B, N + 1)
        units = units.masked_fill(places == lengths[:, None], EOS)
        output = self.tts(self.tts.embed(units), lengths + 1, max_frames=max_frames)
        return output.mel, output.mel_lengths
