"""BLEU and ROUGE are the libraries' own values; exact match and F1 follow their definitions."""

import pytest

from dpllm.training.evaluation import TEXT_METRICS, bleu, exact_match, plain, rouge, token_f1

TEXTS = ["the Mill is a cheap pub near the river", "Aromi serves fast food"]
REFERENCES = [
    ["the Mill is a cheap pub by the river", "near the river is a pub, the Mill", "a cheap pub is the Mill"],
    ["Aromi serves French food"],
]


def test_bleu_is_the_librarys_value_over_all_references_of_each_text():
    """Texts with fewer references are not compared with others' references, nor with an empty text."""
    sacrebleu = pytest.importorskip("sacrebleu")
    streams = [[REFERENCES[0][0], REFERENCES[1][0]], [REFERENCES[0][1], None], [REFERENCES[0][2], None]]
    assert bleu(TEXTS, REFERENCES) == sacrebleu.corpus_bleu(TEXTS, streams).score
    first = [own[:1] for own in REFERENCES]
    assert bleu(TEXTS, REFERENCES) > bleu(TEXTS, first) == sacrebleu.corpus_bleu(TEXTS, [streams[0]]).score


def test_bleu_of_known_text_is_known():
    """One text of five words, of which four are the reference's: (4/5 · 3/4 · 2/3 · 1/2) ** (1/4)."""
    pytest.importorskip("sacrebleu")
    assert bleu(["a b c d e"], [["a b c d x"]]) == pytest.approx(100 * 0.2**0.25)
    assert bleu(["a b c d"], [["a b c d"]]) == pytest.approx(100)


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_the_librarys_value_for_the_closest_reference(kind):
    """The mean over texts of the largest F-measure."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer([kind])
    best = [
        max(scorer.score(other, text)[kind].fmeasure for other in own)
        for text, own in zip(TEXTS, REFERENCES, strict=True)
    ]
    assert rouge(kind, TEXTS, REFERENCES) == TEXT_METRICS[kind](TEXTS, REFERENCES) == pytest.approx(50 * sum(best))


def test_rouge_of_known_text_is_known():
    """Three of four words in the same order: F = 3/4; two of three pairs of words."""
    pytest.importorskip("rouge_score")
    assert rouge("rougeL", ["one two three four"], [["one two three five"]]) == pytest.approx(75)
    assert rouge("rouge2", ["one two three four"], [["one two three five"]]) == pytest.approx(200 / 3)


def test_exact_match_and_f1_of_answers():
    """Any reference counts; an empty answer is right only where there is none."""
    assert exact_match(["fox", ""], [["dog", "fox"], [""]]) == 1
    assert token_f1(["", "fox"], [[""], [""]]) == 0.5
    assert token_f1(["red red fox"], [["red fox"]]) == pytest.approx(0.8)  # a word counts as often as in both
    assert plain("An  Answer: the “end”.") == "answer “end”"
