"""What proposes token trees: one file a drafter. A drafter never accepts, and never imports a target."""
