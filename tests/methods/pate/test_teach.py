"""PATE runs: labels, completions and students."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import LlamaForCausalLM
from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe
from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import label_probe
from dpllm.methods.pate import teach as teaching
from dpllm.methods.pate.prepare import prepare
from dpllm.methods.pate.teach import OneBase, Panel
from dpllm.methods.pate.votes import NO_LABEL, TOKENS, VOTE_CHANGE, Ballots
from dpllm.methods.queries.run import Randomness, begin_from
from dpllm.methods.sections import PateConfig
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from tests.conftest import tiny_llama_config
from tests.methods.pate.school import TEACHERS, write_recipe, write_token_recipe
from tests.mutations import kills
from tests.small_model import WORDS


def _quiet(*_):
    pass


class _Run:
    """A run that draws the division from a fixed seed, for two neighbours."""

    def __init__(self, folder):
        self.private_folder, self.randomness = folder, self

    def generator(self):
        return np.random.default_rng(5)


def _votes(folder, monkeypatch, records):
    """Return the votes of each teacher, (k, n), for these records, with one division and one seed for all trainings."""
    votes = []
    monkeypatch.setattr(teaching, "fresh_seed", lambda: 1)
    add = Ballots.add
    monkeypatch.setattr(Ballots, "add", lambda self, classes_N: (votes.append(classes_N), add(self, classes_N)))
    train = {"num_train_epochs": 20, "per_device_train_batch_size": 3, "learning_rate": 0.05}
    path = write_recipe(folder, records=records, pate={"train": train})
    prepared = prepare(load_query_recipe(path, (), "pate"))
    classroom = teaching.Classroom(prepared)
    with torch.no_grad():  # the new head is the same in both
        for parameter in classroom.base.model.score.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    classroom.base = teaching.OneBase(classroom.base.model)
    ballots = teaching.count_votes(classroom, classroom.private_rows(), _Run(folder), _quiet)
    monkeypatch.setattr(Ballots, "add", add)
    return np.array(votes), ballots.counts_NC


def test_another_unit_changes_the_votes_of_one_teacher(tmp_path, monkeypatch):
    """Two neighbours through the whole counting: the counts of a text move by at most √2."""
    records = [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man", "label": n % 2} for n in range(12)]
    other = [dict(record) for record in records]
    other[3] = {"text": "seven clouds", "label": 1 - other[3]["label"]}
    before, counts = _votes(tmp_path, monkeypatch, records)
    after, others = _votes(tmp_path, monkeypatch, other)
    assert before.shape == (TEACHERS, 6) and len(set(map(bytes, before))) > 1  # teachers differ, so the test can fail
    assert (before != after).any(axis=1).sum() == 1
    assert np.linalg.norm((counts - others).astype(float), axis=1).max() <= VOTE_CHANGE


@kills(
    "a teacher goes on where the one before ended",
    "dpllm/methods/pate/teach.py",
    "tensor.copy_(values[name])",
    "pass",
)
def test_a_teacher_starts_where_every_teacher_starts(school, tmp_path):
    """Whatever was trained before: otherwise later teachers would have seen earlier units."""
    classroom = teaching.Classroom(school(model={"adapter": {"r": 2, "target_modules": "all-linear"}}))
    model = classroom.base.begin()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    section = classroom.prepared.options.train
    trained = teaching.train_without_privacy(model, classroom.private_rows(), classroom.collator, section, tmp_path)
    assert any(not torch.equal(value, start[name]) for name, value in trained.state_dict().items())
    again = classroom.base.begin().state_dict()
    assert again.keys() == start.keys() and all(torch.equal(value, start[name]) for name, value in again.items())


def test_scores_that_are_not_finite_are_still_one_vote(school):
    """A teacher whose training failed names a class like any other."""
    classroom = teaching.Classroom(school())
    with torch.no_grad():
        classroom.base.model.score.weight.fill_(torch.nan)
    classes = teaching.classes_of(classroom.base.model, classroom.prompts(), classroom.collator)
    assert classes.dtype == np.int64 and set(classes) <= {0, 1}


@kills(
    "one label of all is charged",
    "dpllm/methods/pate/votes.py",
    "run.charge(vote.answers, vote.most_labels)",
    "run.charge(vote.answers)",
)
@pytest.mark.parametrize("confident", [False, True])
def test_labels_are_charged_before_they_are_drawn_with_the_planned_noise(school, monkeypatch, confident):
    """All texts, or all checks and the planned labels; noise of σ on every count, and of σ₁ on every check."""
    prepared = school(pate={"threshold": 0.0, "max_answers": 3, "check_noise": 5.0} if confident else {})
    drawn = []

    def gaussian(self, shape, stddev):
        drawn.append((shape, stddev, {name: run.left(name) for name in charges}))
        return np.random.default_rng(len(drawn)).normal(0, stddev, shape)

    monkeypatch.setattr(Randomness, "gaussian", gaussian)
    charges = [charge.name for charge in prepared.plan.charges]
    ballots = Ballots(6, 2)
    with begin_from(prepared.recipe, prepared.plan) as run:
        with pytest.raises(ValueError, match="4 teachers"):
            teaching.released_labels(prepared.vote, TEACHERS, run, ballots)
        for _ in range(TEACHERS):
            ballots.add(np.zeros(6, dtype=np.int64))
        labels = teaching.released_labels(prepared.vote, TEACHERS, run, ballots)
    nothing_left = dict.fromkeys(charges, 0)
    assert drawn == [((6, 2), 2 * 2**0.5, nothing_left), ((6,), 2 * 2**0.5 * (5 if confident else 3), nothing_left)]
    assert (labels != NO_LABEL).sum() == (3 if confident else 6)
    charged = read_ledger(Path(prepared.recipe.output_dir) / LEDGER_FILE).history
    assert epsilon(charged, 1e-3) == prepared.plan.epsilon


def test_a_run_releases_labels_and_a_student_and_verifies(school, tmp_path, capsys):
    """Nothing of the teachers is written or shown; the labels are JSON lines in the private records' columns."""
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text(json.dumps({"text": "the dog", "label": 1}) + "\n")
    prepared = school(
        data={
            "eval": {"path": str(held_out), "public": True},
        }
    )
    taught = teaching.teach(prepared, _quiet, _quiet)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    assert taught.num_texts == len(lines) == 6 and list(taught.figures.values()) in ([0.0], [1.0])
    assert [line["text"] for line in lines] == [row["text"] for row in prepared.prompts]
    assert {line["label"] for line in lines} <= {0, 1}
    assert (folder / "student" / "config.json").exists()
    kept = folder / "not_for_release"
    assert not kept.exists() or [path.name for path in kept.iterdir()] in ([], ["writer.json"])
    assert "loss" not in capsys.readouterr().out
    assert verify(folder).ok
    (folder / "labels.jsonl").write_text(json.dumps({"text": "the dog", "label": 1}) + "\n")
    assert not verify(folder).ok


