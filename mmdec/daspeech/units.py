"""The special units with which every vocabulary of units begins."""

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # ids of <s>, <pad>, </s> and <unk>
NUM_SPECIAL_UNITS = 4
