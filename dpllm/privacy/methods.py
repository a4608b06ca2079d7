"""Every method of private release that is no training run, with its words for report and card.

Place in the flow: below the plan of a query run, which names a method; the report looks its words up here. A new method
is a file beside this one and a line here.
"""

from __future__ import annotations

from dpllm.methods.aggregate.words import AGGREGATED
from dpllm.methods.count.words import LABEL_COUNTS
from dpllm.methods.evolve.words import EVOLUTION
from dpllm.methods.pate.label_words import TEACH
from dpllm.methods.pate.token_words import TEACH_TOKENS
from dpllm.methods.predict.words import PREDICTED_TEXT
from dpllm.methods.synthesize.words import SYNTHETIC_TEXT
from dpllm.privacy.release_words import Method as Method

_METHODS: tuple[Method, ...] = (
    *(AGGREGATED, EVOLUTION, LABEL_COUNTS, PREDICTED_TEXT, SYNTHETIC_TEXT, TEACH, TEACH_TOKENS),
)

METHODS = {method.name: method for method in _METHODS}
