"""The accounting: the plan made beforehand, the ledger of what ran, and (ε, δ) from it. Needs no torch."""
