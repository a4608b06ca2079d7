"""Rows for supervised fine-tuning are those that TRL makes, and each is made of its own example only."""

import pytest

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

from dpllm.config import ConfigError  # noqa: E402
from dpllm.data.examples import Supervised, Tokens, is_chat  # noqa: E402
from dpllm.data.records import DataError  # noqa: E402
from tests import trl_data  # noqa: E402
from tests.mutations import kills  # noqa: E402

SHAPES = trl_data.shapes()


def made(dataset, **options):
    return Supervised(tokens=Tokens(trl_data.tokenizer()), **options).rows(dataset)


def by_trl(dataset, folder, **options):
    args = trl.SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", **options)
    return trl.SFTTrainer(
        trl_data.model(), args, train_dataset=dataset, processing_class=trl_data.tokenizer()
    ).train_dataset


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_each_shape_are_those_of_trl(shape, tmp_path):
    """Ids and labels: the loss is on completions where there are any, and on all tokens otherwise."""
    own, its = made(SHAPES[shape]), by_trl(SHAPES[shape], tmp_path)
    assert own["input_ids"][:] == its["input_ids"][:] and own["labels"][:] == its["labels"][:]
    assert own.column_names == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("messages", {"assistant_only_loss": True}),
        ("chat_completion", {"assistant_only_loss": True}),
        ("chat_completion", {"assistant_only_loss": True, "completion_only_loss": False}),
        ("prompt_completion", {"completion_only_loss": False}),
        ("text", {"max_length": 4}),
    ],
)
def test_rows_with_options_are_those_of_trl(shape, options, tmp_path):
    """Which words have loss, and the cut."""
    names = {"assistant_only_loss": "assistant_only", "completion_only_loss": "completion_only"}
    own = made(SHAPES[shape], **{names.get(name, name): value for name, value in options.items()})
    its = by_trl(SHAPES[shape], tmp_path, **options)
    assert own["input_ids"][:] == its["input_ids"][:] and own["labels"][:] == its["labels"][:]
    assert any(-100 in row for row in own["labels"]) == (shape != "text" and options != {"completion_only_loss": False})


def test_token_ids_keep_their_labels_or_get_those_of_their_masks():
    """As TRL: masks of completions count only if completions alone are asked for."""
    ids = Dataset.from_dict({"input_ids": [[5, 6, 7]], "completion_mask": [[0, 1, 1]]})
    assert made(ids)["labels"][:] == [[5, 6, 7]]
    assert made(ids, completion_only=True)["labels"][:] == [[-100, 6, 7]]
    assert made(ids.add_column("labels", [[-100, -100, 7]]))["labels"][:] == [[-100, -100, 7]]
    assert made(ids, max_length=2, keep_end=True)["input_ids"][:] == [[6, 7]]


@kills(
    "a column 'record' of raw examples makes one unit of several",
    "dpllm/data/examples.py",
    "        if parts is None:  # tokenized",
    "        if True:  # tokenized",
)
def test_columns_of_units_are_kept_and_the_record_only_beside_token_ids():
    """A column `record` of examples is the user's own, and would make one unit of several."""
    people = SHAPES["text"].add_column("person", list("aabbcc")).add_column("record", [0] * 6)
    rows = Supervised(tokens=Tokens(trl_data.tokenizer())).rows(people, keep=["person"])
    assert rows.column_names == ["input_ids", "labels", "person"] and rows["person"][:] == list("aabbcc")
    cut = Dataset.from_dict({"input_ids": [[5, 6], [7, 8]], "record": [0, 0]})
    assert made(cut)["record"][:] == [0, 0]


@pytest.mark.parametrize("shape", ["prompt_completion", "messages"])
def test_no_row_depends_on_another_example(shape):
    """A row is the same by itself, and after other examples."""
    dataset = SHAPES[shape]
    alone = [made(dataset.select([number]))[0] for number in range(len(dataset))]
    assert list(made(dataset)) == alone


TOOLS = (
    "{% for m in messages %}{{ m.role }}: {% for call in m.tool_calls or () %}{{ call | tojson }}{% endfor %}"
    "{{ m.content }} {% endfor %}"
)


@kills(
    "an example has the keys of other examples",
    "dpllm/data/examples.py",
    "own_value(value) if is_conversation(value) else value",
    "value",
)
def test_no_row_has_keys_or_kinds_of_numbers_of_another_example():
    """A table gives each object the keys of all rows, in the order of the first, and makes 1 of one row 1.0."""

    def chat(**arguments):
        call = {"name": "f", "arguments": arguments}
        said = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
        return {"messages": said}

    def after(*others):
        rows = Dataset.from_list([*others, chat(a=1, b="Monday")])
        return Supervised(tokens=Tokens(trl_data.tokenizer(TOOLS))).rows(rows)[-1]

    assert after() == after(chat(b="Tuesday", c="x", a=2.5)) == after(*SHAPES["messages"])


