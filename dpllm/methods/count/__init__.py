"""Counts of public classes with noise (`dpllm methods count`)."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

LABEL_COUNTS = ReleaseWords(
    name="label counts",
    result="counts of labels",
    what="The records of each public class were counted, and noise was added to each count",
    mechanism="each unit's rows are cut to a fixed number; the rows of each class are counted, and every count gets "
    "discrete Gaussian noise, a rational number drawn exactly, once; negative counts are then set to 0 and all are "
    "rounded, which reads no record",
    released=("the noisy count of each class",),
    adjacency="a unit without records changes no count, so the change by one unit is bounded by its rows; replacing a "
    "unit moves its rows to other classes, which changes the counts √2 times as much",
    not_covered=(
        ("the names of the classes", "they are taken as public; never collect them from the private records"),
        ("the exact number of records, unless it is public", "it is not released; do not publish it with the counts"),
    ),
    assumptions=(
        (
            "The classes are public",
            "they are listed in the recipe; a record of another class ends the run before anything is charged, and the "
            "error has the number of the record and not its class",
        ),
        (
            "One unit changes few counts",
            "at most the planned number of rows of a unit are counted, whatever it holds; the bound is applied before "
            "the counting",
        ),
        (
            "The noise is exact and drawn once",
            "whole numbers with a discrete Gaussian distribution, from ChaCha20 with a key of the operating system; no "
            "floating-point number is part of it",
        ),
    ),
    use="`counts.json` holds the noisy number of records of each class. The numbers are rounded and never negative; "
    "their sum differs from the number of records.",
    has_model=False,
)


METHOD = Method(
    name="count",
    section="dpllm.methods.sections:CountConfig",
    words=(LABEL_COUNTS,),
    query="dpllm.methods.count.counting:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="Count the records of each public class, with noise.",
    examples=("dpllm methods count label_counts privacy.epsilon=0.5",),
)
