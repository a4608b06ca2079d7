r"""Index of the contents of records: which of them occur in other text, and which are copies of others.

Place in the flow: on the records as they are read, before their tokens. Everything that asks whether two texts are the
same asks here: copies within the private data, public text to train on, held-out records, the public parts of a recipe.

A text is its words: NFKC, lower case, without punctuation, markup and HTML entities. Its 8-grams of words are hashed.
Scripts without spaces have no words: two characters of Chinese or Japanese, and four of Thai, Lao, Khmer, Burmese or
Tibetan, count as one word, and their n-grams begin at every character.

A record *occurs* in other text if that text has

- at least half of its own n-grams near each other, or a run of about 25 words of a longer record; or
- the whole record, or one of its lines or messages of 8 words or more that no other unit has, as a text or a line. As
  a sentence of a longer line a record counts from 5 words on, and if few units have it.

An n-gram that more than a hundredth of the units have (more than 2 to 10 units) is nobody's own, such as a template or
a common system prompt, and is left out. A record with fewer than 8 words can only occur as a whole, and one with fewer
than 5 only if few units have it: "Thank you" is nobody's own. "Half" finds records that were cut, joined, prefixed or
wrapped. Of templated notes of different patients, about 1 in 300 share so much.

Above `MOST_NGRAMS` the index keeps those with the smallest hashes: copies of one text keep the same. It then finds most
records and not every one. Hashes are of private text: they are never written or sent.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

NGRAM = 8
"""Words of an n-gram."""
MOST_NGRAMS = 20_000_000
"""An index with more n-grams, or lines, keeps those with small hashes."""
FEWEST_WORDS = 5
"""Words of a record that is looked for, as a whole, in a prompt; shorter ones are greetings and phrases."""

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]

_WORD = 4  # weight of a word with spaces around it; characters of other scripts weigh less
_SPAN = NGRAM * _WORD
_RUN = 25 - NGRAM + 1  # n-grams of a run of 25 words
_CHARACTERS = 25  # of a copy: of real chat messages, 0.7 % are copies from here on, and 1.5 % from 20 on
_LONGEST_PREFIX = 3  # words by which copies may differ
_CHUNK = 1 << 20  # bytes
_LONGEST = 1 << 22  # bytes of a text that is read at once
_NEWLINE, _LABEL, _STOP = 10, 31, 33  # marks between words, besides the space: of a line, a label, a sentence
_BLOCK = r"(?i)</?(?:p|div|br|hr|li|ul|ol|dl|dt|dd|h[1-6]|t[dhr]|table|tbody|thead|body|html|head|title|pre|blockquote|section|article|main)\b[^<>]*>"  # noqa: E501
_TAG = r"(?i)</?(?:a|abbr|acronym|b|bdi|bdo|big|button|center|cite|code|del|dfn|em|font|form|i|img|input|ins|kbd|label|link|mark|meta|nav|nobr|o:p|q|s|samp|script|small|span|strike|strong|style|sub|sup|svg|time|tt|u|var|wbr)\b[^<>]*>|<!(?:--|doctype)[^<>]*>"  # noqa: E501
"""Tags of HTML around text. The words of other tags are contents, as in XML with all values in attributes."""
_ENTITY = r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]+);"
_UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}])"


def _ascii_table() -> NDArray[np.uint8]:
    table = np.full(256, 32, dtype=np.uint8)
    for byte in range(256):
        if chr(byte).isalnum() and byte < 128:
            table[byte] = ord(chr(byte).lower())
    table[128:] = np.arange(128, 256)
    table[_NEWLINE], table[[ord(c) for c in ".!?"]], table[[ord(c) for c in ":)]>|"]] = _NEWLINE, _STOP, _LABEL
    return table


def _weights() -> NDArray[np.int64]:
    """Return the weight of a word by its first two bytes in UTF-8."""
    table = np.full(1 << 16, _WORD, dtype=np.int64)
    for lead, first, last, weight in (
        (0xE3, 0x80, 0x84, 2),  # kana
        (0xE3, 0x90, 0xBF, 2),  # Han, also the next lines
        *((lead, 0x80, 0xBF, 2) for lead in range(0xE4, 0xEA)),
        (0xEF, 0xA4, 0xAB, 2),
        (0xF0, 0xA0, 0xBF, 2),
        (0xE0, 0xB8, 0xBF, 1),  # Thai, Lao, Tibetan
        (0xE1, 0x80, 0x82, 1),  # Burmese
        (0xE1, 0x9E, 0x9F, 1),  # Khmer
    ):
        table[(lead << 8) + first : (lead << 8) + last + 1] = weight
    return table


_ASCII, _WEIGHTS = _ascii_table(), _weights()
_BYTES: Hashes = np.random.default_rng(1).integers(0, 1 << 64, 256, dtype=np.uint64)
_BASES = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)  # odd: they have inverses mod 2^64


@lru_cache(maxsize=6)
def _powers(base: int, number: int) -> tuple[Hashes, Hashes]:
    """Return base^0, base^1, … and their inverses mod 2^64."""
    found = []
    for one in (base, pow(base, -1, 1 << 64)):
        powers = np.full(number, one, dtype=np.uint64)
        powers[0] = 1
        found.append(np.cumprod(powers, dtype=np.uint64))
    return found[0], found[1]


class _Sums:
    """Hashes of ranges of a sequence, from its prefix sums: Σ_k x_k base^k mod 2^64."""

    def __init__(self, values: Hashes, base: int) -> None:
        number = next((size for size in (1 << 12, 1 << 18, 1 << 21) if size > len(values)), len(values) + 1)
        powers, self._inverse = _powers(base, number)
        self._sums = np.empty(len(values) + 1, dtype=np.uint64)
        self._sums[0] = 0
        np.cumsum(values * powers[: len(values)], out=self._sums[1:])

    def of(self, first: Numbers, end: Numbers) -> Hashes:
        """Return a well-mixed hash (splitmix64) of each range."""
        found = (self._sums[end] - self._sums[first]) * self._inverse[first]
        found ^= found >> np.uint64(30)
        found *= np.uint64(0xBF58476D1CE4E5B9)
        found ^= found >> np.uint64(27)
        found *= np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
        return found


class _Words:
    """The words of some texts, one after the other."""

    def __init__(self, texts: pa.LargeStringArray) -> None:
        plain = _plain(texts)
        offsets = np.frombuffer(plain.buffers()[1], dtype=np.int64)[plain.offset : plain.offset + len(plain) + 1]
        data = plain.buffers()[2]
        held = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
        self._bytes = _ASCII[held[offsets[0] : offsets[-1]]]
        offsets = offsets - offsets[0]
        letters = self._bytes > _STOP
        begins = letters.copy()
        begins[1:] &= ~letters[:-1]
        inside = offsets[:-1][offsets[:-1] < len(letters)]
        begins[inside] = letters[inside]
        ends = letters.copy()
        ends[:-1] &= ~letters[1:] | begins[1:]
        self._begins, self._letters = np.flatnonzero(begins), letters
        self._ends = np.flatnonzero(ends) + 1
        self._sums = _Sums(_Sums(_BYTES[self._bytes], _BASES[0]).of(self._begins, self._ends), _BASES[1])
        self.num = len(self._begins)
        self.texts = np.searchsorted(self._begins, offsets)
        """(num_texts + 1,): the word at which each text begins."""
        self._total = self._weigh()

    def _weigh(self) -> Numbers | None:
        """Return the weights of all words before each one; None if all are words with spaces."""
        if not (self._bytes > 127).any():
            return None
        first = self._bytes[self._begins].astype(np.int64) << 8
        first |= self._bytes[np.minimum(self._begins + 1, len(self._bytes) - 1)]
        return np.concatenate([[0], np.cumsum(_WEIGHTS[first])])

    def weight(self, first: Numbers, end: Numbers) -> Numbers:
        """Return the weights of ranges of words."""
        return (end - first) * _WORD if self._total is None else self._total[end] - self._total[first]

    def characters(self, first: Numbers, end: Numbers) -> Numbers:
        """Return about the number of characters of ranges of words, and 0 for none."""
        place = np.minimum(first, max(self.num - 1, 0))
        return np.where(end > first, self._ends[end - 1] - self._begins[place], 0) if self.num else first * 0

    def labelled(self, places: Numbers) -> NDArray[np.bool_]:
        """Return whether a mark such as a colon, a full stop or the end of a line is before each of some words."""
        marks = np.cumsum((self._bytes != 32) & ~self._letters)
        return marks[self._begins[places] - 1] > marks[self._ends[places - 1] - 1]

    def hashes(self, first: Numbers, end: Numbers) -> Hashes:
        """Return the hashes of ranges of words."""
        return self._sums.of(first, end)

    def ngram_ends(self) -> Numbers:
        """Return (num_ngrams,) the end of the n-gram that begins at each word; the last words begin none."""
        if self._total is None:
            return np.arange(NGRAM, self.num + 1)
        ends = np.searchsorted(self._total, self._total[: self.num] + _SPAN)
        return ends[: np.searchsorted(ends, self.num, side="right")]

    def line_bounds(self) -> Numbers:
        """Return the words at which a text or a line begins, and the end of all."""
        return np.union1d(self.texts, np.searchsorted(self._begins, np.flatnonzero(self._bytes == _NEWLINE)))

    def sentence_bounds(self) -> Numbers:
        """Return the words at which a text, a line or a sentence begins, and the end of all."""
        stops = np.flatnonzero(self._bytes == _STOP)
        after = np.minimum(stops + 1, len(self._bytes) - 1)
        stops = stops[~self._letters[after]]
        return np.union1d(self.line_bounds(), np.searchsorted(self._begins, stops))


def _plain(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return texts without markup; those that are not ASCII are in lower case, in NFKC, and without punctuation."""
    texts = _changed(texts, pc.match_substring(texts, "&"), _unescaped)
    texts = _changed(texts, pc.match_substring(texts, "<"), _untagged)
    return _changed(texts, pc.invert(pc.string_is_ascii(texts)), _folded)


