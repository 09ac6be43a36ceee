"""Tool calls: read them from text, run them, wait for them. Knows no engine and needs no torch."""
