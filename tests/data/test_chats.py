"""Conversations in the forms that people have are read alike, through templates in the style of known models."""

import json

import datasets
import pyarrow as pa
import pytest

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import GenerationConfig, TrainingArguments  # noqa: E402

from dpllm import DPSFTTrainer, DPTrainer  # noqa: E402
from dpllm.config import ConfigError, DataConfig  # noqa: E402
from dpllm.data.chat import SILENT, ChatTemplate, prompt_of_chat  # noqa: E402
from dpllm.data.examples import Preferences, Supervised, Tokens  # noqa: E402
from dpllm.data.raw_rows import RowMaker  # noqa: E402
from dpllm.data.records import DataError, check_records, load_records  # noqa: E402
from dpllm.data.rows import tokenization_info, tokenize_records  # noqa: E402
from dpllm.models.generation import load_generator  # noqa: E402
from tests import trl_data  # noqa: E402

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPENING
LLAMA = (
    "{{ bos_token }}{% set day = strftime_now('%d %b %Y') %}"
    "<|start_header_id|>system<|end_header_id|>\n\nDay: {{ day }}"
    "{% if tools %}{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% set start = messages[0].content if messages[0].role == 'system' else '' %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if start and m == last %}{{ start }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and not loop.last %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}{% for c in m.tool_calls or () %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "qwen": QWEN}
ENDS = {
    "chatml": "<|im_end|>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "qwen": "<|im_end|>",
}
MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<think>")

ASKED, SAID = "Where does the ferry to the island leave?", "It leaves behind the fish market."
TALK = [*trl_data.says("user", ASKED), *trl_data.says("assistant", SAID)]
PROMPT = "You answer travellers in one sentence."
FERRY = {
    "type": "function",
    "function": {"name": "next_ferry", "description": "When?", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "id": "c1", "function": {"name": "next_ferry", "arguments": {"pier": 3}}}
RESULT = {"role": "tool", "content": '{"time": "10:40"}', "tool_call_id": "c1"}
CALLED = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, TALK[1]]


def tokenizer(style: str | dict = "chatml"):
    made = trl_data.tokenizer(TEMPLATES.get(style, style) if isinstance(style, str) else style)
    made.add_tokens(list(MARKS), special_tokens=True)
    made.model_max_length = 2000
    return made


def turns(chat):
    """A conversation as ShareGPT has it."""
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in chat]


def rows_of(records, style="chatml", **keys):
    data = DataConfig(path="x", format="chat", max_length=2000, **keys)
    return tokenize_records(Dataset.from_list(records), tokenizer(style), data)


def learned(row, made=None):
    return (made or tokenizer()).decode([label for label in row["labels"] if label != -100])


def text_of(row, made=None):
    return (made or tokenizer()).decode(row["input_ids"])


