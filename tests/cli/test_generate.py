"""Tests of dpllm.cli.generate: `dpllm generate` states the guarantee, or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.cli import generate
from dpllm.cli.generate import COVERED
from dpllm.cli.program import app
from dpllm.models import generation
from dpllm.models.generation import Sampling, TextGenerator, load_generator
from tests.models.test_generation import TEMPLATE
from tests.mutations import kills
from tests.report.test_standing import edit, folder_of
from tests.small_model import WORDS, save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


@pytest.fixture
def generator(model: Path, monkeypatch: pytest.MonkeyPatch) -> TextGenerator:
    """The small model, in place of the one of any folder."""
    loaded = load_generator(model, "cpu")
    monkeypatch.setattr(generation, "load_generator", lambda folder: loaded)
    return loaded


@pytest.fixture
def folder(tmp_path: Path, generator: TextGenerator) -> Path:
    place = tmp_path / "run"
    place.mkdir()
    return folder_of(place)


def invoke(arguments: list[str], typed: str = "") -> Any:
    return CliRunner().invoke(app, arguments, input=typed)


def refused(arguments: list[str]) -> str:
    result = invoke(arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_texts_go_to_the_screen_and_the_guarantee_beside_them(folder, generator):
    """The texts are those of the model; what is said about them is on the error stream."""
    result = invoke(
        ["generate", str(folder), "--prompt", "one", "-n", "2", "--max-new-tokens", "6", "--temperature", "0"]
    )
    assert result.exit_code == 0, result.output
    ((text,),) = generator.sample(["one"], Sampling(max_new_tokens=6, temperature=0))
    assert result.stdout == f"> one\n{text}\n\n" * 2
    lines = result.stderr.splitlines()
    assert lines[0] == f"checking {folder}" and lines[1].startswith("ε = ") and lines[2] == COVERED


def test_a_file_of_prompts_gives_a_file_of_texts(folder, generator, tmp_path):
    """One line for each text, in the order of the prompts, also across batches."""
    prompts = tmp_path / "prompts.jsonl"
    asked = ["one", "the small dog sees", "seven"]
    prompts.write_text("".join(json.dumps({"prompt": text, "id": 1}) + "\n" for text in asked))
    output = tmp_path / "new" / "texts.jsonl"
    command = ["generate", str(folder), "--prompts", str(prompts), "-n", "2", "--batch-size", "4", "--temperature", "0"]
    result = invoke([*command, "--max-new-tokens", "5", "--output", str(output)])
    assert result.exit_code == 0 and result.stdout == "" and "6 texts are in" in result.stderr
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(text, n) for text in asked for n in (0, 1)]
    (expected,) = generator.sample(asked, Sampling(max_new_tokens=5, temperature=0))
    assert [line["text"] for line in lines] == [text for text in expected for _ in (0, 1)]
    assert "exists already" in refused([*command, "--output", str(output)])


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("p.txt", "one\ntwo\n", None),
        ("p.csv", "id,question\n1,one\n2,two\n", "question"),
        ("p.json", '[{"x": "one"}]', None),
    ],
)
def test_prompts_of_any_file(folder, tmp_path, name, text, column):
    """A line, a named column, or the only one."""
    (tmp_path / name).write_text(text)
    options = [] if column is None else ["--prompt-column", column]
    result = invoke(["generate", str(folder), "--prompts", str(tmp_path / name), "--max-new-tokens", "2", *options])
    assert result.exit_code == 0 and "> one\n" in result.stdout


def test_without_a_prompt_a_text_begins_from_nothing(folder, generator):
    """For models of whole texts."""
    result = invoke(["generate", str(folder), "--max-new-tokens", "4", "--temperature", "0"])
    ((text,),) = generator.sample([""], Sampling(max_new_tokens=4, temperature=0))
    assert result.stdout == f"{text}\n\n"


@kills(
    "texts are generated from a folder that does not verify, beside its ε",
    "dpllm/cli/generate.py",
    "    failed = standing.failed\n",
    "    failed = None\n",
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda f: edit(f / "privacy_ledger.jsonl", '"noise_multiplier": 2.0', '"noise_multiplier": 9.0'),
            "a check fails",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "a check fails: the model's files"),
        (lambda f: (f / "privacy_ledger.jsonl").unlink(), "holds no privacy_ledger.jsonl"),
    ],
)
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_folder_that_does_not_verify_is_refused(folder, change, words, chat):
    """The remedy names the check; --unverified says that there is no guarantee, and prints none."""
    change(folder)
    message = refused(["generate", str(folder), *chat])
    assert words in message and "--unverified goes on without" in message
    result = invoke(["generate", str(folder), *chat, "--unverified", "--max-new-tokens", "2"])
    assert result.exit_code == 0 and "NO GUARANTEE" in result.stderr
    assert COVERED not in result.stderr and "ε =" not in result.stderr


def test_a_run_without_privacy_is_refused(tmp_path, generator):
    """Its ledger verifies, and says that it is not private."""
    (tmp_path / "run").mkdir()
    folder = folder_of(tmp_path / "run", noise_multiplier=0.0)
    assert "NOT PRIVATE" in refused(["generate", str(folder)])
    assert (
        "NO GUARANTEE: NOT PRIVATE" in invoke(["generate", str(folder), "--unverified", "--max-new-tokens", "2"]).stderr
    )


def test_a_tuning_names_the_folder_of_its_release(tmp_path, generator):
    """The other runs in it are private."""
    (tmp_path / "not_for_release").mkdir()
    (tmp_path / "not_for_release" / "tuning.jsonl").write_text("")
    assert f"give {tmp_path / 'released'}" in refused(["generate", str(tmp_path), "--unverified"])


def test_a_run_that_was_stopped_holds_no_model(tmp_path):
    """Its checkpoints have weights; its folder has a ledger and a report. Also with --unverified."""
    folder = folder_of(tmp_path, steps=1)
    for options in ([], ["--unverified"]):
        message = refused(["generate", str(folder), *options])
        assert "holds no model: its run has not ended" in message and "train.resume_from_checkpoint=auto" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--prompts", "p.txt"], "give one of them"),
        (["-n", "0"], "--number must be at least 1"),
        (["--prompts", "absent.txt"], "there is no such file"),
        (["--prompts", "p.docx"], "cannot be read"),
        (["--prompts", "p.csv"], "no column named prompt. It has a, b"),
        (["--prompts", "numbers.jsonl"], "record 1 is neither a text nor a list of messages"),
        (["--prompts", "empty.txt"], "it holds none"),
        (["--temperature", "-1"], "temperature must be >= 0"),
        (["--template"], "has no chat template"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, monkeypatch, arguments, message):
    """With the remedy; nothing is generated."""
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text("a,b\n1,2\n")
    Path("empty.txt").write_text("")
    Path("numbers.jsonl").write_text('{"prompt": "x"}\n{"prompt": null}\n')
    assert message in refused(["generate", str(folder), *arguments])


def test_a_path_that_is_no_folder(tmp_path):
    """Also with --unverified."""
    for options in ([], ["--unverified"]):
        assert "is not a folder" in refused(["generate", str(tmp_path / "absent"), *options])


def test_prompts_go_into_the_template_of_a_chat_model(folder, generator, monkeypatch):
    """If the run was trained with it; another run's prompts stay as they are."""
    seen: list[Any] = []
    monkeypatch.setattr(generator, "encode", lambda prompt: seen.append(prompt) or [1, 5])
    monkeypatch.setattr(generator.tokenizer, "chat_template", TEMPLATE)
    command = ["generate", str(folder), "--prompt", "one", "--max-new-tokens", "2"]
    chat = [{"role": "user", "content": "one"}]
    recipe = "model: {name: m}\ndata: {path: x.jsonl, max_length: 9, format: FORMAT}\n"
    recipe += "privacy: {noise_multiplier: 1, clip_norm: 1, expected_batch_size: 1}\n"
    for form, options, expected in (
        (None, [], chat),
        ("chat", [], chat),
        ("text", [], "one"),
        ("text", ["--template"], chat),
        ("chat", ["--no-template"], "one"),
    ):
        if form is not None:
            (folder / "recipe.yaml").write_text(recipe.replace("FORMAT", form))
        assert invoke([*command, *options]).exit_code == 0
        assert seen.pop() == expected


