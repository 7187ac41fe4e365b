"""ROUGE-L and BLEU, against cases worked by hand."""

from math import exp

import pytest

from limbeck.data.rouge_bleu import bleu_score, rouge_l_score


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("The cat, sat!", "the cat sat", 1.0),  # by words alone
        ("police kill the gunman", "police killed the gunman", 3 / 4),  # police … the gunman: 3 of 4 on either side
        ("the gunman kill police", "police killed the gunman", 2 / 4),  # the gunman
        ("the cat", "the big old cat sat", 2 * 2 / 7),  # not next to each other, but in order
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("", "", 1.0),
    ],
)
def test_rouge_l(text, reference, expected):
    assert rouge_l_score(text, reference) == pytest.approx(expected)


def test_bleu_of_the_right_texts_is_one():
    texts = ["the cat sat on the mat", "a dog, too, is here"]
    assert bleu_score(texts, texts) == pytest.approx(1)


def test_bleu_counts_each_word_of_the_reference_once():
    # 4 of 7 words, 3 of 6 pairs, 2 of 5 triples, 1 of 4 quadruples; as long as the reference
    text, reference = "the cat sat on on the the", "the cat sat on a mat ."
    assert bleu_score([text], [reference]) == pytest.approx((4 / 7 * 3 / 6 * 2 / 5 * 1 / 4) ** (1 / 4))


def test_bleu_takes_off_for_short_texts():
    # every n-gram is right, and 4 words stand for 6
    assert bleu_score(["the cat sat on"], ["the cat sat on the mat"]) == pytest.approx(exp(1 - 6 / 4))


def test_bleu_is_of_all_texts_together():
    # of 1 to 4 words: 5 of 8, 3 of 6, 2 of 4, 1 of 2; the mean of two would be 1/2
    found = bleu_score(["a b c d", "x x x e"], ["a b c d", "e f g h"])
    assert found == pytest.approx((5 / 8 * 3 / 6 * 2 / 4 * 1 / 2) ** (1 / 4))


def test_bleu_without_a_common_quadruple_is_zero():
    assert bleu_score(["the cat sat"], ["the cat sat"]) == 0
    assert bleu_score([""], ["the cat"]) == 0