def test_without_a_label_there_is_no_student(school, tmp_path, monkeypatch):
    """No text passed the check: the run is charged, and says so."""
    monkeypatch.setattr(teaching, "released_labels", lambda vote, num_teachers, run, ballots: np.full(6, NO_LABEL))
    taught = teaching.teach(school(pate={"threshold": 4.0, "max_answers": 2}), _quiet, _quiet)
    assert taught.num_texts == 0 and not taught.figures
    assert (tmp_path / "run" / "labels.jsonl").read_text() == "" and not (tmp_path / "run" / "student").exists()


def test_the_number_of_rows_of_a_teacher_is_not_logged(school, tmp_path, caplog):
    """Of users it is private, and no ε covers it: “Num examples”, with TRANSFORMERS_VERBOSITY=info."""
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_propagation()
    try:
        with caplog.at_level("INFO"):
            teaching.teach(school(pate={"student": False}), _quiet, _quiet)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.disable_propagation()
        logging.set_verbosity(before)
    assert "Num examples" not in caplog.text
    # Labels alone are a release; nothing of the teachers stays in the folder.
    assert not (tmp_path / "run" / "student").exists() and not list((tmp_path / "run").rglob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"train\.log_level"):
        school(pate={"train": {"log_level": "info"}})


@pytest.mark.parametrize("name", ["labels.jsonl", "student"])
def test_a_file_in_the_place_of_a_result_is_refused_before_a_teacher_is_trained(school, tmp_path, name):
    """A file named student: the run ended with exit code 0 and saved no student."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("my own")
    with pytest.raises(ValueError, match=f"{name} exists already, and it is not replaced"):
        teaching.teach(school(), _quiet, _quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


def test_held_out_private_records_are_counted_as_disclosures(school, tmp_path):
    """The student's accuracy on them is not covered."""
    taught = teaching.teach(school(data={"eval": 0.25}), _quiet, _quiet)
    assert list(taught.figures) == ["accuracy of the student on the held-out records"]
    assert "The ledger records no such result" not in (tmp_path / "run" / "privacy_report.md").read_text()