def test_a_conversation_without_a_template_continues_the_text(folder, generator, monkeypatch):
    """Each answer is added; /reset forgets; the end of the input ends it."""
    seen: list[Any] = []
    monkeypatch.setattr(generator, "stream", lambda prompt, *_: seen.append(prompt) or " and more")
    result = invoke(["generate", str(folder), "--chat"], "one\n two\n/reset\nthree\n\n")
    assert result.exit_code == 0 and seen == ["one", "one and more two", "three"]
    assert "ε = " in result.stderr and COVERED in result.stderr and "continuing the text" in result.stderr
    seen.clear()
    assert invoke(["generate", str(folder), "--chat"], "/exit\none\n").exit_code == 0 and seen == []


def test_a_conversation_with_a_template_keeps_its_turns_while_they_fit(folder, generator, monkeypatch):
    """The oldest turn goes first."""
    seen: list[Any] = []
    monkeypatch.setattr(generator, "stream", lambda prompt, *_: seen.append(list(prompt)) or "dog")
    monkeypatch.setattr(generator.tokenizer, "chat_template", TEMPLATE)
    result = invoke(["generate", str(folder), "--chat", "--max-new-tokens", "20"], "one\n" * 9)
    assert result.exit_code == 0 and "by its chat template" in result.stderr
    assert [message["content"] for message in seen[1]] == ["one", "dog", "one"]
    sizes = [len(messages) for messages in seen]
    assert sizes[:2] == [1, 3] and sizes[-1] == sizes[-2] and generator.room_for(seen[-1]) >= 20
    assert all(messages[0]["role"] == "user" == messages[-1]["role"] for messages in seen)


