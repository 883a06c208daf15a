"""`mmdec doctor`: why a drafter accepts less than published."""
