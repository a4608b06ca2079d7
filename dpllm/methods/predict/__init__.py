"""Private prediction: text drawn token by token from a public model that reads private records, in secret groups."""
