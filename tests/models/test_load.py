"""Models and tokenizers as a recipe names them: nothing is dropped silently, nothing changes its function."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from dpllm.config import ConfigError, ModelConfig
from dpllm.data.rows import train_tokenizer
from dpllm.models.load import load_base_model, load_model, load_tokenizer, prepare_model, skeleton
from tests.tiers import SHARED, needs_shared_data

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LORA = {"r": 2, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the quick brown fox"] * 10, vocab_size=280, max_length=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> str:
    """A saved model with a tied head."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    load_base_model(ModelConfig(config={**TINY, "tie_word_embeddings": True}), tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def trainable(model) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


class TestFromConfig:
    def test_vocabulary_and_special_tokens_come_from_the_tokenizer(self, tokenizer):
        """A model made from a configuration fits its tokenizer."""
        model = load_model(ModelConfig(config=TINY), tokenizer)
        assert model.config.vocab_size == len(tokenizer)
        assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
        assert len(trainable(model)) == len(list(model.parameters()))

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_head_is_tied_as_the_recipe_says(self, tokenizer, tied):
        """Tying is a choice of the recipe, not of the library."""
        model = load_model(ModelConfig(config=TINY, tie_word_embeddings=tied), tokenizer)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    def test_names_of_other_families_are_known(self, tokenizer):
        """A family's own names and the common ones are both configuration keys."""
        for keys in (
            {"n_embd": 16, "n_layer": 1, "n_head": 2},
            {"hidden_size": 16, "num_hidden_layers": 1, "n_head": 2},
        ):
            model = load_model(ModelConfig(config={"model_type": "gpt2", "n_positions": 32, **keys}), tokenizer)
            assert model.config.n_embd == 16 and model.config.n_layer == 1

    def test_bfloat16_reaches_the_weights(self, tokenizer):
        """The data type of the recipe is that of the parameters."""
        model = load_model(ModelConfig(config=TINY, dtype="bfloat16"), tokenizer)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"config": {**TINY, "hidden_sise": 8}}, "'hidden_sise'; did you mean 'hidden_size'"),
            ({"config": {"model_type": "llamma"}}, "model_type 'llamma'"),
            ({"config": {**TINY, "num_attention_heads": 3}}, "hidden size .16. is not a multiple"),
            (
                {"config": {**TINY, "vocab_size": 100}},
                r"the tokenizer has \d+ tokens, but the model's embedding has only 100",
            ),
            ({"config": TINY, "dtype": "auto"}, "model.dtype='auto'"),
        ],
    )
    def test_a_configuration_that_cannot_be_right_is_refused(self, tokenizer, values, message):
        """A misspelt size must not silently become the default."""
        with pytest.raises(ConfigError, match=message):
            load_model(ModelConfig(**values), tokenizer)


class TestPretrained:
    def test_untying_copies_the_head_and_survives_saving(self, folder, tokenizer, tmp_path):
        """An untied model computes the same as the tied one, has one more parameter, and is saved untied."""
        tied = load_model(ModelConfig(name=folder), tokenizer)
        untied = load_model(ModelConfig(name=folder, tie_word_embeddings=False), tokenizer)
        assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
        ids = torch.tensor([[1, 5, 9]])
        torch.testing.assert_close(untied(ids).logits, tied(ids).logits)
        with torch.no_grad():
            untied.get_output_embeddings().weight.mul_(2)
        untied.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(ids).logits, untied(ids).logits)

    def test_tying_a_head_of_its_own_is_refused(self, folder, tokenizer, tmp_path):
        """Trained weights are not discarded."""
        load_model(ModelConfig(name=folder, tie_word_embeddings=False), tokenizer).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="discard"):
            load_model(ModelConfig(name=str(tmp_path), tie_word_embeddings=True), tokenizer)

    def test_untying_is_for_causal_models(self, tokenizer, tmp_path):
        """Where untying would change the function, it is refused."""
        config = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        model = load_model(ModelConfig(config=config, task="seq2seq_lm"), tokenizer)
        ids = torch.tensor([[3, 4, 2]])
        assert model(ids, labels=ids).logits.shape == (1, 3, len(tokenizer))
        model.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="is for causal_lm"):
            load_model(ModelConfig(name=str(tmp_path), task="seq2seq_lm", tie_word_embeddings=False), tokenizer)

    def test_a_name_that_cannot_be_loaded_says_so_in_one_line(self, tmp_path, tokenizer):
        """A missing model is one clear error with the remedy."""
        for load, remedy in (
            (load_tokenizer, r"model\.tokenizer"),
            (lambda m: load_model(m, tokenizer), "folder again"),
        ):
            with pytest.raises(ConfigError, match=remedy) as caught:
                load(ModelConfig(name=str(tmp_path)))
            assert "\n" not in str(caught.value)

    def test_a_classifier_has_the_classes_of_the_recipe_or_of_the_schema(self, folder, tokenizer):
        """The number of classes is declared, never counted in private labels."""
        known = ModelConfig(name=folder, task="sequence_classification", num_labels=3)
        assert load_model(known, tokenizer).config.num_labels == 3
        unknown = ModelConfig(name=folder, task="sequence_classification")
        model = load_model(unknown, tokenizer, num_labels=4)
        assert model.config.num_labels == 4 and model.config.pad_token_id == tokenizer.pad_token_id
        with pytest.raises(ConfigError, match=r"model\.num_labels"):
            load_model(unknown, tokenizer)

    @needs_shared_data
    @pytest.mark.parametrize(("folder_name", "parameters"), [("stories260K", 260_032), ("stories15M", 15_191_712)])
    def test_real_weights_are_loaded(self, folder_name, parameters):
        """Real checkpoints load with their own tokenizer, in the data type asked for."""
        config = ModelConfig(name=str(SHARED / folder_name))
        model = load_model(config, load_tokenizer(config))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        assert model.dtype == torch.float32


