"""Every class of transformers for the tasks of recipes is clipped exactly, or refused before a step."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

from dpllm.ghost import GhostError
from tests.tiers import deep_case

from . import measure as zoo
from .measure import MODES, NotBuilt, Outcome, Result, build, first_sentence, measure
from .table import SAMPLE_SIZE, document, stated
from .tasks import TASKS, rows_of
from .toy import toy_config

SAMPLE = {
    "causal_lm": (
        *("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "FalconForCausalLM"),
        *("MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"),
        *("Mamba2ForCausalLM", "FalconH1ForCausalLM", "Zamba2ForCausalLM", "DiffLlamaForCausalLM", "RwkvForCausalLM"),
        *("BartForCausalLM", "Phi4MultimodalForCausalLM"),
    ),
    "seq2seq_lm": ("T5ForConditionalGeneration", "BartForConditionalGeneration", "Qwen2AudioForConditionalGeneration"),
    "masked_lm": ("BertForMaskedLM", "ModernBertForMaskedLM", "FNetForMaskedLM"),
    "sequence_classification": (
        *("RobertaForSequenceClassification", "LlamaForSequenceClassification", "BartForSequenceClassification"),
    ),
    "token_classification": ("DistilBertForTokenClassification", "LayoutLMForTokenClassification"),
    "question_answering": ("BertForQuestionAnswering", "LlamaForQuestionAnswering", "XLNetForQuestionAnsweringSimple"),
}
CLASSES = [
    (task, name) if name in SAMPLE[task] else deep_case(task, name)
    for task, about in TASKS.items()
    for name in about.classes()
]
NOT_ONE_AT_A_TIME = ("GraniteSpeech", "Reformer")
"""Batch norms keep statistics of rows, and reversible layers call backward() themselves: both are refused by name."""
VERSION = ".".join(transformers.__version__.split(".")[:2])
MEASURED_WITH, STATED = stated()


@pytest.mark.parametrize(("task", "name"), CLASSES)
def test_a_class_is_exact_or_refused_and_as_the_table_says(task, name):
    """No class is silently wrong, and one row at a time is exact for everything that can be built."""
    for mode in MODES:
        outcome = measure(task, name, mode)
        kinds = {method: result.kind for method, result in outcome.results.items()}
        assert set(kinds.values()) <= {"exact", "refused"}, outcome
        assert kinds.get("per_unit", "exact") == "exact" or name.startswith(NOT_ONE_AT_A_TIME), outcome
        if MEASURED_WITH == VERSION:
            assert kinds.get("ghost", "not built") == STATED[task, name, mode], (
                f"{outcome}: docs/models.md says otherwise; python -m tests.zoo writes it again"
            )


def test_the_sample_has_the_size_that_the_table_states():
    """And only classes that transformers has."""
    assert sum(map(len, SAMPLE.values())) == SAMPLE_SIZE
    assert all(name in TASKS[task].classes() for task, names in SAMPLE.items() for name in names)


def test_the_table_lists_every_class():
    """A class that cannot be built is listed as well."""
    if MEASURED_WITH != VERSION:
        pytest.skip(f"the table was measured with transformers {MEASURED_WITH}")
    assert STATED.keys() == {(task, name, mode) for task in TASKS for name in TASKS[task].classes() for mode in MODES}
    assert "wrong" not in STATED.values() and "crash" not in STATED.values()


def test_a_wrong_gradient_is_wrong(monkeypatch):
    """The comparison fails if a method clips other gradients, or leaves one unit out."""

    def doubled(model, task, rows, pad, clip_norm):
        norms, factors, _ = zoo.ghost(model, task, rows, pad, clip_norm)
        parameter = next(p for p in model.parameters() if p.grad is not None)
        parameter.grad *= 1.001
        return norms, factors

    def without_a_row(model, task, rows, pad, clip_norm):
        norms, factors, _ = zoo.per_unit(model, task, rows[:-1], pad, clip_norm)
        return torch.cat([norms, norms[:1]]), torch.cat([factors, factors[:1]])

    monkeypatch.setattr(zoo, "METHODS", {"doubled": doubled, "without a row": without_a_row})
    results = measure("causal_lm", "LlamaForCausalLM", "full").results
    assert {method: result.kind for method, result in results.items()} == {"doubled": "wrong", "without a row": "wrong"}


def test_rows_that_read_padding_are_refused_by_a_run_and_exact_one_at_a_time():
    """FNet mixes all positions of the padded batch: the clipper computes the batch's gradient, and the run refuses."""
    results = measure("masked_lm", "FNetForMaskedLM", "full").results
    assert results["ghost"].kind == "refused" and "depends on other rows" in results["ghost"].reason
    assert results["ghost"].error > 0.1 and results["per_unit"].kind == "exact"


