"""The demo page: one file for each tab. Needs the extra `mmdec[demo]`."""
