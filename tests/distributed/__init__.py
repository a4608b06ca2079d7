"""Everything that takes several processes, on gloo."""
