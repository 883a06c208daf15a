"""DFlash: a drafter that fills a block of masked tokens in one pass."""
