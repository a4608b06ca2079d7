"""The content index: which records occur in other text, and which are copies, against plain Python and real data."""

import csv
import json
import re
import unicodedata

import numpy as np
import pytest
from datasets import Dataset

import dpllm.data.content_index as module
from dpllm.config import DataConfig, PrivacyUnit, load_recipe
from dpllm.config.recipe_file import load_query_recipe
from dpllm.data.content_index import NGRAM, ContentIndex, count_copies
from dpllm.data.corpora import notes
from dpllm.data.records import DataError, has_many_copies, load_records, load_train_and_eval
from dpllm.data.rows import unit_index_of
from dpllm.data.shared_records import refuse_private_parts, refuse_private_prompts, refuse_shared_records
from tests.mutations import kills
from tests.tiers import SHARED, needs_shared_data


def texts(*records):
    return Dataset.from_dict({"text": list(records)})


def found(private, public, columns=("text",), **more):
    return ContentIndex(private, columns, **more).found_in(texts(*public), ["text"]).tolist()


def note(number):
    return (
        f"The patient number {number} came on a rainy day, and told a story about thing {number * 7 % 91} and about "
        f"thing {number * 13 % 101} at home."
    )


NOTE = "Frau Müller said on Tuesday that her son’s café in Liège closed, and that she sleeps badly since."
PRIVATE = texts(NOTE, *map(note, range(299)))
LINE = "The patient was seen on the ward on Tuesday, and again on Friday."
LONG = "\n".join(
    f"On day {number} we saw {number * 17 % 23} birds near the {number}th oak of wood." for number in range(60)
)
CHINESE = "病人昨天下午来到诊所，说他的儿子在学校里摔伤了左腿，而且一直发烧。"
THAI = "เมื่อวานนี้ผู้ป่วยมาที่คลินิกและบอกว่าลูกชายของเธอหกล้มที่โรงเรียนและมีไข้สูง"
FORMS = {
    "joined with others": f"{note(500)} {NOTE} {note(501)}",
    "with a prefix": f"Assistant: {NOTE}",
    "without its full stop": NOTE.rstrip("."),
    "cut at its end": NOTE[:70],
    "cut at its beginning": NOTE[25:],
    "inside HTML": f"<html><body><p class='x'>{NOTE.replace('Liège', '<b>Li&egrave;ge</b>')}</p></body></html>",
    "with other case, spaces and quotes": NOTE.upper().replace(" ", "   ").replace("’", "'"),
    "with other accents": unicodedata.normalize("NFD", NOTE),
    "in Markdown": f"> * **{NOTE.replace(' ', ' _', 1)}_**",
    "as a line of JSON": f'{{"id": 7, "text": "{NOTE}", "split": "train"}}',
    "as a quoted CSV cell": f'12,"{NOTE}",2021-03-04',
    "with zero-width marks": NOTE.replace(" ", " \u200b").replace("sleeps", "sle\u00adeps"),
    "in full-width letters": "".join(chr(ord(c) + 0xFEE0) if "a" <= c <= "z" else c for c in NOTE),
    "with a word changed": NOTE.replace("Tuesday", "Monday"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_found_in_changed_text(form):
    """The only one of 300 records, between other public text."""
    public = ["Public words about the weather.", FORMS[form], "More public words, about the sea and its ships."]
    assert found(PRIVATE, public) == [True] + [False] * 299


def test_records_are_found_wrapped_over_lines_and_in_other_formats():
    """A public text file has one record in each line; chats, pairs and lists of words are compared with plain text."""
    wrapped = [NOTE[start : start + 30] for start in range(0, len(NOTE), 30)]
    lines = re.findall(r".{1,40}(?: |$)", NOTE)
    assert len(wrapped) > 3 and found(PRIVATE, lines)[0]
    chats = [[{"role": "user", "content": "What is new?"}, {"role": "assistant", "content": NOTE}]]
    assert found(Dataset.from_dict({"messages": chats}), [f"A: {NOTE}"], ["messages"]) == [True]
    assert found(Dataset.from_dict({"messages": chats}), [LINE], ["messages"]) == [False]
    index = ContentIndex(PRIVATE, ["text"])
    assert index.found_in(Dataset.from_dict({"messages": chats}), ["messages"]).sum() == 1
    pairs = Dataset.from_dict({"prompt": ["Say:"], "chosen": [NOTE], "rejected": [note(3)]})
    assert index.found_in(pairs, ["prompt", "chosen", "rejected"]).sum() == 2
    words = Dataset.from_dict({"words": [NOTE.split()]})
    assert index.found_in(words, ["words"]).sum() == 1 and found(words, [NOTE], ["words"]) == [True]
    parts = Dataset.from_dict({"messages": [[{"role": "user", "content": [{"type": "text", "text": NOTE}]}]]})
    assert found(parts, [NOTE], ["messages"]) == [True]


def test_parts_of_long_records_are_found():
    """One line of it, or a run of 25 words anywhere, but not a phrase."""
    private = texts(LONG, f"Report\n{LINE}\nEnd of the report of this very long day, without more.")
    words = LONG.split()
    assert found(private, [f"see: {' '.join(words[100:130])} and so on"]) == [True, False]
    assert found(private, [LONG.splitlines()[30], "else"]) == [True, False]
    assert found(private, [LINE.upper()]) == [False, True]
    assert found(private, [" ".join(words[100:110]), "seen on the ward on Tuesday"]) == [False, False]


@pytest.mark.parametrize("text", [CHINESE, THAI])
def test_scripts_without_spaces(text):
    """Chinese and Thai records are found inside longer text; half of their characters, elsewhere, are no record."""
    private = texts(text, note(1))
    assert found(private, [f"{text[5:]}你好，{text[:3]}"]) == [True, False]
    assert found(private, [text[:9], text[::-1]]) == [False, False]


def test_short_records_count_as_a_whole_only():
    """As a text or a line; in a prompt, where nobody could declare them, and as a sentence from five words on."""
    private = texts("Yes, thanks!", "Good morning", "My test came back positive")
    assert found(private, ["YES  thanks.", "a good morning to you", "Well. Good morning. So"]) == [True, False, False]
    assert found(private, ["Well. My test came back positive. So"]) == [False, False, True]
    assert found(private, ["First\nGood morning\nlast"]) == [False, True, False]
    index = ContentIndex(private, ["text"])
    assert not index.occurs_in("Yes, thanks!", "Good morning")
    assert not index.occurs_in("For example: my test came back positive. So?")
    assert index.occurs_in("An example\nMy test came back positive.\n")


def test_templates_and_common_prompts_are_no_records():
    """Sentences that many records have are nobody's own, and other values in one template are other records."""
    shared = "Patient was seen today in the clinic for follow up and has no complaints at all."
    private = texts(*(f"{shared} Bed {number}, code {number * 31 % 997}." for number in range(500)))
    public = [shared, f"{shared} Bed 700, code 1001.", "As told: Patient was seen today in the clinic for follow up"]
    assert not any(found(private, public))
    assert not ContentIndex(private, ["text"]).occurs_in(*public)
    system = {
        "role": "system",
        "content": "You are a helpful assistant who answers all questions of the customers politely.",
    }
    chats = Dataset.from_dict({"messages": [[system, {"role": "user", "content": note(n)}] for n in range(300)]})
    index = ContentIndex(chats, ["messages"])
    assert not index.occurs_in(system["content"]) and index.occurs_in(f"{system['content']}\n{note(7)}")


def test_values_in_tags_are_contents():
    """XML may have all its values in attributes; tags of HTML are none of a text's words."""
    assert count_copies(texts(*(f'<pulse value="{n}"/><status value="final"/>' for n in range(50))), ["text"]) == 0
    marked = texts(*(f'<p class="c{n}">{note(n)} <b>urgent</b> <a href="x{n}">here</a></p>' for n in range(50)))
    assert all(found(marked, [f"{note(n)} urgent here" for n in range(50)]))


def test_notes_by_one_template_and_speeches_are_no_copies_of_each_other():
    """Made-up clinic notes of other patients."""
    records = Dataset.from_list(notes()[:8000])
    ours = np.array([int(name[1:]) % 2 == 0 for name in records["patient_id"]])
    own, other = records.select(np.flatnonzero(ours)), records.select(np.flatnonzero(~ours))
    ids = np.array([int(name[1:]) for name in own["patient_id"]])
    index = ContentIndex(own, ["note"], ids)
    assert index.found_in(other, ["note"]).mean() < 0.01
    assert count_copies(records, ["header", "note"]) == 0


@needs_shared_data
def test_real_reviews_and_descriptions_are_not_taken_for_each_other():
    """SST-2's held-out sentences are not its training phrases; E2E's texts by others share little."""
    rows = [line.split("\t")[0] for line in (SHARED / "sst2" / "train.tsv").read_text().splitlines()[1:20001]]
    dev = [line.split("\t")[0] for line in (SHARED / "sst2" / "dev.tsv").read_text().splitlines()[1:]]
    assert sum(found(texts(*rows), dev)) < 10
    parts = []
    for name in ("trainset", "devset"):
        with open(SHARED / "e2e" / f"{name}.csv", encoding="utf-8") as file:
            parts.append(texts(*(row["ref"] for row in csv.DictReader(file))))
    train, held_out = parts
    index = ContentIndex(train, ["text"])
    assert index.found_in(held_out, ["text"], nearly_all=True).sum() < 0.04 * len(held_out)
    assert ContentIndex(held_out, ["text"]).found_in(train, ["text"]).mean() < 0.1


def plain_ngrams(text):
    words = re.findall(r"\w+", text.casefold())
    return [" ".join(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)]


def test_numbers_are_those_of_a_plain_computation():
    """At least half of the n-grams of a record, at random places of random texts."""
    rng = np.random.default_rng(0)
    vocabulary = [f"w{number}" for number in range(3000)]

    def draw(count):
        return [vocabulary[number] for number in rng.integers(0, 3000, count)]

    records = [draw(int(rng.integers(8, 60))) for _ in range(400)]
    public, expected = [], []
    for words in records:
        keep = int(rng.integers(0, len(words) + 1))
        start = int(rng.integers(0, len(words) - keep + 1))
        public.append(" ".join([*draw(5), *words[start : start + keep], *draw(5)]))
    known = {gram for text in public for gram in plain_ngrams(text)}
    for words in records:
        own = set(plain_ngrams(" ".join(words)))
        expected.append(sum(gram in known for gram in own) >= min((len(own) + 1) // 2, 18))
    private = texts(*(" ".join(words).capitalize() + "." for words in records))
    assert found(private, public) == expected
    assert 50 < sum(expected) < 350


@kills(
    "copies that differ in case are counted as different records",
    "dpllm/data/content_index.py",
    "            table[byte] = ord(chr(byte).lower())",
    "            table[byte] = byte",
)
def test_copies_are_counted_apart_from_case_punctuation_spaces_and_a_label():
    """Those of one user do not count; short texts may well be written twice."""
    changed = [
        note(3),
        note(4).upper(),
        note(5).replace(",", " -"),
        "  " + note(6).replace(" ", "  "),
        f"User: {note(7)}",
        f"<p>{note(8)}</p>",
    ]
    records = texts(*map(note, range(50)), *changed, *["Thanks a lot, see you."] * 20)
    assert count_copies(records, ["text"]) == len(changed)
    users = np.array([*range(50), 3, 4, 5, 6, 7, 8, *range(20)])
    assert count_copies(records, ["text"], users) == 0
    users[50:53] = 49
    assert count_copies(records, ["text"], users) == 3


def test_a_sampled_index_finds_most_records(monkeypatch):
    """Above the largest number of n-grams, and copies are estimated; memory does not grow."""
    whole = ContentIndex(PRIVATE, ["text"])
    public = [f"{one} {other}" for one, other in zip(PRIVATE["text"][::2], PRIVATE["text"][1::2], strict=True)]
    assert all(whole.found_in(texts(*public), ["text"]))
    monkeypatch.setattr(module, "MOST_NGRAMS", 1500)
    assert ContentIndex(PRIVATE, ["text"]).found_in(texts(*public), ["text"]).mean() > 0.5
    monkeypatch.setattr(module, "MOST_NGRAMS", 200)
    assert 150 < count_copies(texts(*PRIVATE["text"], *PRIVATE["text"]), ["text"]) < 600


def test_chunks_and_long_texts_change_nothing(monkeypatch):
    """Texts of many chunks, and a text that is read in pieces."""
    monkeypatch.setattr(module, "_CHUNK", 500)
    assert sum(found(PRIVATE, [f"> {text}" for text in PRIVATE["text"]])) == 300
    monkeypatch.setattr(module, "_LONGEST", 3000)
    assert sum(found(PRIVATE, [" ".join(PRIVATE["text"])])) > 270
    assert found(texts(" ".join(PRIVATE["text"]), LINE), [f"{note(150)} {note(151)}"]) == [True, False]


def test_empty_texts_are_no_records():
    """Neither empty records, nor marks, nor nulls in a list."""
    assert found(texts("", " ", "...", NOTE), ["", "!", "a"]) == [False] * 4
    assert found(texts("", ""), [""]) == [False] * 2
    assert count_copies(texts("", "", "?"), ["text"]) == 0
    assert not ContentIndex(texts(""), ["text"]).occurs_in(NOTE)


# ------------------------------------------------------- where it is asked for

DATA = DataConfig(path="private.jsonl", max_length=8)
PUBLIC = DataConfig(path="public.txt", max_length=8)


@pytest.mark.parametrize(
    ("public", "shared"),
    [
        (["one", "two", "three"], 2),
        (["ONE ", "t\u0077o"], 2),
        (["four"], 0),
        ([f"Notes.\n{LINE.upper()}\nEnd."], 1),
        (["on Tuesday"], 0),
        (["Counting:\none\nfour"], 1),
    ],
)
def test_shared_records_are_counted_by_content(public, shared):
    """Not by path: case, spaces, long lines of a longer text, and short records that are a line of the public text."""
    private = texts("one", "two", f"Report\n{LINE}")
    arguments = (private, DATA, texts(*public), PUBLIC)
    assert refuse_shared_records(*arguments, allowed=3) == shared
    if shared:
        with pytest.raises(DataError, match=f"shares {shared} of 3 records with data.path=private.jsonl") as error:
            refuse_shared_records(*arguments, allowed=shared - 1)
        assert "patient" not in str(error.value).lower()


@kills(
    "private records in the public text are not counted",
    "dpllm/data/shared_records.py",
    "return int(index.found_in(public, text_columns(public_data)).sum())",
    "return 0",
)
def test_one_of_many_records_in_the_public_text_is_refused():
    """Even a tiny share of the records is refused."""
    private = texts(*(f"record {number}" for number in range(1000)))
    with pytest.raises(DataError, match="max_shared_records=1"):
        refuse_shared_records(private, DATA, texts("record 7"), PUBLIC)


def write(path, records, **more):
    records.add_column("who", [f"u{number // 2}" for number in range(len(records))]).to_json(str(path), **more)
    return str(path)


def test_copies_of_other_users_are_an_open_point(tmp_path):
    """At user level those within one user are none, and rows keep the note."""
    twice = [text for number in range(40) for text in (note(number), note(number).upper())]
    config = DataConfig(path=write(tmp_path / "a.jsonl", texts(*twice)), max_length=8)
    users = PrivacyUnit(unit="who", max_rows_per_unit=2)
    assert not unit_index_of(load_records(config, users), users).many_copies
    assert unit_index_of(load_records(config), PrivacyUnit()).many_copies
    across = DataConfig(path=write(tmp_path / "b.jsonl", texts(*twice[::2], *twice[1::2])), max_length=8)
    records = load_records(across, users)
    assert has_many_copies(records, "who")
    assert any("other users" in doubt for doubt in unit_index_of(records, users).doubts("who"))


def test_training_records_in_public_rows_are_an_open_point(tmp_path):
    """Rows for evaluation that are declared public; others than the training records are none."""
    train = write(tmp_path / "train.jsonl", texts(*map(note, range(200))))
    for name, rows, expected in (
        ("mixed", [*map(note, range(300, 340)), f"User: {note(3)}", note(4), note(5).upper()], True),
        ("other", list(map(note, range(300, 340))), False),
    ):
        held_out = write(tmp_path / f"{name}.jsonl", texts(*rows))
        config = DataConfig(path=train, eval={"path": held_out, "public": True}, max_length=8)
        records, _ = load_train_and_eval(config)
        doubts = unit_index_of(records, PrivacyUnit()).doubts(None)
        assert any("declared public" in doubt for doubt in doubts) is expected


def test_held_out_records_that_are_training_records_in_another_form_are_refused(tmp_path):
    """Joined with others, or with a prefix."""
    train = write(tmp_path / "train.jsonl", texts(*(f"Note: {note(a)} {note(a + 1)}" for a in range(0, 200, 2))))
    held_out = write(tmp_path / "test.jsonl", texts(*map(note, range(50))))
    with pytest.raises(DataError, match="50 of 50 held-out records"):
        load_train_and_eval(DataConfig(path=train, eval=held_out, max_length=8))


@pytest.mark.parametrize(
    ("method", "section", "key"),
    [
        ("predict", {"prompts": ["Once", f"Such as: {note(5)}"]}, "predict.prompts[1]"),
        ("predict", {"public_context": note(5)[:-20], "context": "{text}"}, "predict.public_context"),
        ("predict", {"context": f"{note(5)}\n{{text}}"}, "predict.context"),
        ("evolve", {"prompts": [note(5).upper()]}, "evolve.prompts[0]"),
        ("aggregate", {"opening": f"<li>{note(5)}</li>"}, "aggregate.opening"),
        (
            "aggregate",
            {"questions": [{"name": "q", "kind": "choice", "ask": f"Like this? {note(5)}", "answers": ["a", "b"]}]},
            "aggregate.questions[0].ask",
        ),
        (
            "aggregate",
            {"questions": [{"name": "q", "kind": "choice", "ask": "Which?", "answers": ["a", note(5)]}]},
            "aggregate.questions[0].answers[1]",
        ),
    ],
)
def test_public_parts_of_a_recipe_hold_no_private_record(tmp_path, method, section, key):
    """The message names the key and not the text."""
    records = texts(*map(note, range(300)))
    recipe = {
        "data": {"path": write(tmp_path / "t.jsonl", records), "format": "text"},
        "privacy": {"epsilon": 4.0},
        "model": {"name": "a/model"},
        method: section,
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    read = load_query_recipe(tmp_path / "recipe.yaml", [])
    with pytest.raises(DataError) as error:
        refuse_private_parts(read, load_records(read.data))
    assert str(error.value).startswith(f"{key} holds a record") and "rainy" not in str(error.value)


def test_notes_of_a_release_and_prompts_for_its_model_hold_no_private_record(tmp_path):
    """The card prints the notes; prompts are published with the texts."""
    records = write(tmp_path / "t.jsonl", texts(*map(note, range(300))))
    recipe = {
        "data": {"path": records, "format": "text", "max_length": 8},
        "model": {"name": "a/model"},
        "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 8},
        "train": {"output_dir": str(tmp_path / "out"), "max_steps": 1},
        "release": {"other_uses": f"An example: {note(9)}"},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    read = load_recipe(tmp_path / "r.yaml", [])
    with pytest.raises(DataError, match=r"release\.other_uses"):
        refuse_private_parts(read, load_records(read.data))
    assert refuse_private_prompts(read, {"prompt 1": "Write about a patient who came on a rainy day, please"})
    with pytest.raises(DataError, match="prompt 2"):
        refuse_private_prompts(read, {"prompt 1": "Hello", "prompt 2": f"Go on: {note(9)[:-9]}"})
    (tmp_path / "parts").mkdir()
    (tmp_path / "t.jsonl").rename(tmp_path / "parts" / "dev.jsonl")
    split = load_recipe(tmp_path / "r.yaml", [f"data.path={tmp_path / 'parts'}", "data.split=dev"])
    with pytest.raises(DataError, match="prompt 1"):
        refuse_private_prompts(split, {"prompt 1": note(9)})
    assert not refuse_private_prompts(read, {"prompt 1": note(9)})  # the records are elsewhere, which is said
