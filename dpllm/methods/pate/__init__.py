"""PATE: teachers on disjoint private units label public texts by a noisy vote, and a student learns the labels."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

_PRIVATE = (
    (
        "the teachers, their votes and the division of the units",
        "they are private, and none of them is written or shown",
    ),
    (
        "an ε computed from the votes",
        "it can be far smaller, but it depends on the private records, and none is printed",
    ),
)
_ONE_TEACHER = (
    "A unit has one teacher",
    "the division is drawn from the operating system's randomness and depends on the number of units only",
)
_PUBLIC = (
    (
        "The texts are public",
        "the recipe declares them; texts that hold private records are refused, up to the number declared",
    ),
    (
        "The starting model is public",
        "it is not examined; a folder of an earlier private run is refused",
    ),
)

PATE = ReleaseWords(
    name="public labels by PATE",
    result="labels of public texts, and a model trained on them",
    what="Models were trained on disjoint groups of units, and labelled public texts by a vote with noise. If a "
    "student model is released, it was trained on these texts with their labels",
    mechanism="the units are divided at random among the teachers, each unit to one; every teacher is trained in the "
    "ordinary way on its own units and names one class of each public text; the counts of the classes get Gaussian "
    "noise, and only the class with the largest noisy count is released (GNMax, Papernot et al., arXiv:1802.08908). "
    "With a threshold, a text gets a label only if its largest count, with noise of its own, reaches it; every such "
    "check is charged, and as many labels as were planned, however many were given",
    released=(
        "the labels of the public texts",
        "the student, if there is one, which was trained on these texts and labels only",
    ),
    adjacency="a unit belongs to one teacher. If the unit is removed or replaced, this teacher may "
    "name any other class: one vote goes from one class to another, which changes the counts by √2. ε is the same "
    "under replace-one",
    not_covered=(
        *_PRIVATE,
        ("the public texts", "they are published with their labels; never collect them from the private records"),
        (
            "what the student makes of a label",
            "labels are noisy, and the student may be wrong about single texts; measure it before use",
        ),
    ),
    assumptions=(
        _ONE_TEACHER,
        (
            "Teachers do not depend on each other",
            "each starts from the same public weights, with fresh random numbers, and learns from its own units only",
        ),
        (
            "A teacher has one vote for a text",
            "the class with its highest score is counted, and scores are never added up",
        ),
        *_PUBLIC,
    ),
    use="`labels.jsonl` holds the public texts with their labels, one JSON object a line. The folder `student`, if "
    "there is one, holds the model, for `AutoModelForSequenceClassification.from_pretrained` (with PEFT, if it is an "
    "adapter).",
    is_model=True,
)


PATE_TOKENS = ReleaseWords(
    name="public completions by PATE",
    result="completions of public texts, and a model trained on them",
    what="Models were trained on disjoint groups of units, and continued public texts token by token, by a vote with "
    "noise. If a student model is released, it was trained on these texts",
    mechanism="the units are divided at random among the teachers, each unit to one; every teacher is trained in the "
    "ordinary way on its own units. At each place of a text a public model names candidates, every teacher names one "
    "of them, the counts get Gaussian noise, and only the candidate with the largest noisy count is released (GNMax, "
    "Papernot et al., arXiv:1802.08908). Votes of the public model may be added; they depend on no record. With a "
    "threshold, the public model's token is taken where the largest count, with noise of its own, does not reach it. "
    "All tokens that the texts may have, and all checks, are charged before the first, wherever a text ends",
    released=(
        "the completions of the public texts",
        "the student, if there is one, which was trained on these texts only",
    ),
    adjacency="a unit belongs to one teacher. If the unit is removed or replaced, this teacher may "
    "name any other candidate at each place: one vote goes from one candidate to another, which changes the counts by "
    "√2. ε is the same under replace-one",
    not_covered=(
        *_PRIVATE,
        ("the public texts", "they are published with their completions; never collect them from the private records"),
        (
            "the truth of a text",
            "tokens are noisy, and many are those of the public model; read texts before use",
        ),
    ),
    assumptions=(
        _ONE_TEACHER,
        (
            "Teachers do not depend on each other",
            "each starts from the same public weights, with fresh random numbers, learns from its own units only, and "
            "reads a text in a forward pass of its own",
        ),
        (
            "A teacher has one vote for a token",
            "the candidate with its highest score is counted, and scores are never added up",
        ),
        (
            "Candidates are public",
            "they follow from the public model, from released tokens, and from random numbers that depend on no record",
        ),
        *_PUBLIC,
    ),
    use="`texts.jsonl` holds the completed texts, one JSON object a line. The folder `student`, if there is one, holds "
    "the model, for `AutoModelForCausalLM.from_pretrained` (with PEFT, if it is an adapter).",
    is_model=True,
)


METHOD = Method(
    name="pate",
    section="dpllm.methods.sections:PateConfig",
    holds_records_out=True,
    words=(PATE, PATE_TOKENS),
    query="dpllm.methods.pate.teach:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Public texts labelled by a noisy vote of teachers, for a student.

    The teachers are trained without privacy, one after the other, over one base model in memory. Their votes are
    private. Each label or token costs privacy, and the student none. `dpllm plan RECIPE` prints the cost.
    """,
    examples=("dpllm methods pate pate_sst2 privacy.epsilon=4",),
)
