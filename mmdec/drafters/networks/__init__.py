"""Draft networks: what all of them share, and the drafter that grows trees with any of them."""
