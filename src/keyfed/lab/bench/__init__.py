"""Speed: one round by several systems."""
