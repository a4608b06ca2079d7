"""`dpllm count`: counts of public classes with noise.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from dpllm.methods.queries.command import command_of

register = command_of(
    "count",
    "Count the records of each public class with noise, from a recipe to counts with their privacy report.",
    "dpllm count label_counts privacy.target_epsilon=0.5",
)
