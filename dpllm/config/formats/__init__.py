"""The formats of records: a file for each with all that other folders ask about it, and `catalogue`."""
