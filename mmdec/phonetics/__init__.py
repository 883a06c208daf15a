"""From phones to readable English: lexicon, n-gram model, approximate matching, search."""
