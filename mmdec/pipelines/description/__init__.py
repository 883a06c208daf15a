"""Questions about images, answered by a vision-language model: `mmdec.describe`, `mmdec.Chat`."""
