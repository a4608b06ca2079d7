"""The accounting: the plan made beforehand, the ledger of the steps that ran, and (ε, δ) from it. Needs no torch."""
