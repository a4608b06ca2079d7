"""`dpllm init` shows the columns, asks or takes keys, and writes a recipe that loads, plans and trains."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import load_recipe
from tests.cli.test_cli import run
from tests.small_model import WORDS, save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


@pytest.fixture(autouse=True)
def _in_a_folder_with_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 notes of 120 patients."""
    monkeypatch.chdir(tmp_path)
    records = [
        {"note_id": n, "patient_id": f"p{n % 120}", "note": " ".join(WORDS[: 3 + n % 9]) + f" {n}", "answer": "yes"}
        for n in range(240)
    ]
    Path("notes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody can answer."""
    monkeypatch.setattr("dpllm.cli.init.at_terminal", lambda: True)


def asked(answers: list[str], *arguments: str) -> str:
    """Return the screen of a command whose questions get these answers."""
    result = CliRunner().invoke(app, ["init", *arguments], input="".join(f"{answer}\n" for answer in answers))
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str, answers: str = "") -> str:
    """Return the one line of the error stream."""
    result = CliRunner().invoke(app, ["init", *arguments], input=answers)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and not Path("recipe.yaml").exists()
    return line


def test_without_questions_the_proposals_are_taken(model):
    """The column of people is found by its name, so that they are protected; the screen names all dependences."""
    shown = asked([], "notes.jsonl", f"model={model}", "--yes")
    recipe = load_recipe("recipe.yaml")
    assert (recipe.privacy.protects, recipe.privacy.unit) == ("user", "patient_id")
    assert (recipe.data.format, recipe.data.form.text, recipe.privacy.epsilon) == ("text", "note", 8)
    assert recipe.train["output_dir"] == "runs/recipe" and recipe.model.name == str(model)
    words = " ".join(shown.split())
    assert 'note_id "0" all different not used' in words and 'patient_id "p0" 120 different → unit' in words
    assert "→ text" in words and "not used" in words.split('answer "yes"')[1][:30]
    assert "all records with the same patient_id are protected together (data.columns.unit=null" in words
    assert "no setting depends on it" in words and "public by the definition of the guarantee" in words
    assert "114 are trained on" in words and "ε = 7.99" in words
    assert "120 users, by patient_id" in words and "records of a user: half have at most 2" in words
    lines = [line.strip() for line in shown.rstrip().splitlines()]
    assert lines[-2].startswith("dpllm plan recipe.yaml") and "dpllm train recipe.yaml" in lines[-1]
    command = shlex.split(lines[-2], comments=True)
    assert "114" in run(command[1:])  # it runs as it is printed
    assert not Path("runs").exists()


def test_keys_of_reading_are_given_as_in_a_recipe(model):
    """So that the remedy of an error can be added to the same command."""
    records = [{"text": " ".join(WORDS[:9]), "label": ["no", "yes", ""][n % 3]} for n in range(300)]
    Path("reviews.json").write_text(json.dumps({"version": 1, "data": records}))
    line = ("reviews.json", "data.class_names=[no, yes]", f"model={model}", "--yes")
    assert "data.field=data" in refused(*line)
    asked([], *line, "data.field=data", "data.missing=drop")
    data = load_recipe("recipe.yaml").data
    assert (data.field, data.missing, data.format) == ("data", "drop", "classification")
    Path("recipe.yaml").unlink()
    assert "privacy.delta: init takes data." in refused("reviews.json", "privacy.delta=1e-6", "--yes")


@pytest.mark.parametrize("repeated", ["note", "patient_id"])
def test_a_name_that_two_columns_have_is_an_error(repeated):
    """Nobody is protected less because the column of the ids was dropped."""
    names = ["note", "patient_id", repeated]
    rows = [",".join([" ".join(WORDS[:5]), f"p{n % 30}", f"q{n % 7}"]) for n in range(120)]
    Path("twice.csv").write_text("\n".join([",".join(names), *rows]))
    assert f"two columns are named '{repeated}'" in refused("twice.csv", "model=m", "--yes")
    assert f"'{repeated}'" in refused("twice.csv", "model=m", f"data.columns.text={repeated}", "data.columns.unit=null")
    assert "is also the column" in refused("notes.jsonl", "model=m", "data.columns.text=note", "data.columns.unit=note")


