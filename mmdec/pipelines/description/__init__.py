"""Questions about pictures, answered by a vision-language model that drafts: `mmdec.describe`, `mmdec.Chat`."""