def test_a_long_text_loses_its_beginning(folder, generator, monkeypatch):
    """So that there is room for an answer."""
    seen: list[Any] = []
    monkeypatch.setattr(generator, "stream", lambda prompt, *_: seen.append(prompt) or " dog")
    long = " ".join(WORDS * 6)
    assert invoke(["generate", str(folder), "--chat", "--max-new-tokens", "20"], f"{long}\n").exit_code == 0
    assert long.endswith(seen[0].strip()) and 64 - 20 - 2 <= len(generator.encode(seen[0])) <= 64 - 20 + 1


def test_an_interrupt_ends_a_conversation(folder, generator, monkeypatch):
    """Also while words appear: no traceback, exit code 0."""

    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(generator, "stream", interrupted)
    assert invoke(["generate", str(folder), "--chat"], "one\n").exit_code == 0
    monkeypatch.setattr(generate, "_line", interrupted)
    assert invoke(["generate", str(folder), "--chat"]).exit_code == 0


def test_words_of_an_answer_are_on_the_screen(folder, generator):
    """As the model makes them."""
    result = invoke(["generate", str(folder), "--chat", "--temperature", "0", "--max-new-tokens", "6"], "one\n")
    ((text,),) = generator.sample(["one"], Sampling(max_new_tokens=6, temperature=0))
    assert result.exit_code == 0 and text.strip() in result.stdout


@pytest.mark.deep
def test_a_run_with_an_adapter_generates_from_both_of_its_models(model, tmp_path, monkeypatch):
    """The adapter beside its base, and the merged one, verify and say the same; a changed adapter is refused."""
    from dpllm.config import load_recipe
    from dpllm.training import finetune

    monkeypatch.chdir(tmp_path)
    Path("notes.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(WORDS[: 3 + n % 9])}) + "\n" for n in range(200))
    )
    Path("recipe.yaml").write_text(
        f"model: {{name: {model}, adapter: {{r: 2, target_modules: all-linear}}}}\n"
        "data: {path: notes.jsonl, max_length: 32}\nmerge_adapter: true\n"
        "privacy: {epsilon: 8, clip_norm: 1, expected_batch_size: 20}\n"
        "train: {output_dir: run, max_steps: 2, use_cpu: true, disable_tqdm: true, learning_rate: 0.5, optim: sgd}\n"
    )
    assert finetune.run(load_recipe("recipe.yaml")) == 0
    command = ["--prompt", "the small", "--temperature", "0", "--max-new-tokens", "8"]
    results = [invoke(["generate", folder, *command]) for folder in ("run", "run/merged")]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout and all("for each record of 200" in one.stderr for one in results)
    weights = Path("run/adapter_model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "the model's files are those that were saved" in refused(["generate", "run", *command])
