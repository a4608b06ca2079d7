"""Query runs: private releases that are no training runs, each with plan, ledger, report and card.

Place in the flow: beside training. `QueryRun` charges answers before they are computed; the methods of private
release are built on it.
"""

from dpllm.queries.prior import prior_release as prior_release
from dpllm.queries.randomness import Randomness as Randomness
from dpllm.queries.run import QueryRun as QueryRun
