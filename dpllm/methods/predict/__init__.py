"""Private prediction: text drawn token by token from a public model that reads private records, in secret groups."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

PREDICTED_TEXT = ReleaseWords(
    name="predicted text",
    result="text by private prediction",
    what="Texts were drawn token by token from a public model that reads a group of private records for each text",
    mechanism="the units are split in secret into disjoint groups of a public size s; for each token, every unit of a "
    "group adds at most c to the logit of a token, or takes at most c off it; the sum, divided by s and by the "
    "temperature, gives the distribution of the token, which is drawn exactly (the exponential mechanism; Amin et al., "
    "arXiv:2407.12108; InvisibleInk, arXiv:2507.02974)",
    released=("the texts, with their public prompts",),
    adjacency="the contribution of a unit is left out while the size of its group, and the division into groups, stay; "
    "it moves an average of logits by c/s. Replacing a unit moves it by 2c/s, which costs more",
    not_covered=(
        (
            "prompts, template and settings",
            "they are taken as public; do not write them after reading the private records",
        ),
        (
            "the groups, and the logits of records",
            "neither is written to a file; do not publish what a person saw of them while the program ran",
        ),
        (
            "a choice among the texts by looking at private records",
            "filter the texts by public rules only, or release all of them",
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
            "disjoint before the first token; so a text costs only the units of its own group",
        ),
        (
            "A unit's contribution is bounded",
            "each row's logits are clipped and rounded to a grid of whole numbers within the bound; a unit of k rows "
            "adds their mean; sums of whole numbers are exact",
        ),
        (
            "All tokens that the texts may have are charged",
            "the largest number of tokens is charged before the first is drawn; how long the texts become is "
            "not counted",
        ),
        (
            "A token is drawn exactly, with secret randomness",
            "by whole numbers of the operating system from the weights' exact sum",
        ),
        (
            "A row of the model does not depend on other rows",
            "all rows have one public length, and the independence was measured with public tokens before the run; the "
            "rounding of a row in a batch is not proved",
        ),
    ),
    use="`texts.jsonl` holds one text a line, with its prompt. Reading, filtering by public rules, and "
    "training on the texts are post-processing.",
)


METHOD = Method(
    name="predict",
    section="dpllm.methods.sections:PredictConfig",
    events=("dpllm.methods.predict.token_draw:TokenDraw",),
    words=(PREDICTED_TEXT,),
    query="dpllm.methods.predict.run:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Texts of a public model that reads private records.

    Each text is made by a secret group of records, whose logits are clipped and averaged (private prediction,
    InvisibleInk). All tokens that the texts may have are charged before the first. `dpllm plan` prints the cost.
    """,
    examples=("dpllm methods predict predict_e2e predict.texts=100",),
)
