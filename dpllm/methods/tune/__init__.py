"""Private tuning: runs with settings drawn from a public list, of which only the best is released."""
