"""From files to rows: records, their text, their tokens, and the unit of each row. A row never loses its unit."""
