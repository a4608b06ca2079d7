"""What is said about a run: statement, definition, pages, card, and their verification. Needs no torch."""