def test_a_folder_without_a_split_train_is_trained_on(model):
    """By the split that the recipe names, in each part of the run that looks at the files."""
    for name in ("dev", "test"):
        Path("parts").mkdir(exist_ok=True)
        lines = Path("notes.jsonl").read_text().splitlines(keepends=True)
        Path(f"parts/{name}.jsonl").write_text("".join(lines[name == "test" :]))
    asked([], "parts", "data.split=dev", "data.columns.text=note", f"model={model}", "data.eval=null", "--yes")
    run(["train", "recipe.yaml", "train.max_steps=1", "train.use_cpu=true"])
    assert Path("runs/recipe/privacy_report.md").exists()


def test_the_screen_says_what_is_read(model):
    """Once each; records that are given twice are refused."""
    shown = asked([], "data.path=notes.jsonl", f"model={model}", "--yes")
    assert load_recipe("recipe.yaml").data.path == "notes.jsonl"
    lines = shown.splitlines()
    names = ["reading the first records of notes.jsonl", "looking at the model", "reading all records of notes.jsonl"]
    assert [sum(line.startswith(name) for line in lines) for name in names] == [1, 1, 1]
    Path("recipe.yaml").unlink()
    assert "given twice, a.jsonl and data.path=notes.jsonl" in refused("a.jsonl", "data.path=notes.jsonl", "--yes")


def test_questions_have_proposals_and_are_asked_again(model, terminal):
    """A wrong answer gets the error and the question once more; Enter takes the proposal."""
    answers = [
        "",
        "nowhere.jsonl",
        "notes.jsonl",
        "poem",
        "",
        "nota",
        "note",
        "record",
        "",
        "./nomodel",
        str(model),
        "-1",
        "3",
        "a.txt",
        "x.yaml",
    ]
    shown = asked(answers)
    assert "got 'poem'" in shown and "no column 'nota'; did you mean 'note'? It has note_id" in shown
    assert "nowhere.jsonl: no such file" in shown and shown.count("give a name") == 2
    assert (
        "there is no such folder" in shown
        and "must be greater than 0" in shown
        and "a recipe's name ends in .yaml" in shown
    )
    assert "[patient_id]" in shown and "[note]" in shown and "[8.0]" in shown
    recipe = load_recipe("x.yaml")
    assert recipe.privacy.protects == "sequence" and recipe.privacy.epsilon == 3
    assert recipe.train["output_dir"] == "runs/x"