def test_a_row_in_the_old_form_changes_no_other():
    """One with `from` and `value` gives the others these keys, without values."""
    old = [{"from": "user", "value": "the"}, {"from": "assistant", "value": "a"}]
    mixed = Dataset.from_list([{"messages": old}, SHAPES["messages"][0]])
    assert made(mixed)[1] == made(SHAPES["messages"])[0]


@pytest.mark.parametrize("form", ["numpy", "torch", "pandas", "arrow"])
@pytest.mark.parametrize("shape", ["text", "messages"])
def test_the_format_of_a_data_set_does_not_matter(form, shape):
    """set_format is about how rows come out."""
    assert list(made(SHAPES[shape].with_format(form))) == list(made(SHAPES[shape]))


@kills(
    "the shape of the first example is taken for that of all",
    "dpllm/data/examples.py",
    "if conversational not in (None, chats[0]):",
    "if False:",
)
def test_all_examples_have_one_shape():
    """TRL takes the shape of all from the first one: a row would change how others are read."""
    chat = trl_data.says("user", "the")
    with pytest.raises(DataError, match="0 holds"):
        is_chat(1, {"messages": chat}, ["messages"], is_chat(0, {"messages": "the"}, ["messages"], None))


@pytest.mark.parametrize(
    ("columns", "options", "error", "says"),
    [
        ({"prompt": ["a"], "answer": ["b"]}, {}, ConfigError, "no 'completion'"),
        ({"body": ["a"]}, {}, ConfigError, r"no 'text'.*dataset_text_field"),
        ({"text": ["the"]}, {"completion_only": True}, ConfigError, "completion_only_loss=True needs the columns"),
        ({"text": ["the"]}, {"assistant_only": True}, ConfigError, "row 0 holds texts"),
        ({"text": ["the", None]}, {}, DataError, "row 1: 'text' is missing or empty"),
        ({"prompt": ["the"], "completion": [trl_data.says("assistant", "a")]}, {}, DataError, "row 0: prompt, comple"),
        ({"messages": [trl_data.says("user", "the")]}, {"assistant_only": True}, DataError, "marks none of the"),
        (
            {"input_ids": [[5, 6, 7], [5, 6]], "labels": [[-100, -100, 7], [-100, 6]]},
            {"max_length": 2},
            DataError,
            "1 ",
        ),
        ({"text": ["a"], "image": [0]}, {}, ConfigError, "only texts are prepared here"),
        ({"input_ids": [[5, 6], None]}, {}, DataError, "row 1: input_ids must be lists of numbers"),
        ({"input_ids": [[5, None]]}, {}, DataError, "row 0: input_ids must be lists of numbers"),
        ({"input_ids": [[5, 6]], "completion_mask": [[1]]}, {}, DataError, "2 in 'input_ids', 1 in 'completion_mask'"),
    ],
)
def test_examples_that_cannot_be_used_are_refused(columns, options, error, says):
    """With the number of the row and the remedy."""
    with pytest.raises(error, match=says):
        made(Dataset.from_dict(columns), **options)


def test_data_that_is_no_stored_table_is_refused():
    """Rows that are computed when read, or that are a list."""
    with pytest.raises(ConfigError, match=r"Dataset\.from_list"):
        made([{"text": "a"}])
    with pytest.raises(ConfigError, match=r"Dataset\.map"):
        made(SHAPES["text"].with_transform(lambda batch: batch))


def test_a_template_that_refuses_an_example_is_named():
    """With the row."""
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="alternate"):
        Supervised(tokens=Tokens(trl_data.tokenizer(strict))).rows(SHAPES["messages"])


def test_a_template_that_draws_random_numbers_is_refused():
    """The numbers of a row would depend on how many rows come before it: the sum moved by 1.5 C."""
    with pytest.raises(ConfigError, match=r"\|random"):
        Tokens(trl_data.tokenizer("{{ ['yes', 'no']|random }}" + trl_data.TEMPLATE))


def test_a_template_gets_a_fixed_date():
    """Rows are the same on every day: a run is resumed later."""
    dated = "{{ strftime_now('%Y') }} " + trl_data.TEMPLATE
    rows = Supervised(tokens=Tokens(trl_data.tokenizer(dated))).rows(SHAPES["messages"])
    assert trl_data.tokenizer().decode(rows[0]["input_ids"]).startswith("2024 user:")
