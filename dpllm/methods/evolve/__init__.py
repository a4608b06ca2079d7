"""Synthetic text by votes of private records on texts of a public model (`dpllm methods evolve`)."""

from __future__ import annotations

from dpllm.registry import Method, ReleaseWords

EVOLUTION = ReleaseWords(
    name="private evolution",
    result="synthetic text",
    what="A public model wrote texts; in each step, private records voted for the nearest texts, and the texts with "
    "most noisy votes were kept and varied",
    mechanism="Private Evolution (Lin et al., arXiv:2305.15560; for text Xie et al., arXiv:2403.01749): each unit has "
    "one vote in a step, which its records share; every entry of the histogram of votes gets Gaussian noise, once; "
    "texts are kept by the rank of their noisy votes, and a public model varies them, which reads no record",
    released=("the texts of the last step, each with its label if there are labels",),
    adjacency="a unit without records has no vote, so the votes change by at most 1 in l2 norm; replacing a unit moves "
    "its vote, which changes them by at most √2",
    not_covered=(
        ("prompts and names of labels", "they are taken as public; never collect them from the private records"),
        (
            "figures of an evaluation on private text",
            "they are exact; `dpllm methods evaluate` keeps them in not_for_release/, and the report lists them",
        ),
    ),
    assumptions=(
        (
            "The models have not seen the private records",
            "they are declared public in the recipe; a model that a private run trained is refused",
        ),
        (
            "One unit has one vote in a step",
            "a unit with several records shares its vote among them; a record whose embedding is not finite votes too",
        ),
        (
            "The noise is fresh in each step",
            "it comes from the operating system, and is drawn after the step was charged",
        ),
    ),
    use="Each record has a `text`, and a `label` if there are labels. The texts were written by a public model: "
    "statements in them may be wrong. Nothing that is computed from these files costs more privacy.",
)


METHOD = Method(
    name="evolve",
    section="dpllm.methods.sections:EvolveConfig",
    words=(EVOLUTION,),
    query="dpllm.methods.evolve.evolution:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="Texts of a public model, chosen by noisy votes of private records.",
    examples=("dpllm methods evolve evolve_e2e privacy.epsilon=2",),
)