@pytest.mark.parametrize("confident", [False, True])
def test_the_audit_reads_the_vote_from_the_plan(school, confident):
    """A trial charges all that the plan charges, with its noise."""
    plan = school(pate={"threshold": 1.0, "max_answers": 3, "check_noise": 5.0} if confident else {}).plan
    found = run_trials(plan, label_probe(plan), 10)
    assert found.history == [(charge.event, charge.count) for charge in plan.charges]


PLACES, TEXTS = 5, 3


def _course(folder, monkeypatch, records):
    """Return the votes (places, k, texts), the counts and the completions of a run in float64.

    The division, the seeds and the noise are those of every call. The noise is so large that it decides alone: both
    neighbours then write the same texts, and their votes on the same texts can be compared.
    """
    votes, counts, draws = [], [], []
    with monkeypatch.context() as patch:
        patch.setattr(teaching, "fresh_seed", lambda: 1)
        patch.setattr(Randomness, "generator", lambda self: np.random.default_rng(5))

        def gaussian(self, shape, stddev):
            draws.append(stddev)
            return np.random.default_rng(len(draws)).normal(0, 1e9, shape)

        def add(self, classes_N):
            votes.append(classes_N)
            kept(self, classes_N)
            if self.num_voters == TEACHERS:
                counts.append(self.counts_NC.copy())

        kept = Ballots.add
        patch.setattr(Randomness, "gaussian", gaussian)
        patch.setattr(Ballots, "add", add)
        train = {"num_train_epochs": 10, "per_device_train_batch_size": 3, "learning_rate": 0.05}
        teach = {"train": train, "candidates": None}
        path = write_token_recipe(folder, records=records, pate=teach, model={"adapter": None})
        prepared = prepare(load_query_recipe(path, (), "pate"))
        torch.manual_seed(0)
        classroom = teaching.Classroom(prepared)
        classroom.base = teaching.OneBase(classroom.base.model.double())
        with begin_from(prepared.recipe, prepared.plan) as run:
            texts = teaching.completed_texts(classroom, classroom.private_rows(), run, _quiet, _quiet)
    return np.array(votes).reshape(PLACES, TEACHERS, TEXTS), np.array(counts), texts.to_list()


