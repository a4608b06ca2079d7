"""Every method of private release that is no training run, with its words for report and card.

Place in the flow: below the plan of a query run, which names a method; the report looks its words up here. A new method
is a file beside this one and a line here.
"""

from __future__ import annotations

from dpllm.privacy.methods.aggregated import AGGREGATED
from dpllm.privacy.methods.evolution import EVOLUTION
from dpllm.privacy.methods.label_counts import LABEL_COUNTS
from dpllm.privacy.methods.method import Method as Method
from dpllm.privacy.methods.predicted_text import PREDICTED_TEXT
from dpllm.privacy.methods.synthetic_text import SYNTHETIC_TEXT
from dpllm.privacy.methods.teach import TEACH
from dpllm.privacy.methods.teach_tokens import TEACH_TOKENS

_METHODS: tuple[Method, ...] = (
    *(AGGREGATED, EVOLUTION, LABEL_COUNTS, PREDICTED_TEXT, SYNTHETIC_TEXT, TEACH, TEACH_TOKENS),
)

METHODS = {method.name: method for method in _METHODS}
