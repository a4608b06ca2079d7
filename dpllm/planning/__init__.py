"""Planning before a run: its memory, and the settings with the least noise."""
