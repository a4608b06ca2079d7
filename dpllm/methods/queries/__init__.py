"""Query runs: private releases that are no training runs, each with plan, ledger, report and card.

Place in the flow: beside training. `QueryRun` charges answers before they are computed; the methods of private
release are built on it.
"""

from dpllm.methods.queries.prior import prior_release as prior_release
from dpllm.methods.queries.randomness import Randomness as Randomness
from dpllm.methods.queries.run import QueryRun as QueryRun