def test_another_unit_changes_the_votes_of_one_teacher_at_each_place(tmp_path, monkeypatch):
    """Two neighbours through training and writing: the counts of a place move by at most √2."""
    records = [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man {WORDS[n // 2]}"} for n in range(12)]
    other = [dict(record) for record in records]
    other[3] = {"text": "seven clouds under one old bridge"}
    folders = [tmp_path / "with", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    before, counts, texts = _course(folders[0], monkeypatch, records)
    after, others, same = _course(folders[1], monkeypatch, other)
    assert texts == same and len(set(map(bytes, before.swapaxes(0, 1)))) == TEACHERS
    changed_PK = (before != after).any(axis=2)
    assert changed_PK.any(axis=0).sum() == 1
    assert np.linalg.norm((counts - others).astype(float), axis=2).max() == pytest.approx(VOTE_CHANGE)


def test_a_run_releases_texts_and_a_student_and_verifies(writing_school, tmp_path, capsys):
    """Nothing of the teachers is written or shown; each text begins as its public text."""
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text(json.dumps({"text": "the old dog walks"}) + "\n")
    prepared = writing_school(
        data={
            "eval": {"path": str(held_out), "public": True},
        }
    )
    taught = teaching.teach(prepared, _quiet, _quiet)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert taught.num_texts == len(lines) <= TEXTS
    starts = [row["text"] for row in prepared.prompts]
    assert all(any(line["text"].startswith(start) for start in starts) for line in lines)
    assert [name.split(" on ")[0] for name in taught.figures] == [
        "perplexity of the public model",
        "perplexity of the student",
    ]
    assert (folder / "student" / "adapter_config.json").exists()
    kept = folder / "not_for_release"
    assert not kept.exists() or [path.name for path in kept.iterdir()] in ([], ["writer.json"])
    assert "loss" not in capsys.readouterr().out
    report = (folder / "privacy_report.md").read_text()
    assert "continued public texts token by token" in report and "charged all 15 planned" in report
    assert verify(folder).ok
    with open(folder / "texts.jsonl", "a") as file:
        file.write(json.dumps({"text": "the dog"}) + "\n")
    assert not verify(folder).ok


def test_completions_are_in_the_columns_of_the_records(writing_school, tmp_path):
    """Of records with prompt and completion, the public texts are prompts."""
    records = [{"prompt": f"{WORDS[n]}:", "completion": f" {WORDS[n % 5]} man"} for n in range(12)]
    prompts = [{"prompt": "seven dogs:"}, {"prompt": "red house:"}]
    prepared = writing_school(records=records, prompts=prompts, data={"format": "prompt_completion"})
    classroom = teaching.Classroom(prepared)
    new = classroom.tokenizer(" small dog", add_special_tokens=False)["input_ids"]
    completed = classroom.completed([new, []])
    assert completed.to_list() == [{"prompt": "seven dogs:", "completion": " small dog"}]
    row = [*classroom.encoded_prompts()[0], *new, classroom.tokenizer.eos_token_id]
    assert classroom.rows(completed)[0]["input_ids"] == row  # teachers read such rows, and write their begin


def test_a_text_without_room_is_refused_before_anything_is_charged(writing_school, tmp_path):
    """The student's row would be cut, or the model sees no more."""
    with pytest.raises(ConfigError, match="shorten"):
        teaching.teach(writing_school(pate={"max_new_tokens": 30}), _quiet, _quiet)
    assert not (tmp_path / "run").exists()


def test_texts_after_the_last_planned_token_are_not_written(writing_school, tmp_path):
    """One text side by side: the second is cut, and the third has no token."""
    prepared = writing_school(pate={"max_answers": 7, "rows_per_pass": 1, "student": False})
    taught = teaching.teach(prepared, _quiet, _quiet)
    assert prepared.plan.charge(TOKENS).count == 7 and 1 <= taught.num_texts <= TEXTS
    assert not (tmp_path / "run" / "student").exists()


VOCABULARY, BARRED = 44, (0, 7)
PROMPTS = [[1, 5, 9, 20], [1, 3], [2]]


def made(num_teachers, spread=0.5):
    """Return one float64 model with adapters, and teachers whose adapters are random."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config(vocab_size=48, initializer_range=0.3)).double()
    base = OneBase(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    teachers = [
        {name: tensor + spread * torch.randn_like(tensor) if "lora" in name else tensor for name, tensor in start}
        for start in (base.state().items() for _ in range(num_teachers))
    ]
    return base, teachers


def scores_of(base, state, rows, noise_RV):
    """Return the scores of texts one at a time, without a cache and without padding."""
    model = base.put(state)
    with torch.no_grad():
        logits_RV = torch.cat([model(torch.tensor([row])).logits[:, -1, :VOCABULARY] for row in rows])
    scores_RV = logits_RV + torch.from_numpy(noise_RV)
    scores_RV[:, list(BARRED)] = -torch.inf
    return scores_RV.numpy()


class ByTheFirstRow(LlamaForCausalLM):
    """Chooses its logits by the length of the first row that it sees, as Reformer its number of hash buckets."""

    first = None

    def forward(self, input_ids, **inputs):
        self.first = self.first or input_ids.shape[1]
        found = super().forward(input_ids, **inputs)
        found.logits = found.logits.roll(self.first, dims=-1)
        return found


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize("kind", [LlamaForCausalLM, ByTheFirstRow])
def test_no_row_of_a_teacher_changes_another_teacher_or_a_candidate(kind):
    """Dynamic rotary embeddings keep the longest row so far, and other models the first, beside their tensors."""
    rope = {"max_position_embeddings": 8, "rope_parameters": DYNAMIC} if kind is LlamaForCausalLM else {}
    row, long = torch.arange(12)[None], torch.arange(40)[None]

    def found(trained_before):
        torch.manual_seed(0)
        base = OneBase(kind(tiny_llama_config(vocab_size=48, initializer_range=0.3, **rope)))
        if trained_before:
            base.begin()(long)
        with torch.no_grad():
            scores = base.begin().eval()(row).logits
        if trained_before:
            base.begin()(long)
        panel = Panel(base, [], row[:, :8].tolist(), PateConfig(temperature=0), np.random.default_rng(0))
        return scores, torch.from_numpy(panel.candidates())

    for alone, after in zip(found(False), found(True), strict=True):
        assert torch.equal(alone, after)


@kills(
    "the candidates of a token are those of a teacher",
    "dpllm/methods/pate/teach.py",
    "self._scores(self._public, None)",
    "self._scores(self._public, self._teachers[0])",
)
@pytest.mark.parametrize("candidates", [6, None])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_teacher_votes_as_it_would_by_itself(candidates, temperature):
    """A loop over teachers, texts and places in float64: nothing of one teacher is left for the next."""
    base, teachers = made(3)
    options = PateConfig(candidates=candidates, temperature=temperature)
    panel = Panel(base, teachers, PROMPTS, options, np.random.default_rng(3), BARRED, VOCABULARY)
    rng, rows = np.random.default_rng(3), [list(row) for row in PROMPTS]
    for token in (4, 17, 30, 2):
        noise_RV = np.zeros((3, VOCABULARY))
        if temperature:
            noise_RV = rng.gumbel(scale=temperature, size=noise_RV.shape)
        found = panel.candidates()
        count = candidates or VOCABULARY - len(BARRED)
        expected = np.argsort(-scores_of(base, None, rows, noise_RV), axis=1)[:, :count]
        assert np.array_equal(found, expected) and not set(BARRED) & set(found.flatten())
        votes = []
        for teacher, state in enumerate(teachers):
            votes.append(panel.vote(teacher))
            own = np.take_along_axis(scores_of(base, state, rows, noise_RV), expected, axis=1)
            assert np.array_equal(votes[-1], own.argmax(axis=1))
        assert len(set(map(bytes, votes))) > 1  # teachers differ, so the test can fail
        panel.append(np.full(3, token))
        rows = [[*row, token] for row in rows]


def test_teachers_draw_from_their_own_distributions_and_agree_where_these_do():
    """Common random numbers: the frequencies are a teacher's own, and the public model's copy draws as it does."""
    base, (teacher,) = made(1)
    copy, prompts = base.state(), [[1, 5]] * 3000
    noise = np.zeros((1, VOCABULARY))
    options = PateConfig(candidates=None, temperature=1.0)
    panel = Panel(base, [copy, teacher], prompts, options, np.random.default_rng(1), BARRED, VOCABULARY)
    candidates = panel.candidates()
    assert not panel.vote(0).any()  # the first candidate is the public model's own choice
    votes = panel.vote(1)
    drawn = np.bincount(candidates[np.arange(len(votes)), votes], minlength=VOCABULARY)
    share = np.exp(scores_of(base, teacher, prompts[:1], noise)[0])
    expected = len(votes) * share / share.sum()
    kept = expected > 5
    tables = [np.append(counts[kept], counts[~kept].sum()) for counts in (drawn, expected)]
    assert kept.sum() > 5 and stats.chisquare(*tables).pvalue > 1e-4
    assert (votes == 0).mean() > 1.5 * np.square(share / share.sum()).sum()  # more often than independent draws


def test_scores_of_tokens_that_are_not_finite_are_still_one_vote():
    """A teacher whose training failed names a candidate like any other."""
    base, (teacher,) = made(1)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in teacher.items()}
    panel = Panel(base, [broken], PROMPTS, PateConfig(), np.random.default_rng(0))
    candidates = panel.candidates()
    assert panel.vote(0).tolist() == [0, 0, 0] and candidates.shape == (3, 16)