def test_columns_that_are_given_decide_the_format(model):
    """A prompt and a completion; each record by itself."""
    given = ["notes.jsonl", f"model={model}", "data.columns.prompt=note", "data.columns.unit=null", "--yes"]
    Path("runs/q").mkdir(parents=True)  # of an earlier run, which the new one does not touch
    shown = asked([], *given, "data.columns.completion=answer", "--output", "new/folder/q.yaml", "data.max_length=32")
    recipe = load_recipe("new/folder/q.yaml")
    assert (recipe.data.format, recipe.data.form.completion) == ("prompt_completion", "answer")
    assert recipe.privacy.protects == "sequence" and recipe.data.max_length == 32
    assert recipe.train["output_dir"] == "runs/q-2"
    assert "240 records" in shown and [path.name for path in Path("new/folder").iterdir()] == ["q.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--yes"], "RECORDS is missing"),
        (["absent.jsonl", "--yes"], "absent.jsonl: no such file or folder"),
        (["notes.jsonl", "data.format=poem", "--yes"], "data.format must be one of"),
        (["ids.csv", "--yes"], "data.columns.text=befund"),
        (["pairs.jsonl", "--yes"], "data.format=preference"),
        (["notes.jsonl", "data.columns.label=answer", "--yes"], "the classes are missing"),
        (["notes.jsonl", "data.columns.label=answer", "data.class_names=[a]", "--yes"], "two or more different names"),
        (["notes.jsonl", "data.columns.unit=null", "privacy.max_rows_per_unit=3"], "belongs to people"),
        (["notes.jsonl", "data.max_length=1"], "data.max_length must be at least 2"),
        (["notes.jsonl", "data.maxlength=9"], "did you mean 'data.max_length'"),
        (["notes.jsonl", "data.eval=held_out.jsonl"], "takes a share"),
        (["notes.jsonl", "model.adapter={r: 4, bias: all}"], "model.adapter.bias"),
        (["notes.jsonl"], "model is missing"),
        (["absent.jsonl", "privacy.epsilon=0"], "privacy.epsilon must be greater than 0"),
        (["notes.jsonl", "--output", "notes.jsonl"], "a recipe's name ends in .yaml"),
        (["notes.jsonl", "--output", "there.yaml"], "exists already"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(arguments, message):
    """And nothing is written."""
    Path("there.yaml").write_text("mine")
    Path("ids.csv").write_text("text,befund\n" + "".join(f"A{n:05d},der Hund läuft\n" for n in range(20)))
    Path("pairs.jsonl").write_text('{"prompt": "a b c", "chosen": "a", "rejected": "b"}\n' * 3)
    before = sorted(Path().iterdir())
    assert message in refused(*arguments)
    assert Path("there.yaml").read_text() == "mine" and sorted(Path().iterdir()) == before


def test_few_records_are_refused(model):
    """With the number that is needed."""
    Path("few.jsonl").write_text('{"text": "the dog sees a cat"}\n' * 9)
    message = refused("few.jsonl", f"model={model}", "--yes")
    assert "9 records are too few" in message and "Collect more" in message


def test_the_end_of_the_questions_is_no_answer(terminal):
    """The line has the key that is missing."""
    message = refused("notes.jsonl", answers="\n\n")
    assert "the questions ended at data.columns.unit, and nothing was written" in message and "--yes" in message


def test_without_a_terminal_it_stops_with_the_columns_and_the_key():
    """Numbers, codes and short values are never proposed as text, whatever their names."""
    rows = "".join(f"{n},N-{n:05d},{['ok', 'not ok'][n % 2]},{n % 7} {n % 3}\n" for n in range(40))
    Path("codes.csv").write_text("text,note,content,body\n" + rows)
    result = CliRunner().invoke(app, ["init", "codes.csv", "model=x"])
    assert result.exit_code == 2 and "data.columns.text=" in result.stderr and "→" not in result.stdout
    lines = [line.split()[0] for line in result.stdout.splitlines() if "not used" in line]
    assert lines == ["text", "note", "content", "body"]


def test_a_model_that_cannot_be_trained_privately_is_found_now(model, monkeypatch):
    """The recipe is checked before it is written."""
    from dpllm.training import preflight

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("this model cannot be clipped")

    monkeypatch.setattr(preflight, "_check_mechanism", refuse)
    assert "cannot be clipped" in refused("notes.jsonl", f"model={model}", "--yes")
    assert [path.name for path in Path().iterdir()] == ["notes.jsonl"]


@pytest.mark.deep
def test_the_recipe_trains_and_its_folder_verifies(model, monkeypatch):
    """As it was written, with nothing added but what this machine needs; ε and units are those that were shown."""
    from dpllm.training import finetune

    shown = asked([], "notes.jsonl", f"model={model}", "--yes")
    recipe = load_recipe("recipe.yaml", ["train.use_cpu=true", "train.disable_tqdm=true"])
    assert finetune.run(recipe) == 0
    assert "matches its ledger" in run(["verify", "runs/recipe"])
    report = json.loads(Path("runs/recipe/privacy_report.json").read_text(encoding="utf-8"))
    assert report["statement"]["epsilon"] <= 8 and report["statement"]["unit"] == "user"
    assert report["accounting"]["parameters"]["num_steps_charged"] == recipe.train["max_steps"]
    assert f"{report['accounting']['parameters']['num_units']} are trained on" in " ".join(shown.split())


@pytest.mark.parametrize("answer", ["drop", "error"])
def test_records_without_a_value_are_asked_about_before_the_model(model, terminal, answer):
    """With --yes it stops with the key; nothing is left out unasked."""
    records = [{"text": "the dog sees a cat", "label": [0, 1, None][n % 3]} for n in range(300)]
    Path("some.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["some.jsonl", f"model={model}", "data.class_names=[no, yes]"]
    assert "data.missing=drop" in refused(*given, "--yes")
    if answer == "error":
        assert "data.missing=drop" in refused(*given, answers="classification\n\n\nrecord\nerror\n\n\n\n")
        return
    asked(["classification", "", "", "record", "", "", ""], *given)
    assert load_recipe("recipe.yaml").data.missing == "drop"


@pytest.mark.parametrize(
    "word",
    [
        "model.adapter=false",
        "model.adapter=8",
        "model={name: x, dtype: bfloat16}",
        "model.start_is_independent=yes",
        "privacy.epsilon='8'",
        "data.columns=text",
        "data.columns.unit=[a]",
    ],
)
def test_a_value_that_init_would_ignore_is_refused(word):
    """With its key; the recipe would train something else than was asked for."""
    Path("a.jsonl").write_text('{"text": "a note"}\n' * 300)
    key = "model.dtype" if "dtype" in word else word.partition("=")[0].removesuffix(".unit")
    assert key in refused("a.jsonl", word, "--yes")
