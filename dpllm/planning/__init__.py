"""Before a run: what it will cost in memory, and which settings give the least noise."""