class TestPrepare:
    def test_lora_trains_its_factors_alone(self, folder, tokenizer):
        """The base does not change; the task type follows the recipe."""
        model = load_model(ModelConfig(name=folder, adapter=LORA), tokenizer)
        assert trainable(model) and all("lora_" in name for name in trainable(model))
        assert model.peft_config["default"].task_type == "CAUSAL_LM"

    def test_the_factors_of_a_bfloat16_model_are_float32(self, folder, tokenizer):
        """Adapters keep full precision on a base in half precision."""
        model = load_model(ModelConfig(name=folder, dtype="bfloat16", adapter=LORA), tokenizer)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}

    def test_frozen_patterns_are_not_trained(self, folder, tokenizer):
        """Patterns name parameters; everything else is trained."""
        model = load_model(ModelConfig(name=folder, freeze=["model.embed_tokens.*", "*norm*"]), tokenizer)
        assert trainable(model)
        assert not any("embed" in name or "norm" in name for name in trainable(model))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"adapter": {"rank": 2}}, "LoraConfig has no argument 'rank'"),
            (
                {"adapter": {"r": 2, "target_module": ["q_proj"]}},
                "no argument 'target_module'; did you mean 'target_modules'",
            ),
            (
                {"adapter": {"r": 2, "target_modules": ["query"]}},
                "target_modules names 'query'",
            ),
            ({"adapter": {"r": 0, "target_modules": "all-linear"}}, r"model\.adapter\.r must be at least 1, got 0"),
            ({"adapter": {**LORA, "init_lora_weights": "eva"}}, "starts from statistics of the private data"),
            ({"freeze": ["transformer.*"]}, "no parameter name matches 'transformer"),
            ({"freeze": ["*"]}, "no trainable parameter"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, folder, tokenizer, values, message):
        """A misspelt argument or pattern changes nothing silently."""
        with pytest.raises(ConfigError, match=message):
            load_model(ModelConfig(name=folder, **values), tokenizer)

    def test_base_and_adapters_can_be_made_apart(self, folder, tokenizer):
        """Public pretraining comes between the two."""
        config = ModelConfig(name=folder, adapter=LORA)
        base = load_base_model(config, tokenizer)
        assert len(trainable(base)) == len(list(base.parameters()))
        assert all("lora_" in name for name in trainable(prepare_model(base, config)))


class TestTokenizer:
    def test_one_is_trained_on_public_text(self):
        """The vocabulary comes from the public text, the longest row from the model."""
        config = ModelConfig(config=TINY, tokenizer_vocab_size=270)
        tokenizer = load_tokenizer(config, public_texts=["some public words"] * 9)
        assert len(tokenizer) == 270 and tokenizer.model_max_length == 64

    def test_a_missing_padding_token_becomes_the_end_token(self, folder, tmp_path):
        """Padding is never read, so any token is suitable."""
        tokenizer = load_tokenizer(ModelConfig(name=folder))
        tokenizer.pad_token = None
        tokenizer.save_pretrained(tmp_path)
        assert load_tokenizer(ModelConfig(name=folder, tokenizer=str(tmp_path))).pad_token == "</s>"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"config": TINY, "tokenizer_vocab_size": 270}, "the recipe has no public_pretrain section"),
            ({"config": TINY}, "has no tokenizer: .*model.tokenizer_vocab_size"),
        ],
    )
    def test_a_recipe_without_a_tokenizer_is_refused(self, values, message):
        """A tokenizer is never trained on private text, even if there is no other text."""
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(ModelConfig(**values))

    def test_a_model_without_a_length_is_refused(self):
        """The longest row must be known before a tokenizer is made."""
        with pytest.raises(ConfigError, match="needs max_position_embeddings"):
            load_tokenizer(ModelConfig(config={"model_type": "llama"}, tokenizer_vocab_size=270), public_texts=["x"])


def test_an_adapter_names_its_local_base_from_every_folder(folder, tokenizer, monkeypatch):
    """The card's code loads both in the adapter's folder, wherever the training was started."""
    monkeypatch.chdir(Path(folder).parent)
    model = load_model(ModelConfig(name=f"./{Path(folder).name}", adapter=LORA), tokenizer)
    assert model.peft_config["default"].base_model_name_or_path == str(Path(folder).resolve())


@pytest.mark.parametrize("peft", [None, {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}])
def test_a_recipe_is_checked_without_weights_under_zero3_too(peft):
    """transformers would spread the weights over the processes, and on the meta device there are none."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    llama = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    plain = skeleton(ModelConfig(config=llama, adapter=peft))
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert is_deepspeed_zero3_enabled() and zero3.is_zero3()
    made = skeleton(ModelConfig(config=llama, adapter=peft))
    shapes = [{name: (p.shape, p.dtype, p.device.type) for name, p in m.named_parameters()} for m in (made, plain)]
    assert shapes[0] == shapes[1] and {kind for _, _, kind in shapes[0].values()} == {"meta"}