def _changed(texts: pa.LargeStringArray, which: pa.BooleanArray, change: Any) -> pa.LargeStringArray:
    if not pc.any(which).as_py():
        return texts
    return pc.replace_with_mask(texts, which, change(texts.filter(which)))


def _unescaped(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    which = pc.match_substring_regex(texts, _ENTITY)
    return _changed(
        texts, which, lambda found: pa.array([html.unescape(text) for text in found.to_pylist()], pa.large_string())
    )


def _untagged(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    return pc.replace_substring_regex(pc.replace_substring_regex(texts, _BLOCK, "\n"), _TAG, " ")


def _folded(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    texts = pc.utf8_lower(pc.utf8_normalize(texts, "NFKC"))
    for old, new in (("ß", "ss"), ("ς", "σ"), ("。", ". "), ("\u2028", "\n"), ("\u2029", "\n")):
        texts = pc.replace_substring(texts, old, new)
    texts = pc.replace_substring_regex(texts, r"[\x{00ad}\x{200b}-\x{200f}\x{2060}\x{feff}]+", "")
    texts = _changed(
        texts,
        pc.match_substring_regex(texts, _UNSPACED),
        lambda found: pc.replace_substring_regex(found, _UNSPACED, r" \1 "),
    )
    return pc.replace_substring_regex(texts, r"[^\p{L}\p{N}\p{M}\n.!?:)\]>|]+", " ")


@dataclass(frozen=True)
class _Chunk:
    """Some records, one after the other."""

    words: _Words
    records: Numbers
    """(n,): the number of each record; one of more than `_LONGEST` bytes is in several pieces."""
    bounds: Numbers
    """(n + 1,): the word at which each record begins, and the end of all."""


def _chunks(records: datasets.Dataset, columns: Sequence[str]) -> Iterator[_Chunk]:
    """Yield the records in chunks of about a mebibyte, each with all texts of its records."""
    number, rows = 0, 1000
    table = records.select_columns(list(columns)).with_format("arrow")
    while number < len(records):
        batch = table[number : number + rows]
        texts, owners = _texts_of(batch, columns)
        own = np.arange(batch.num_rows)
        if len(texts) and pc.max(pc.binary_length(texts)).as_py() > _LONGEST:
            texts, owners, own = _pieces(texts, owners)
        total = np.cumsum(np.bincount(owners, pc.binary_length(texts).to_numpy(zero_copy_only=False), len(own)))
        begin = 0
        while begin < len(own):
            before = total[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(total, before + _CHUNK, side="right")))
            first, last = np.searchsorted(owners, [begin, end])
            words = _Words(texts.slice(first, last - first))
            places = np.searchsorted(owners[first:last], np.arange(begin, end + 1))
            yield _Chunk(words, number + own[begin:end], words.texts[places])
            begin = end
        number += batch.num_rows
        rows = int(min(100_000, max(1, rows * 8 * _CHUNK // max(int(total[-1]), 1))))


def _pieces(texts: pa.LargeStringArray, owners: Numbers) -> tuple[pa.LargeStringArray, Numbers, Numbers]:
    """Return texts of at most `_LONGEST` characters, (num_texts,) the piece of each, and the record of each piece."""
    pieces: list[str] = []
    own: list[int] = []
    numbers: list[int] = []
    for text, owner in zip(texts.to_pylist(), owners.tolist(), strict=True):
        for begin in range(0, max(len(text), 1), _LONGEST):
            if begin or not own or own[-1] != owner:
                own.append(owner)
            pieces.append(text[begin : begin + _LONGEST])
            numbers.append(len(own) - 1)
    return pa.array(pieces, pa.large_string()), np.array(numbers), np.array(own)


def _texts_of(batch: pa.Table, columns: Sequence[str]) -> tuple[pa.LargeStringArray, Numbers]:
    """Return the texts of a batch of records, and (num_texts,) the record of each, which rises."""
    arrays, owners = [], []
    for column in columns:
        for texts, own in _strings(batch[column].combine_chunks(), np.arange(batch.num_rows)):
            arrays.append(texts)
            owners.append(own)
    if not arrays:
        return pa.array([], pa.large_string()), np.zeros(0, dtype=np.int64)
    all_owners = np.concatenate(owners)
    texts = pa.concat_arrays(arrays)
    if len(arrays) > 1:
        order = np.argsort(all_owners, kind="stable")
        texts, all_owners = texts.take(pa.array(order)), all_owners[order]
    return texts, all_owners


def _strings(values: pa.Array, owners: Numbers) -> Iterator[tuple[pa.LargeStringArray, Numbers]]:
    """Yield the texts in an array of texts, messages, or lists of words, texts or messages, and their records."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if values.null_count:
        owners, values = owners[values.is_valid().to_numpy(zero_copy_only=False)], values.drop_null()
    kind = values.type
    if pa.types.is_dictionary(kind):
        yield from _strings(values.dictionary_decode(), owners)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        yield values.cast(pa.large_string()), owners
    elif pa.types.is_struct(kind):
        for name in ("content", "text", "value"):
            if kind.get_field_index(name) >= 0:
                yield from _strings(pc.struct_field(values, name), owners)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inside = kind.value_type
        if pa.types.is_string(inside) or pa.types.is_large_string(inside):  # the words of a text
            inside = pa.large_list(pa.large_string())
            yield pc.binary_join(values.cast(inside), pa.scalar(" ", pa.large_string())), owners
        else:
            parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
            yield from _strings(values.flatten(), owners[parents])


class _Kept:
    """Hashes with two numbers each, of which at most about `most` are kept: those with the smallest hashes."""

    def __init__(self, most: int) -> None:
        self._most, self._parts, self._size = most, list[tuple[Hashes, NDArray[Any]]](), 0
        self.shift = 0
        """The share 2^-shift of all hashes is kept."""

    def add(self, hashes: Hashes, owners: NDArray[Any]) -> None:
        """Add hashes, with a number each."""
        self._parts.append(self._small(hashes, owners))
        self._size += len(self._parts[-1][0])
        while self._size > self._most:
            self.shift += 1
            self._parts = [self._small(*part) for part in self._parts]
            self._size = sum(len(part[0]) for part in self._parts)

    def _small(self, hashes: Hashes, owners: NDArray[Any]) -> tuple[Hashes, NDArray[Any]]:
        if self.shift == 0:
            return hashes, owners
        kept = hashes < np.uint64(1 << (64 - self.shift))
        return hashes[kept], owners[kept]

    def sorted(self, shift: int = 0) -> tuple[Hashes, NDArray[np.int32]]:
        """Return all that is kept, by hash; with a larger `shift` than its own, the smaller share."""
        if shift > self.shift:
            self.shift = shift
            self._parts = [self._small(*part) for part in self._parts]
        hashes = np.concatenate([np.zeros(0, np.uint64), *(part[0] for part in self._parts)])
        owners = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in self._parts)])
        self._parts = []
        order = np.argsort(hashes)
        return hashes[order], owners[order]


class _Table:
    """Sorted hashes with the numbers of those that have them; each unit has a hash once."""

    def __init__(self, hashes: Hashes, owners: NDArray[np.int32], units: NDArray[Any], most: int) -> None:
        """Build the table.

        Args:
            hashes: (n,) sorted.
            owners: (n,) the number of the owner of each.
            units: the unit of each owner.
            most: an entry that more units have is marked as common.
        """
        new = np.ones(len(hashes), dtype=bool)
        new[1:] = hashes[1:] != hashes[:-1]
        several = np.zeros(len(hashes), dtype=bool)
        several[:-1] = ~new[1:]
        several |= ~new
        places = np.flatnonzero(several)
        order = places[np.lexsort((owners[places], units[owners[places]], hashes[places]))]
        owners[places] = owners[order]
        again = np.zeros(len(hashes), dtype=bool)
        again[places[1:]] = ~new[places[1:]] & (units[owners[places[1:]]] == units[owners[places[:-1]]])
        hashes, self.owners, new = hashes[~again], owners[~again], new[~again]
        begins = np.flatnonzero(new)
        self.hashes = hashes[begins]
        self.begins = np.append(begins, len(hashes)).astype(np.int32)
        self.common = np.diff(self.begins) > most
        """(num_different,): whether many units have a hash."""
        self._bits = min(26, max(10, len(self.hashes).bit_length() + 3))
        marked = np.zeros(1 << self._bits, dtype=bool)
        marked[self._high(self.hashes)] = True
        self._marked = np.packbits(marked)  # most hashes of other text are found to be absent here

    def _high(self, hashes: Hashes) -> NDArray[np.int64]:
        return (hashes >> np.uint64(64 - self._bits)).astype(np.int64)

    def without_common(self) -> None:
        """Remove the entries that many units have."""
        counts = np.diff(self.begins)
        self.owners = self.owners[np.repeat(~self.common, counts)]
        self.hashes, counts = self.hashes[~self.common], counts[~self.common]
        self.begins = np.append(0, np.cumsum(counts)).astype(np.int32)
        self.common = self.common[:0]

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """Return the places of those hashes that are in the table, and where they are in it."""
        high = self._high(hashes)
        places = np.flatnonzero(self._marked[high >> 3] & (128 >> (high & 7)))
        if not len(self.hashes):
            return places[:0], places[:0]
        found = np.searchsorted(self.hashes, hashes[places])
        same = self.hashes[np.minimum(found, len(self.hashes) - 1)] == hashes[places]
        return places[same], found[same]

    def owners_of(self, found: Numbers) -> tuple[Numbers, NDArray[np.int32]]:
        """Return all owners of some entries, with the place in `found` of each."""
        counts = self.begins[found + 1] - self.begins[found]
        places = np.repeat(np.arange(len(found)), counts)
        within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        return places, self.owners[self.begins[found][places] + within]


class ContentIndex:
    """The contents of records, to find them in other text. See the module for when a record occurs in a text.

    >>> records = datasets.Dataset.from_dict({"text": ["I was ill in May, and my son took me to Dr. Lee.", "Thanks!"]})
    >>> index = ContentIndex(records, ["text"])
    >>> index.occurs_in("For example: <b>i was ill in may; and my son took me to dr lee</b>, or: thanks")
    True
    >>> index.occurs_in("Write about a doctor. Thanks!")
    False
    """

    def __init__(self, records: datasets.Dataset, columns: Sequence[str], units: NDArray[Any] | None = None) -> None:
        """Read the records once.

        Args:
            records: the records.
            columns: those with texts, messages or lists of words (`dpllm.data.records.text_columns`).
            units: (num_records,) the unit of each; None: a record is a unit.
        """
        self.num_records = len(records)
        units = np.arange(len(records)) if units is None else np.unique(units, return_inverse=True)[1]
        num_units = int(units.max()) + 1 if len(units) else 0
        most = max(2, min(10, num_units // 100))
        ngrams, wholes = _Kept(MOST_NGRAMS), _Kept(MOST_NGRAMS)
        totals = np.zeros(self.num_records, dtype=np.int64)
        lines: list[Numbers] = []
        kinds: list[NDArray[np.int8]] = []
        for chunk in _chunks(records, columns):
            hashes, record = _ngrams(chunk)
            ngrams.add(hashes, record.astype(np.int32))
            begin = int(chunk.records[0])
            totals[begin : int(chunk.records[-1]) + 1] += np.bincount(
                record - begin, minlength=int(chunk.records[-1]) + 1 - begin
            )
            hashes, record, kind = _wholes(chunk)
            wholes.add(hashes, (np.arange(len(hashes)) + sum(map(len, lines))).astype(np.int32))
            lines.append(record)
            kinds.append(kind)
        self._table = _Table(*ngrams.sorted(), units, most)
        self._shift = ngrams.shift
        self._lines = np.concatenate([np.zeros(0, np.int64), *lines])
        """(num_lines,): the record of each line or whole record."""
        kind = np.concatenate([np.zeros(0, np.int8), *kinds])
        self.long = np.zeros(self.num_records, dtype=bool)
        """(num_records,): whether each record has at least `FEWEST_WORDS` words."""
        self.long[self._lines[kind == 1]] = True
        self._whole = _Table(*wholes.sorted(), units[self._lines], most)
        kind = kind[self._whole.owners]
        kind = np.minimum.reduceat(kind, self._whole.begins[:-1]) if len(kind) else kind
        units_of_each = np.diff(self._whole.begins)
        own_line = (kind == 2) & (units_of_each == 1)
        self._counts = own_line | (kind == 1) | ((kind == 0) & (units_of_each <= most))
        self._records = (kind == 1) & (units_of_each <= most)
        """(num_different,): whether a whole record is long enough to be one person's own, and few units have it."""
        self._rare = self._records | own_line
        self._table.without_common()
        own = np.bincount(self._table.owners, minlength=self.num_records)
        self._window = np.where(own > 2 * (_RUN >> self._shift), _RUN * 4 // 3, 2 * totals + NGRAM)
        """(num_records,): words between the first and the last n-gram of an occurrence, at most."""
        run = max(4, _RUN >> self._shift)
        self._need = np.maximum(np.minimum((own + 1) // 2, run), 1)
        """(num_records,): n-grams of an occurrence, at least."""
        self._nearly_all = np.maximum(np.minimum(own - own // 8, run), 1)

    def found_in(self, others: datasets.Dataset, columns: Sequence[str], nearly_all: bool = False) -> NDArray[np.bool_]:
        """Return (num_records,) whether each record occurs in other records, which are read in chunks.

        Args:
            others: the other records.
            columns: those of them with texts.
            nearly_all: count a record only if nearly all of its own n-grams are there, or if it is there as a whole,
                has `FEWEST_WORDS` words, and few units have it. Texts about one topic, by different people, share less.
        """
        if nearly_all:
            return self._found(_chunks(others, columns), self._records, self._nearly_all)
        return self._found(_chunks(others, columns), self._counts, self._need)

    def occurs_in(self, *texts: str) -> bool:
        """Return whether a record of at least `FEWEST_WORDS` words that few units have occurs in one of some texts."""
        others = datasets.Dataset.from_dict({"text": texts})
        return bool(self._found(_chunks(others, ["text"]), self._rare, self._need).any())

    def _found(self, chunks: Iterable[_Chunk], wholes: NDArray[np.bool_], need: Numbers) -> NDArray[np.bool_]:
        found = np.zeros(self.num_records, dtype=bool)
        seen = np.zeros(len(self._whole.hashes), dtype=bool)
        for chunk in chunks:
            ends = chunk.words.ngram_ends()  # also across the ends of texts: these may be the lines of a record
            places, entries = self._table.find(chunk.words.hashes(np.arange(len(ends)), ends))
            found[self._near(places, entries, need)] = True
            for bounds in (chunk.bounds, chunk.words.texts, chunk.words.line_bounds()):
                seen[self._whole.find(chunk.words.hashes(bounds[:-1], bounds[1:]))[1]] = True
            bounds = chunk.words.sentence_bounds()
            sentences = self._whole.find(chunk.words.hashes(bounds[:-1], bounds[1:]))[1]
            seen[sentences[self._rare[sentences]]] = True
        _, lines = self._whole.owners_of(np.flatnonzero(seen & wholes))
        found[self._lines[lines]] = True
        return found

    def _near(self, places: Numbers, entries: Numbers, need: Numbers) -> Numbers:
        """Return the records of which enough n-grams are near each other in a text.

        Args:
            places: (n,) words of the text at which n-grams begin that are in the index; they rise.
            entries: (n,) where they are in the index.
            need: (num_records,) n-grams of an occurrence, at least.
        """
        where, owners = self._table.owners_of(entries)
        order = np.argsort(owners, kind="stable")
        places, owners = places[where[order]], owners[order]
        last = np.arange(len(owners)) + need[owners] - 1
        first = np.flatnonzero(last < len(owners))
        last = last[first]
        near = (owners[first] == owners[last]) & (places[last] - places[first] <= self._window[owners[first]])
        return owners[first[near]]


def _ngrams(chunk: _Chunk) -> tuple[Hashes, Numbers]:
    """Return the hashes of the n-grams within the texts of each record, and (n,) the record of each.

    If all texts of a record are shorter than an n-gram, the n-grams are those of its texts together.
    """
    words = chunk.words
    first, end = words.texts[:-1], words.texts[1:]
    long = words.weight(first, end) >= _SPAN
    of_text = np.searchsorted(chunk.bounds, first, side="right") - 1
    together = np.ones(len(chunk.records), dtype=bool)
    together[of_text[long]] = False
    ends = words.ngram_ends()
    begins = np.arange(len(ends))
    record = np.searchsorted(chunk.bounds, begins, side="right") - 1
    text = np.searchsorted(words.texts, begins, side="right") - 1
    limit = np.where(together[record], chunk.bounds[record + 1], words.texts[text + 1])
    inside = ends <= limit
    return words.hashes(begins[inside], ends[inside]), chunk.records[record[inside]]


def _wholes(chunk: _Chunk) -> tuple[Hashes, Numbers, NDArray[np.int8]]:
    """Return the hashes of whole records, and of lines of 8 words or more.

    Returns:
        (n,) the hashes; (n,) the record of each; (n,) 0 for a short record, 1 for a longer one, 2 for a line of it.
    """
    words, bounds = chunk.words, chunk.words.line_bounds()
    first, end = chunk.bounds[:-1], chunk.bounds[1:]
    full = np.flatnonzero(end > first)
    begins, ends = bounds[:-1], bounds[1:]
    line = words.weight(begins, ends) >= _SPAN
    begins, ends = begins[line], ends[line]
    record = np.searchsorted(chunk.bounds, begins, side="right") - 1
    part = (begins > first[record]) | (ends < end[record])
    begins, ends, record = begins[part], ends[part], record[part]
    size = words.weight(first[full], end[full])
    kinds = np.concatenate([size >= FEWEST_WORDS * _WORD, np.full(len(record), 2)]).astype(np.int8)
    hashes = np.concatenate([words.hashes(first[full], end[full]), words.hashes(begins, ends)])
    return hashes, chunk.records[np.concatenate([full, record])], kinds


def count_copies(records: datasets.Dataset, columns: Sequence[str], units: NDArray[Any] | None = None) -> int:
    """Return the number of records that are copies of an earlier one, apart from case, punctuation and spaces.

    Records of fewer than 25 characters do not count. A copy may begin with a label of up to three words, such as
    "User:". Copies within one unit do not count.

    Args:
        records: the records.
        columns: those with texts.
        units: (num_records,) the unit of each; None: a record is a unit.

    >>> texts = ["A walk in the big park today", "a walk -- in the big PARK today!", "Al: a walk in the big park today"]
    >>> count_copies(datasets.Dataset.from_dict({"text": texts}), ["text"])
    2
    """
    unit = np.arange(len(records)) if units is None else np.unique(units, return_inverse=True)[1]
    wholes, shorter = _Kept(MOST_NGRAMS), _Kept(MOST_NGRAMS)
    for chunk in _chunks(records, columns):
        words, first, end = chunk.words, chunk.bounds[:-1], chunk.bounds[1:]
        kept = np.flatnonzero(words.characters(first, end) >= _CHARACTERS)
        first, end, record = first[kept], end[kept], chunk.records[kept].astype(np.int32)
        wholes.add(words.hashes(first, end), record)
        for cut in range(1, _LONGEST_PREFIX + 1):
            labelled = np.flatnonzero(words.weight(first, end) >= _SPAN // 2 + cut * _WORD)
            labelled = labelled[words.labelled(first[labelled] + cut)]
            shorter.add(words.hashes(first[labelled] + cut, end[labelled]), record[labelled])
    shift = max(wholes.shift, shorter.shift)
    table = _Table(*wholes.sorted(shift), unit, 1)
    copies = np.zeros(len(records), dtype=bool)
    copies[table.owners] = True
    copies[table.owners[table.begins[:-1]]] = False
    cuts, longer = shorter.sorted(shift)
    places, found = table.find(cuts)
    where, same = table.owners_of(found)
    longer = longer[places[where]]
    copies[longer[unit[longer] != unit[same]]] = True
    return int(copies.sum()) << shift
