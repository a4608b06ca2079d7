"""Query runs: private releases that are no training runs, each with plan, ledger, report and card.

Place in the flow: beside training. `QueryRun` charges answers before they are computed; the methods of private
release are built on it.
"""
