"""Suffixes of the files that are taken from a folder. What a file holds is detected from its content."""

SOUND_SUFFIXES = (
    *(".wav", ".flac", ".ogg", ".oga", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64"),
    *(".m4a", ".m4b", ".mp4", ".mov", ".webm", ".mka", ".mkv"),
)
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
