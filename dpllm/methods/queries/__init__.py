"""Query runs: private releases without training, each with plan, ledger, report and card."""
