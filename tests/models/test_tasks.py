"""The task of a model, the loss per row that fits it, and the inputs of its decoder."""

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from dpllm.config import TASKS, ConfigError, ModelConfig
from dpllm.models.load import load_model
from dpllm.models.losses import classification_loss, multi_label_loss, regression_loss, span_loss
from dpllm.models.tasks import default_row_loss, task_of
from dpllm.training.row_losses import RowLosses

BERT = {
    **{"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"max_position_embeddings": 20, "pad_token_id": 0},
}
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])


def bert(kind, **more):
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**BERT, **more)).eval()


@pytest.mark.parametrize(
    ("kind", "more", "task"),
    [
        ("SequenceClassification", {}, "sequence_classification"),
        ("SequenceClassification", {"num_labels": 3}, "sequence_classification"),
        ("SequenceClassification", {"num_labels": 1}, "regression"),
        ("SequenceClassification", {"num_labels": 2, "problem_type": "regression"}, "regression"),
        (
            "SequenceClassification",
            {"problem_type": "single_label_classification"},
            "sequence_classification",
        ),
        (
            "SequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            "multi_label_classification",
        ),
        ("TokenClassification", {}, "token_classification"),
        ("QuestionAnswering", {}, "question_answering"),
        ("MaskedLM", {}, None),
    ],
)
def test_the_class_and_its_problem_give_the_task(kind, more, task):
    """As in transformers, where one class with a head serves three problems."""
    assert task_of(bert(kind, **more)) == task
    adapted = get_peft_model(bert(kind, **more), LoraConfig(r=2, target_modules=["query"]))
    assert task_of(adapted) == task


def test_the_default_loss_is_that_of_the_task():
    """A head for sequences has three losses."""
    for more, loss, labels in (
        ({"num_labels": 3}, classification_loss, torch.tensor([2, 0])),
        ({"num_labels": 1}, regression_loss, torch.tensor([[0.5], [1.0]])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, multi_label_loss, torch.ones(2, 3)),
    ):
        model = bert("SequenceClassification", **more)
        outputs = model(IDS, attention_mask=(IDS > 0).long())
        torch.testing.assert_close(default_row_loss(model)(outputs, labels), loss(outputs.logits, labels))


@pytest.mark.parametrize("kind", ["TokenClassification", "QuestionAnswering"])
def test_the_tokens_of_a_prompt_have_no_labels(kind):
    """They come first in the logits."""
    model = bert(kind)
    adapted = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=3, task_type="TOKEN_CLS"))
    labels = torch.tensor([[0, 1, 1, 0], [1, 0, -100, -100]])
    outputs = adapted(IDS, attention_mask=(IDS > 0).long())
    if kind == "QuestionAnswering":
        expected = span_loss(outputs.start_logits[:, 3:], outputs.end_logits[:, 3:], labels)
    else:
        expected = torch.stack(
            [
                torch.nn.functional.cross_entropy(logits, own)
                for logits, own in zip(outputs.logits[:, 3:], labels, strict=True)
            ]
        )
    torch.testing.assert_close(default_row_loss(adapted)(outputs, labels), expected)


def test_a_class_without_a_task_has_no_default_loss():
    """It needs one of its own."""
    with pytest.raises(ConfigError, match="BertForMaskedLM"):
        default_row_loss(bert("MaskedLM"))


def test_the_labels_of_a_classifier_are_not_the_input_of_its_decoder():
    """A classifier above an encoder-decoder reads the text with both."""
    config = transformers.T5Config(
        **{"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        **{"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    )
    torch.manual_seed(0)
    model = transformers.T5ForQuestionAnswering(config)
    read = []
    model.decoder.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
    ids = torch.tensor([[5, 6, 7, 1]])
    RowLosses(default_row_loss(model), packed=False)(model, {"input_ids": ids, "labels": torch.tensor([[0, 1, 2, 0]])})
    assert read[0].tolist() == [[0, 5, 6, 7]]
    writer = transformers.T5ForConditionalGeneration(config)
    writer.decoder.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
    RowLosses(default_row_loss(writer), packed=False)(writer, {"input_ids": ids, "labels": torch.tensor([[8, 9, 1]])})
    assert read[1].tolist() == [[0, 8, 9]]


@pytest.mark.parametrize("task", [name for name, about in TASKS.items() if about.labels != "text"])
def test_a_recipe_builds_the_head_of_its_task(task):
    """Its size, its problem, and LoRA on all layers but the head, which is trained."""

    class Tokenizer:
        pad_token_id, eos_token_id, bos_token_id = 0, 2, 1

        def __len__(self):
            return 50

    config = {"model_type": "bert", **{key: value for key, value in BERT.items() if key != "pad_token_id"}}
    asked = None if task in ("regression", "question_answering") else 3
    section = ModelConfig(config=config, task=task, num_labels=asked, adapter={"r": 2, "target_modules": "all-linear"})
    model = load_model(section, Tokenizer())
    assert task_of(model) == task and model.config.num_labels == {"regression": 1, "question_answering": 2}.get(task, 3)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = "qa_outputs" if task == "question_answering" else "classifier"
    assert any(f"{head}.modules_to_save" in name for name in trained)
    assert not any(f"{head}.lora" in name for name in trained) and any("lora_A" in name for name in trained)
