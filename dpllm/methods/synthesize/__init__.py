"""Synthetic text: data sets from released models, and their evaluation."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

SYNTHETIC_TEXT = ReleaseWords(
    name="synthetic text",
    result="synthetic text",
    what="A privately tuned model wrote texts; the number of texts of each label is public, or follows noisy counts",
    mechanism="the model was trained under the guarantee of the run before this one, and sampling from it is "
    "post-processing, however many texts are drawn; filters read generated texts only; where labels were counted, each "
    "unit's rows are cut to a fixed number, and every count gets discrete Gaussian noise, once",
    released=("the texts, each with its prompt or label", "the noisy count of each label, where labels were counted"),
    adjacency="as in the training of the model; where labels were counted, a unit without records changes no count, "
    "and replacing a unit changes the counts √2 times as much as removing it",
    not_covered=(
        ("prompts and names of labels", "they are taken as public; never collect them from the private records"),
        (
            "the choice of texts by people who compare them with private records",
            "do not sort out texts by such a comparison; filters read generated texts only",
        ),
        (
            "figures of an evaluation on private text",
            "they are exact; `dpllm methods evaluate` keeps them in not_for_release/, and the report lists them",
        ),
    ),
    assumptions=(
        (
            "The texts come from the released weights only",
            "the files of the model were compared with its ledger before the first text, and no private record is read "
            "after the counts",
        ),
        (
            "The labels are public",
            "the classes are listed by people; a record of another class ends the run before anything is charged",
        ),
        (
            "The seed of the texts is no secret",
            "sampling may have a seed, which costs nothing; the noise of training and counts never has one",
        ),
    ),
    use="Each record has a `text`, and the `prompt` and `label` that it was written for. The texts are made up by a "
    "model: statements in them may be wrong, and a text that many people wrote alike can occur word for word. "
    "Nothing that is computed from these files costs more privacy. A seed of the sampling is no secret and costs "
    "nothing; the noise of the training and of the counts never has one.",
)


METHOD = Method(
    name="synthesize",
    words=(SYNTHETIC_TEXT,),
    commands=("dpllm.methods.synthesize.command:synthesize", "dpllm.methods.synthesize.command:evaluate"),
)
