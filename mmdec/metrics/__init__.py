"""How good a text is: error rates, BLEU, an independent recogniser. No model of mmdec's own."""