GIVEN = json.dumps(CALL["function"]["arguments"])
FORMS = {
    "parts": ({"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TALK]}, TALK),
    "ShareGPT": ({"messages": turns(TALK)}, TALK),
    "capitals": (
        {"messages": [{"role": r, "content": m["content"]} for r, m in zip(("User", "GPT"), TALK, strict=True)]},
        TALK,
    ),
    "JSON text": ({"messages": json.dumps(TALK)}, TALK),
    "developer": (
        {"messages": [*trl_data.says("developer", PROMPT), *TALK]},
        [*trl_data.says("system", PROMPT), *TALK],
    ),
    "system beside": ({"messages": TALK, "system": PROMPT}, [*trl_data.says("system", PROMPT), *TALK]),
    "content null": ({"messages": [CALLED[0], {**CALLED[1], "content": None}, *CALLED[2:]]}, CALLED),
    "arguments as text": (
        {
            "messages": [
                CALLED[0],
                {**CALLED[1], "tool_calls": [{**CALL, "function": {"name": "next_ferry", "arguments": GIVEN}}]},
                *CALLED[2:],
            ]
        },
        CALLED,
    ),
    "function_call of LLaMA-Factory": (
        {
            "messages": [
                *turns(TALK[:1]),
                {"from": "function_call", "value": json.dumps({"name": "next_ferry", "arguments": {"pier": 3}})},
                *turns([RESULT, TALK[1]]),
            ]
        },
        CALLED,
    ),
    "function_call of OpenAI": (
        {
            "messages": [
                TALK[0],
                {"role": "assistant", "content": None, "function_call": {"name": "next_ferry", "arguments": GIVEN}},
                {"role": "function", "name": "next_ferry", "content": RESULT["content"]},
                TALK[1],
            ]
        },
        CALLED,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_row_of_the_plain_one(form):
    """In a recipe, in raw columns of a DPTrainer, and in TRL's trainers."""
    given, plain = FORMS[form]
    wanted = rows_of([{"messages": plain}], "qwen")[0]
    assert rows_of([given], "qwen")[0] == wanted
    made = RowMaker(tokenizer("qwen"), "causal_lm", longest=2000).rows(Dataset.from_list([given]), "train_dataset")
    assert made[0]["labels"] == wanted["labels"]
    if not isinstance(given["messages"], str):  # TRL takes a text in this column for a text
        rows = [
            Supervised(tokens=Tokens(tokenizer("qwen"))).rows(Dataset.from_list([one]))
            for one in (given, {"messages": plain})
        ]
        assert rows[0][0] == rows[1][0]


def test_a_column_of_conversations_is_read_in_every_way_in():
    """ShareGPT's column, with the roles human and gpt."""
    records, plain = [{"id": "c1", "conversations": turns(TALK)}], [{"messages": TALK}]
    wanted = rows_of(plain)[0]
    assert rows_of(records, columns={"messages": "conversations"})[0] == wanted
    made = RowMaker(tokenizer(), "causal_lm", longest=2000).rows(Dataset.from_list(records), "train_dataset")
    assert made[0]["labels"] == wanted["labels"]
    sft = Supervised(tokens=Tokens(tokenizer())).rows(Dataset.from_list(records))
    assert text_of(sft[0]) == text_of(wanted) and "human" not in text_of(sft[0])
    pairs = [{"chosen": turns(TALK), "rejected": turns([TALK[0], {**TALK[1], "content": "No idea, sorry, friend."}])}]
    row = Preferences(tokens=Tokens(tokenizer())).rows(Dataset.from_list(pairs))[0]
    assert "<|im_start|>user" in tokenizer().decode(row["chosen_input_ids"]) and "gpt" not in str(row)


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_turn_is_learned_with_the_token_that_closes_it_and_bos_comes_once(style):
    """Also where the padding is that token: the labels, and not the ids, say what is learned."""
    made = tokenizer(style)
    made.pad_token = ENDS[style]
    row = tokenize_records(
        Dataset.from_list([{"messages": TALK}]), made, DataConfig(path="x", format="chat", max_length=2000)
    )[0]
    assert learned(row, made).strip() == SAID + ENDS[style]
    assert text_of(row, made).count("<s>") == int("bos_token" in TEMPLATES[style])
    assert made.decode(ChatTemplate(made).turn_end()) == ENDS[style]
    opened = prompt_of_chat(TALK[:1], made)
    assert text_of(row, made).startswith(opened) and not learned(row, made).startswith(opened[-3:])
    assert ChatTemplate(made).notes()[:-1] == [] and ("earlier" in str(ChatTemplate(made).notes())) == (style == "qwen")


@pytest.mark.parametrize("style", ["llama", "mistral", "qwen"])
def test_tools_and_calls_are_in_the_rendering(style):
    """As a list, and as JSON text; the same tokens, and the call is learned."""
    rows = [rows_of([{"messages": CALLED, "tools": tools}], style)[0] for tools in ([FERRY], json.dumps([FERRY]))]
    flat = rows_of([{"messages": CALLED, "tools": json.dumps([FERRY["function"]])}], style)[0]
    assert rows[0] == rows[1] == flat
    assert text_of(rows[0]).count("next_ferry") == 2 and '"pier": 3' in learned(rows[0])
    assert '{"type": "function", "function": {"name": "next_ferry", "description"' in text_of(rows[0])


def test_preferences_have_tools_and_a_system_prompt():
    """Of the columns beside the pair."""
    pair = {
        "prompt": TALK[:1],
        "chosen": TALK[1:],
        "rejected": trl_data.says("assistant", "Ask the harbour master, please."),
    }
    rows = Preferences(tokens=Tokens(tokenizer("qwen"))).rows(
        Dataset.from_list([{**pair, "tools": [FERRY], "system": PROMPT}])
    )
    for side in ("chosen", "rejected"):
        text = tokenizer().decode(rows[0][f"{side}_input_ids"])
        assert "next_ferry" in text and PROMPT in text
        assert PROMPT not in tokenizer().decode([one for one in rows[0][f"{side}_labels"] if one != -100])
    with pytest.raises(DataError, match="row 0 has tools"):
        Preferences(tokens=Tokens(tokenizer("gemma"))).rows(Dataset.from_list([{**pair, "tools": [FERRY]}]))


DROPS = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}</s>{% endfor %}" + OPENING
SYSTEM = [*trl_data.says("system", "Be kind."), *TALK]


@pytest.mark.parametrize(
    ("style", "record", "error", "says"),
    [
        ("gemma", {"messages": SYSTEM}, DataError, "accepts no system turn.*user's first message"),
        (DROPS, {"messages": SYSTEM}, DataError, "leaves the text of message 0 out.*user's first message"),
        ("gemma", {"messages": [*TALK, *TALK[1:]]}, DataError, "roles must alternate.*their order"),
        ("chatml", {"messages": CALLED}, DataError, "has tool calls, but the chat template omits them"),
        ("chatml", {"messages": TALK, "tools": [FERRY]}, DataError, "has tools, but the chat template omits"),
        ("chatml", {"messages": TALK, "documents": [{"text": "x"}]}, DataError, "has documents, but the chat template"),
        (
            "chatml",
            {"messages": TALK, "chat_template_kwargs": {"mood": 1}},
            ConfigError,
            "'mood', which is not a variable",
        ),
        ("qwen", {"messages": TALK, "tools": "none"}, DataError, "'tools' must be a list, or the JSON text"),
        ("chatml", {"messages": TALK, "system": 3}, DataError, "'system' must be a text"),
        ("chatml", {"messages": [*trl_data.says("oracle", "Hm."), *TALK]}, DataError, "message 0 has a role.*human"),
        ("chatml", {"messages": SYSTEM, "system": PROMPT}, DataError, "a different one in the column 'system'"),
        (
            "chatml",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": None}]}]},
            DataError,
            "message 0 has a part that is not text",
        ),
        ("chatml", {"messages": [TALK[0], {"role": "assistant", "content": None}]}, DataError, "no text in 'content'"),
        (
            "llama",
            {"messages": [TALK[0], {**CALLED[1], "content": "I look at the timetable first."}, *CALLED[2:]]},
            DataError,
            "leaves the text of message 1 out.*a separate message",
        ),
        (
            "chatml",
            {"messages": [TALK[0], {**TALK[1], "reasoning_content": "The pier has moved."}]},
            DataError,
            "has 'reasoning_content' in a message",
        ),
        (None, {"messages": TALK}, ConfigError, "needs a tokenizer with a chat template"),
    ],
)
def test_nothing_of_a_record_is_left_out_silently(style, record, error, says):
    """The record or the message is named, and none of its words."""
    with pytest.raises(error, match=says) as caught:
        rows_of([record], style)
    assert "oracle" not in str(caught.value) and "ferry" not in str(caught.value)
    with pytest.raises(error):
        Supervised(tokens=Tokens(tokenizer(style))).rows(Dataset.from_list([record]))


def test_a_template_may_name_a_role_of_its_own():
    """No false alarm: Llama's `ipython`, and a `critic`."""
    critic = CHATML.replace("{% for", "{% if 'critic' in messages[0].role %}!{% endif %}{% for", 1)
    assert "<|im_start|>critic" in text_of(rows_of([{"messages": [*trl_data.says("critic", "Hm."), *TALK]}], critic)[0])


THOUGHT = {"role": "assistant", "content": f"<think>\nThe pier has moved.\n</think>\n\n{SAID}"}


def test_turns_without_loss_are_counted_and_the_template_is_described():
    """A template that leaves out earlier reasoning: of two turns one is learned, with its reasoning."""
    rows = rows_of([{"messages": [TALK[0], THOUGHT, TALK[0], THOUGHT]}], "qwen")
    assert learned(rows[0]) == f"{THOUGHT['content']}<|im_end|>\n"
    assert tokenization_info(rows)[SILENT] == 1
    assert tokenization_info(rows_of([{"messages": TALK * 2}], "qwen"))[SILENT] == 0
    (note,) = ChatTemplate(tokenizer("qwen")).notes()
    assert "reasoning" in note and "no loss" in note
    open_ended = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + OPENING
    assert any("no special token" in one for one in ChatTemplate(tokenizer(open_ended)).notes())


def test_variables_of_the_template_come_from_the_recipe_or_the_record():
    """A prompt that is opened without reasoning, in training and in generation."""
    shown = "{% if mood %}[{{ mood }}]{% endif %}" + QWEN
    prompt = prompt_of_chat(TALK[:1], tokenizer("qwen"), {"enable_thinking": False})
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    row = rows_of(
        [{"messages": [TALK[0], {**TALK[1], "content": f"<think>\n\n</think>\n\n{SAID}"}]}],
        "qwen",
        chat_template_kwargs={"enable_thinking": False},
    )[0]
    assert learned(row) == f"{SAID}<|im_end|>\n"
    records = [{"messages": TALK, "chat_template_kwargs": kwargs} for kwargs in ({"mood": "calm"}, None)]
    rows = rows_of(records, shown, chat_template_kwargs={"mood": "stormy"})
    assert "[calm]" in text_of(rows[0]) and "[stormy]" in text_of(rows[1])
    with pytest.raises(DataError, match="renders no assistant turn"):
        rows_of([{"messages": TALK}], "qwen", chat_template_kwargs={"enable_thinking": False})


def test_a_turn_of_the_weight_0_has_no_loss():
    """OpenAI's key; also where the template marks the assistant's words."""
    chat = [TALK[0], {**TALK[1], "content": "Over there somewhere.", "weight": 0}, TALK[0], {**TALK[1], "weight": 1}]
    for style in ("chatml", trl_data.TEMPLATE):
        assert learned(rows_of([{"messages": chat}], style)[0]).strip().startswith(SAID)
    with pytest.raises(DataError, match="weight 0"):
        Supervised(tokens=Tokens(tokenizer())).rows(Dataset.from_list([{"messages": chat}]))


def test_of_several_templates_the_one_for_tools_or_the_default_is_taken():
    """As transformers does; without a default there is a remedy."""
    several = {"default": CHATML, "tool_use": QWEN}
    assert "next_ferry" in text_of(rows_of([{"messages": TALK, "tools": [FERRY]}], several)[0])
    assert rows_of([{"messages": TALK}], several)[0] == rows_of([{"messages": TALK}])[0]
    with pytest.raises(ConfigError, match="'default'"):
        rows_of([{"messages": TALK}], {"plain": CHATML})


@pytest.mark.parametrize("form", FORMS)
def test_no_row_depends_on_another_record(form):
    """A table gives messages and tools the keys of all records, without values."""
    given, _ = FORMS[form]
    if isinstance(given["messages"], str):
        pytest.skip("a text has no keys of other records")
    own = {"system": None, "tools": [{**FERRY, "strict": None}], **given}
    far = {"type": "function", "function": {"name": "tide", "parameters": {"port": {"default": 2.5}, "a": "b"}}}
    other = {
        "messages": [
            {
                "role": "user",
                "content": given["messages"][0].get("content"),
                "from": "human",
                "value": "x",
                "name": "Ada",
                "weight": 1.0,
                "tool_calls": None,
            },
            {**given["messages"][-1], "note": "?"},
        ],
        "tools": [far],
        "system": "Brief.",
    }
    try:
        together = Dataset.from_list([other, own])
    except pa.ArrowInvalid:  # parts and texts
        pytest.skip("the two do not fit one table")
    check_records(together, DataConfig(path="x", format="chat", max_length=2000), "x")
    alone = rows_of([own], "qwen")[0]
    assert rows_of(list(together), "qwen")[1]["input_ids"] == alone["input_ids"]
    sft = [Supervised(tokens=Tokens(tokenizer("qwen"))).rows(one)[-1] for one in (together, Dataset.from_list([own]))]
    assert sft[0] == sft[1]


@pytest.mark.parametrize("place", ["content", "messages"])
def test_texts_and_parts_in_one_table_are_read_alike(place):
    """`datasets` keeps a place of two kinds as JSON, in which Arrow has quotes around a text."""
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TALK]
    kind = {"role": datasets.Value("string"), "content": datasets.Json()}
    features = datasets.Features({"messages": [kind] if place == "content" else datasets.Json()})
    records = Dataset.from_dict({"messages": [TALK, parts]}, features=features)
    rows = tokenize_records(records, tokenizer(), DataConfig(path="x", format="chat", max_length=2000))
    assert rows[0]["input_ids"] == rows[1]["input_ids"] == rows_of([{"messages": TALK}])[0]["input_ids"]
    assert text_of(Supervised(tokens=Tokens(tokenizer())).rows(records)[1]) == text_of(rows[0])


def test_a_file_of_conversations_is_loaded(tmp_path):
    """As a recipe does, before a model is loaded."""
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(json.dumps({"id": str(n), "conversations": turns(TALK)}) for n in range(3)))
    config = DataConfig(path=str(path), format="chat", columns={"messages": "conversations"}, max_length=2000)
    assert len(load_records(config)) == 3
    path.write_text(json.dumps({"conversations": [{"from": "human"}]}))
    with pytest.raises(DataError, match="record 0: message 0 has no text in 'content'"):
        load_records(config)


@pytest.mark.parametrize("way", ["raw", "sft", "adapter"])
def test_the_released_model_ends_where_a_turn_ends(way, tmp_path):
    """Its generation configuration has the token; that of an adapter lies beside it, and the card's code reads it."""
    made = tokenizer()
    model = trl_data.model()
    model.resize_token_embeddings(len(made))
    model.generation_config = GenerationConfig(eos_token_id=made.eos_token_id)
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = model.name_or_path = str(tmp_path / "base")
    records = Dataset.from_list([{"conversations": turns(TALK)}] * 8)
    kind, name = (trl.SFTConfig, DPSFTTrainer) if way == "sft" else (TrainingArguments, DPTrainer)
    args = trl_data.arguments(kind, tmp_path / "run", **({"max_length": 64} if way == "sft" else {}))
    options = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=2)} if way == "adapter" else {}
    if way != "sft":
        options["data"] = {"max_length": 64}
    run = name(model, args, trl_data.privacy(8), records, processing_class=made, start_is_independent=True, **options)
    run.train()
    run.save_model()
    saved = GenerationConfig.from_pretrained(tmp_path / "run").eos_token_id
    assert saved == [made.eos_token_id, made.convert_tokens_to_ids("<|im_end|>")]
    generator = load_generator(tmp_path / "run")
    assert (
        set(saved) <= set(generator.ends)
        and generator.encode(TALK[:1]) == made(prompt_of_chat(TALK[:1], made)).input_ids[1:]
    )
    assert (str(saved) in (tmp_path / "run" / "README.md").read_text()) == (way == "adapter")
