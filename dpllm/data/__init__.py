"""From files to rows: records, their text, tokens, and the unit of each row. A row never loses its unit here."""