WITH_ROUTERS = (
    *("Afmoe", "Cohere2Moe", "Ernie4_5_Moe", "ExaoneMoe", "FlexOlmo", "Glm4Moe", "Mellum", "MiniMax", "MiniMaxM2"),
    *("Mixtral", "Olmoe", "Qwen3Moe", "Qwen3Next", "SolarOpen"),
)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize("kind", WITH_ROUTERS)
def test_lora_on_routers_is_exact(kind):
    """PEFT's "all-linear" includes the routers' weights in these classes."""
    model = build("causal_lm", f"{kind}ForCausalLM")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    assert any("gate." in name for name in config.target_parameters)
    with torch.no_grad():
        for parameter in zoo.trainable(adapted).values():
            parameter.data = parameter.double()
            parameter.add_(0.05 * torch.randn_like(parameter))
    rows = rows_of("causal_lm", adapted)
    rows_BP, unused = zoo.reference(adapted, "causal_lm", rows)
    assert not unused
    for method in zoo.METHODS:
        assert zoo._result(method, adapted, "causal_lm", rows, rows_BP).kind == "exact"


def test_a_method_that_raises_is_a_crash_unless_it_refuses(monkeypatch):
    """A refusal has the library's own error."""

    def refusing(*_):
        raise GhostError("model.layers.3.mlp cannot be clipped. Freeze it.")

    def crashing(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(zoo, "METHODS", {"refusing": refusing, "crashing": crashing})
    results = measure("causal_lm", "LlamaForCausalLM", "full").results
    assert results["refusing"] == Result("refused", "model.layers.N.mlp cannot be clipped")
    assert results["crashing"].kind == "crash"


def test_a_class_that_cannot_be_built_has_its_reason(monkeypatch):
    """It is listed, not left out."""
    monkeypatch.setattr(zoo, "LARGEST", 100)
    with pytest.raises(NotBuilt, match="toy size"):
        build("causal_lm", "LlamaForCausalLM")
    outcome = measure("causal_lm", "LlamaForCausalLM", "full")
    assert outcome.results == {} and "parameters at toy size" in outcome.not_built


def test_toy_configurations_keep_one_layer_of_each_kind():
    """A hybrid of which only one kind were left would be half tested."""
    config = toy_config(transformers.Qwen3NextConfig)
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) == 2
    nested = toy_config(transformers.Gemma3Config)
    assert nested.text_config.hidden_size == 32 and nested.vision_config.hidden_size == 32


def test_the_document_says_what_was_measured():
    """Counts, names and reasons; equal reasons are one line."""
    outcomes = [
        Outcome("causal_lm", name, mode, {"ghost": ghost, "per_unit": Result("exact")} if ghost else {}, reason)
        for name, ghost, reason in (
            ("A", Result("exact", rung="taps"), ""),
            ("B", Result("refused", "The loss of a row depends on other rows: alone it is 1"), ""),
            ("C", Result("refused", "The loss of a row depends on other rows: alone it is 2"), ""),
            ("D", None, "ImportError: timm"),
            ("E", Result("exact", rung="row by row"), ""),
        )
        for mode in MODES
    ]
    text = document(outcomes)
    assert "| Causal language models | full | 5 | 4 | 2 (50%) | 1 | 0 | 1 | 4 | 0 | 0 |" in text
    assert "**Full, exact by ghost:** A, E†\n" in text and "Row by row: E\n" in text
    assert "| B, C | refused | exact | the loss of a row depends on other rows |" in text
    assert "| D | not built |  |  |" in text


def test_messages_are_cut_after_their_first_sentence():
    """Without numbers of layers and of one measurement."""
    assert (
        first_sentence("base_model.model.h.3.mlp (X) couples rows: use y. Or z.") == "h.N.mlp (X) couples rows: use y"
    )
    assert first_sentence("alone it is 4.5 (dropout off; rounding)") == "alone it is 4.5"
