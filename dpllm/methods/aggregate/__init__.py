"""Answers of a public model for groups of private records, combined with noise (`dpllm methods aggregate`)."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

AGGREGATED = ReleaseWords(
    name="answers of groups",
    result="answers to questions, combined from groups of records",
    what="A public model read the records of disjoint groups and answered public questions about each group; the "
    "groups' answers were combined with noise",
    mechanism="the units are in disjoint groups of a public size, drawn in secret; for each question the model reads "
    "the records of one group and gives one answer (sample and aggregate: Nissim, Raskhodnikova, Smith, STOC 2007; "
    "Wu et al., arXiv:2305.01639). Numbers are clipped to the public range, and their mean gets discrete Gaussian "
    "noise; listed answers are counted with noise; other answers are counted with noise, and released only if the "
    "noisy count reaches the threshold, whose failure is part of δ (stability-based histogram, arXiv:2412.10357)",
    released=("the answers to the questions, with the noisy numbers of groups that gave them",),
    adjacency="a unit is in at most one group. If the unit is removed or replaced, this group may give any other "
    "answer, and the number of groups stays. ε is the same under replace-one",
    not_covered=(
        (
            "questions, listed answers, ranges and template",
            "they are taken as public; do not write them after reading the private records",
        ),
        (
            "the groups, and what each of them answered",
            "neither is written to a file or shown",
        ),
        (
            "what the model makes of a group's records",
            "the answers are those of a model, which may be wrong; the noise is stated, and its errors are not",
        ),
    ),
    assumptions=(
        (
            "The model has not seen the private records",
            "it is loaded as it is and not trained; a folder with the ledger of a private run is refused, unless the "
            "recipe declares that it is independent",
        ),
        (
            "Each unit is in one group at most",
            "the groups are cut from one random order of the units, from the operating system, and are checked to be "
            "disjoint before the first question",
        ),
        (
            "A group has one answer of bounded influence",
            "a number is clipped to its range on a grid of whole numbers, a vote is for one answer, and a group "
            "without an answer adds nothing",
        ),
        (
            "All questions are charged",
            "before a record reaches the model, each of them, whatever the answers become",
        ),
        (
            "A group's answer does not depend on other groups",
            "all prompts have one public length, every pass has a public number of rows, and the independence of the "
            "model's rows was measured with public tokens before the run; the rounding of a row in a batch "
            "is not proved",
        ),
    ),
    use="`answers.json` holds the answer to each question by its name: a mean, or the noisy number of groups for each "
    "answer. A noisy count may be below 0. Rounding, and every other computation with the answers, is post-processing.",
)


METHOD = Method(
    name="aggregate",
    section="dpllm.methods.sections:AggregateConfig",
    events=("dpllm.methods.aggregate.combination:ThresholdedCounts",),
    words=(AGGREGATED,),
    query="dpllm.methods.aggregate.aggregate:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Noisy answers of a public model about groups of records.

    The answers are numbers in a public range, one of listed answers, or short answers that many groups give (sample and
    aggregate). Nothing is trained. `dpllm plan RECIPE` prints the cost.
    """,
    examples=("dpllm methods aggregate aggregate_e2e privacy.epsilon=1",),
)
