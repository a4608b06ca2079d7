"""The comparison of a private with a plain fine-tuning, and the attacks on their folders."""

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from dpllm.audit.bounds import AuditError
from dpllm.audit.prepare import CanaryOptions, prepare
from dpllm.cli.program import app
from dpllm.config import ConfigError, ModelConfig, PublicPretrainConfig, load_recipe
from dpllm.data.rows import train_tokenizer
from dpllm.mechanism.events import dp_sgd
from dpllm.methods.attacks.attacks import AttackSettings, attack_folder, record_key
from dpllm.privacy.calibration import calibrate
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.report.disclosures import ATTACK
from dpllm.report.release_notes import keep_utility
from dpllm.report.verify import verify
from dpllm.training.arguments import training_arguments
from dpllm.training.workload import workload_of
from tests.conftest import tiny_llama_config

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = """
model: {{name: {model}}}
data: {{path: {data}, max_length: 24, eval: 0.5}}
privacy: {{noise_multiplier: 2, delta: 1.0e-3, clip_norm: 1, expected_batch_size: 20}}
train: {{output_dir: {output}, max_steps: 3, per_device_train_batch_size: 20, learning_rate: 1.0e-2,
         use_cpu: true, disable_tqdm: true}}
"""
SMALL = ["--records", "60", "--extract", "6", "--span", "5", "--prefix", "3", "--seed", "1"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture(scope="module")
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield importlib.import_module("compare")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A small untrained model, and records of random words, half of them held out."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    texts = [" ".join(f"{number:02d}" for number in rng.integers(0, 99, size=6)) for _ in range(120)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokenizer = train_tokenizer(texts, vocab_size=360, max_length=64)
    config = tiny_llama_config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = folder / "recipe.yaml"
    values = {"model": folder / "model", "data": folder / "data.jsonl", "output": folder / "out"}
    path.write_text(RECIPE.format(**values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def compared(compare, recipe):
    """Both trainings with canaries in the data, and all attacks on them."""
    prepared = prepare(load_recipe(recipe), recipe.parent / "audit", CanaryOptions(num=24, length=8))
    words = ["--config", str(prepared.recipe_path), "--canaries", str(prepared.folder / "canaries.json"), *SMALL]
    options = compare.parse([*words, "--epochs", "60"])
    compare.run(load_recipe(options.config), options)
    output = Path(load_recipe(options.config).train["output_dir"])
    return options, output, json.loads((output / "compare.json").read_text(encoding="utf-8"))


def test_the_plain_model_remembers_and_the_table_says_so(compared):
    """The same records, the same attacks; only one of the two has a bound, and it is not the one that leaks."""
    _, output, values = compared
    private, plain = (values["attacks"][name] for name in ("private", "plain"))
    assert private["num_members"] == plain["num_members"] == 60
    assert private["true_positive_rate_bounds"] == {} and plain["true_positive_rate_bounds"] is None  # 60 show no rate
    areas = {
        name: {a["attack"]: a["auroc"] for a in values["attacks"][name]["membership"]} for name in values["attacks"]
    }
    assert areas["plain"]["loss"]["value"] > 0.9 > 0.75 > areas["private"]["loss"]["value"]
    assert plain["member_perplexity"] < 0.5 * plain["held_out_perplexity"]
    assert (plain["reference"] is None) == (plain["reference_auroc"] is None)
    members, others = plain["extraction"]["prefixes"]
    assert members["num_records"] > 20 and members["continued"] > 0.8 * members["num_records"]
    assert others["num_records"] > 20 and others["continued"] <= 2
    canaries = values["canaries"]
    assert canaries["plain"]["epsilon_lower"] > canaries["private"]["epsilon_lower"]
    assert values["table"]["canaries: exposure, largest"].keys() == {"private", "plain"}
    assert values["table"]["guarantee"]["plain"] == "no guarantee"
    for name in ("compare.png", "private/attacks.json", "plain/attacks.json", "plain/recipe.yaml"):
        assert (output / name).stat().st_size > 0


def test_canaries_are_neither_members_nor_others(compared, recipe):
    """They have an audit of their own; among real records they would pass for memory of these."""
    _, output, _ = compared
    texts = {json.loads(line)["text"] for line in (recipe.parent / "data.jsonl").read_text().splitlines()}
    prepared = json.loads((recipe.parent / "audit" / "canaries.json").read_text(encoding="utf-8"))
    added = {text for canary in prepared["canaries"] if canary["included"] for _, text in canary["records"]}
    data = datasets.Dataset.from_parquet(load_recipe(output / "private" / "recipe.yaml").data.path, keep_in_memory=True)
    assert set(data["text"]) - texts == added and record_key([next(iter(added))])
    report = attack_folder(output / "plain", AttackSettings(num_records=1000, extraction=None))
    assert report.records.num == 60 == len(data) - len(added)


def test_what_is_finished_is_not_trained_again_and_another_run_is_not_taken_for_it(compare, compared, capsys):
    """Attacks can be repeated for nothing; a folder with another run is an error."""
    options, *_ = compared
    changed = compare.parse(["--config", options.config, "--epochs", "60", *SMALL, "--extract", "0"])
    compare.run(load_recipe(options.config), changed)
    assert capsys.readouterr().out.count("is already finished") == 2
    with pytest.raises(AuditError, match="plain holds"):
        compare.run(load_recipe(options.config), compare.parse(["--config", options.config, "--epochs", "3", *SMALL]))
    with pytest.raises(AuditError, match="private holds"):
        compare.run(load_recipe(options.config, ["train.max_steps=4"]), changed)


def test_the_plain_training_takes_as_many_steps_of_as_many_rows(compare, recipe, tmp_path):
    """Unless epochs are asked for; a learning rate of its own is possible."""
    made = load_recipe(recipe, ["train.per_device_train_batch_size=5"])
    same = compare.from_start(made, tmp_path, compare.parse(["--config", "x"])).train
    assert (same["max_steps"], same["gradient_accumulation_steps"], same["learning_rate"]) == (3, 4, 1e-2)
    asked = compare.parse(["--config", "x", "--epochs", "2.5", "--learning-rate", "5e-4"])
    train = compare.from_start(made, tmp_path, asked).train
    assert (train["max_steps"], train["num_train_epochs"], train["learning_rate"]) == (-1, 2.5, 5e-4)
    assert "gradient_accumulation_steps" not in train


def test_the_plain_training_has_the_rate_and_the_schedule_of_a_training_without_noise(compare, recipe, tmp_path):
    """Adam's rate grew by the ratio of the noise of a step; an average replaced a falling rate."""
    options = compare.parse(["--config", "x"])
    noisy = ["privacy.noise={kind: banded, bands: 2}", "train.average=ema"]
    made = load_recipe(recipe, noisy)
    args = training_arguments({**made.train, "report_to": "none"})
    plan = make_plan(made.privacy, 60, 3, workload=workload_of(args, 3, "ema"))
    variances = [plan.mechanism.noise.variance(step, 3) for step in range(3)]
    independent = calibrate(
        plan.epsilon, plan.delta, lambda sigma: dp_sgd(sampling_rate=1 / 3, noise_multiplier=sigma), 3
    )
    ratio = plan.noise_multiplier * math.sqrt(sum(variances) / 3) / independent
    train = compare.from_start(made, tmp_path, options).train
    assert train["learning_rate"] == pytest.approx(1e-2 / ratio, rel=0.02) and ratio > 1.2
    assert train["lr_scheduler_type"] == "linear" and "average" not in train
    sgd = load_recipe(recipe, [*noisy, "train.optim=sgd"])
    assert compare.from_start(sgd, tmp_path, options).train["learning_rate"] == 1e-2
    asked = compare.parse(["--config", "x", "--learning-rate", "5e-4"])
    assert compare.from_start(made, tmp_path, asked).train["learning_rate"] == 5e-4
    low_passed = load_recipe(recipe, [*noisy, "train.optim_args=second_moment=low_passed"])
    assert "optim_args" not in compare.from_start(low_passed, tmp_path, options).train


def test_the_plain_training_begins_where_the_private_steps_began(compare, recipe, tmp_path):
    """After the public training, whose model and tokenizer are in the private run's folder."""
    made = load_recipe(recipe)
    public = PublicPretrainConfig(data=made.data)
    model = ModelConfig(config={"model_type": "llama"}, tokenizer_vocab_size=300)
    made = dataclasses.replace(made, model=model, public_pretrain=public)
    plain = compare.from_start(made, tmp_path / "private" / "public_pretrain", compare.parse(["--config", "x"]))
    assert plain.public_pretrain is None and plain.model.config is None
    assert plain.model.name == str(tmp_path / "private" / "public_pretrain")
    assert plain.model.tokenizer == str(tmp_path / "private") and plain.model.tokenizer_vocab_size is None


def test_a_recipe_with_public_training_is_compared_from_where_that_ended(compare, recipe, tmp_path):
    """Model and tokenizer of the public training are the start of both, and the reference of the attacks."""
    text = tmp_path / "public.jsonl"
    text.write_text("".join(json.dumps({"text": f"A public sentence, number {n}."}) + "\n" for n in range(40)))
    public = [
        f"public_pretrain.data.path={text}",
        "public_pretrain.data.max_length=24",
        "public_pretrain.max_shared_records=1000",
        "public_pretrain.train.max_steps=2",
    ]
    public += ["public_pretrain.train.use_cpu=true", "public_pretrain.train.disable_tqdm=true"]
    made = ["model.name=null", "model.config.model_type=llama", "model.config.max_position_embeddings=64"]
    made += ["model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1"]
    made += ["model.config.num_attention_heads=2", "model.tokenizer_vocab_size=300", f"train.output_dir={tmp_path}"]
    compare.run(load_recipe(recipe, [*public, *made]), compare.parse(["--config", "x", *SMALL, "--extract", "0"]))
    values = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    start = str(tmp_path / "private" / "public_pretrain")
    assert [report["reference"] for report in values["attacks"].values()] == [start, start]
    assert load_recipe(tmp_path / "plain" / "recipe.yaml").model.name == start
    again = attack_folder(tmp_path / "private", AttackSettings(num_records=60, seed=1, extraction=None))
    assert again.to_dict()["membership"] == values["attacks"]["private"]["membership"]
    assert read_ledger(tmp_path / "private" / "privacy_ledger.jsonl").disclosures[ATTACK] == 2  # both are listed
    assert verify(tmp_path / "private").ok


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.eval=null"], "holds no records out"),
        (["train.resume_from_checkpoint=true"], "cannot be resumed"),
        (["model.task=seq2seq_lm"], "model.task=seq2seq_lm"),
        # Weights that are drawn twice differ before any training.
        (["model.name=null", "model.config.model_type=llama", "model.tokenizer=x"], "starts at random weights"),
    ],
)
def test_what_could_not_be_compared_is_refused_before_any_training(compare, recipe, overrides, message):
    """Minutes later it would be too late."""
    with pytest.raises(AuditError, match=message):
        compare.check(load_recipe(recipe, overrides), None)


def test_canaries_of_other_data_are_refused_before_any_training(compare, compared, recipe):
    """They are not in the records of this recipe."""
    options, *_ = compared
    compare.check(load_recipe(options.config), options.canaries)
    with pytest.raises(AuditError, match=r"data\.jsonl"):
        compare.check(load_recipe(recipe), options.canaries)


def test_the_table_has_the_metrics_that_the_recipe_asks_for(compare, recipe, tmp_path, monkeypatch):
    """Of both models, where both were measured: the private run writes its own, and the plain training the same."""
    pytest.importorskip("sacrebleu")
    pairs = [{"prompt": f"{n:02d} {n + 1:02d}", "completion": f" {n + 2:02d} {n + 3:02d}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    changes = [f"data.path={tmp_path / 'pairs.jsonl'}", "data.format=prompt_completion", "data.metrics=[bleu]"]
    made = load_recipe(recipe, [*changes, "train.max_steps=1", f"train.output_dir={tmp_path / 'plain'}"])
    compare.train_plainly(made)
    found = compare.held_out_figures(tmp_path / "plain")
    assert (
        set(found) == {"held-out perplexity after", "held-out BLEU after"} and float(found["held-out BLEU after"]) >= 0
    )
    keep_utility(
        tmp_path / "private", {"held-out BLEU after": "61.5", "held-out BLEU before": "1", "seconds in all": 3}
    )
    monkeypatch.setattr(compare, "column_of", lambda *given: {"guarantee": "none"})
    reports = {name: SimpleNamespace(folder=str(tmp_path / name)) for name in ("private", "plain")}
    assert compare.comparison_rows(reports, {}, {})[1:] == [
        ("guarantee", "none", "none"),
        ("held-out BLEU after", "61.5", found["held-out BLEU after"]),
    ]


def test_a_mistake_is_one_line_and_exit_code_two(compare, recipe, monkeypatch, capsys):
    """A newcomer's typo does not end in a traceback."""
    monkeypatch.setattr("sys.argv", ["compare.py", "--config", str(recipe), "data.eval=null"])
    with pytest.raises(SystemExit) as caught:
        compare.main()
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and printed.startswith("error: the recipe holds no records out")


def test_the_command_line_attacks_a_folder(compared):
    """`dpllm methods attack`: tables, JSON, files; LiRA on request."""
    _, output, _ = compared
    words = ["methods", "attack", str(output / "private"), *SMALL, "--new-tokens", "12"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for expected in ("membership inference: 60 members, 60 others; ε = ", "any attack, at most", "Min-K%++"):
        assert expected in result.stdout
    assert (output / "private" / "attacks.png").stat().st_size > 0
    words = ["methods", "attack", str(output / "plain"), *SMALL[:2], "--extract", "0", "--shadows", "2", "--json"]
    result = CliRunner().invoke(app, [*words, "--shadow-epochs", "1"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["membership"][-1]["attack"] == "LiRA" and values["epsilon"] is None and values["extraction"] is None
    assert json.loads((output / "plain" / "attacks.json").read_text(encoding="utf-8")) == values


def test_what_the_command_line_can_not_attack_is_one_line(compared, tmp_path):
    """Exit code 2, and the name of the missing part."""
    _, output, _ = compared
    for words, expected in (
        ([str(tmp_path)], "holds no recipe.yaml"),
        ([str(output / "private"), "--records", "0"], "num_records must be at least 1"),
        ([str(output / "private"), "--shadows", "1"], "1 shadow cannot provide both"),
    ):
        result = CliRunner().invoke(app, ["methods", "attack", *words])
        assert result.exit_code == 2 and expected in result.stderr and result.stderr.count("error: ") == 1


def test_lira_needs_a_model_to_start_from(compared, monkeypatch):
    """Where the training began at random weights, a public model has to be named."""
    _, output, _ = compared
    monkeypatch.setattr("dpllm.methods.attacks.attacks.starting_point", lambda released: None)
    report = attack_folder(output / "private", AttackSettings(num_records=30, extraction=None))
    assert report.reference is None and "reference ratio" not in [attack.name for attack in report.attacks]
    with pytest.raises(ConfigError, match="name a public"):
        attack_folder(output / "private", AttackSettings(num_records=30, shadows=2, extraction=None))
