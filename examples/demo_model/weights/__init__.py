"""The shipped demo model's files; data only."""
