"""Language models are scored word by word, whatever the batches: against loops over texts, one at a time."""

import json
import math

import numpy as np
import pytest
import torch

from limbeck.data.encoding import encode
from limbeck.data.kinds import KINDS
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from limbeck.evaluation import evaluate, measure, predict, retention
from limbeck.models import load_model, load_tokenizer, with_kind
from tests import toy

WORDS = "AutoModelForCausalLM"


def teacher(family="llama"):
    return toy.teacher(family, labels=2, auto=WORDS)


def told_by_hand(model, ids):
    """Of every token but the first: its negative log-likelihood, and whether it was the likeliest."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    right = torch.tensor(ids[1:])
    losses = -logits.log_softmax(-1)[torch.arange(len(right)), right]
    return losses, logits.argmax(-1) == right


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(toy.words_of()["eval"][:9]) + "\n", "utf8")
    return str(path)


def encoded(kind, path, name, length):
    corpus = load(DataSpec(eval=path, kind=kind), train=False)
    tokenizer = load_tokenizer(name)
    return corpus.task, encode(corpus.evals["dev"], tokenizer, ("input_ids",), length, KINDS[kind])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_perplexity_is_that_of_a_loop_over_blocks(family, text):
    model = load_model(teacher(family))
    task, data = encoded("causal-lm", text, teacher(family), 20)
    assert data.lengths[-1] < 20  # the last block is shorter, and padded in its batch
    blocks = [data.columns["input_ids"][a:b].tolist() for a, b in zip(data.offsets[:-1], data.offsets[1:])]
    losses, hits = (torch.cat(parts) for parts in zip(*(told_by_hand(model, block) for block in blocks)))
    for batch in (1, 3, 64):
        found = evaluate(model, data, task, batch_size=batch)
        assert list(found) == ["perplexity", "accuracy"]
        assert found["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
        assert found["accuracy"] == pytest.approx(100 * hits.double().mean().item())


def test_no_logits_are_kept():
    model = load_model(teacher())
    _, data = encoded("causal-lm", write_texts(), teacher(), 20)
    assert predict(model, data).shape == (len(data.columns["input_ids"]), 2)


def write_texts():
    return toy.write_jsonl(toy.workplace() / "texts.jsonl", [{"text": t} for t in toy.words_of()["eval"][:9]])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_last_words_are_those_of_a_loop_over_passages(family):
    model, tokenizer = load_model(teacher(family)), load_tokenizer(teacher(family))
    task, data = encoded("lambada", write_texts(), teacher(family), 64)
    losses, right = [], []
    for text in toy.words_of()["eval"][:9]:
        ids = tokenizer(text)["input_ids"]
        start, end = len(tokenizer(text.rsplit(" ", 1)[0])["input_ids"]) - 1, len(ids) - 1  # a token stands behind
        nll, hits = told_by_hand(model, ids)
        losses.append(nll[start - 1 : end - 1].sum().item())
        right.append(bool(hits[start - 1 : end - 1].all()))
    found = evaluate(model, data, task, batch_size=4)
    assert list(found) == ["accuracy", "perplexity"]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * np.mean(right))


def test_long_passages_keep_their_end():
    tokenizer = load_tokenizer(teacher())
    _, data = encoded("lambada", write_texts(), teacher(), 6)
    assert data.lengths.max() == 6
    assert tokenizer.truncation_side == "right"
    last = [tokenizer.convert_tokens_to_ids(text.split()[-1]) for text in toy.words_of()["eval"][:9]]
    assert data.columns["labels"][data.columns["labels"] >= 0].tolist() == last


def test_a_diverged_model_loses_and_can_be_written_down():
    task, data = encoded("causal-lm", write_texts(), teacher(), 20)
    told = np.full((len(data.columns["input_ids"]), 2), np.nan, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        found = measure(task, told, data.right)["perplexity"]
    assert found > 1e300
    assert json.loads(json.dumps(found)) == found


def test_less_perplexity_keeps_more():
    assert retention(40.0, 30.0, lower=True) == pytest.approx(75)
    assert retention(30.0, 40.0) == pytest.approx(75)
    assert retention(30.0, None, lower=True) is None


def test_the_model_says_what_is_learnt_from_running_text(text):
    assert with_kind(DataSpec(train=text), teacher()).kind == "causal-lm"
    assert with_kind(DataSpec(train=text, kind="lambada"), teacher()).kind == "lambada"
    assert with_kind(DataSpec(train="x.csv"), teacher()).kind is None
    assert with_kind(DataSpec(train="x.csv", eval="dev-v1.1.JSON"), None).kind == "question-answering"  # SQuAD's layout
    assert with_kind(DataSpec(train="x.json", kind="seq2seq"), teacher()).kind == "seq2seq"
    assert with_kind(DataSpec(train="x.jsonl"), teacher()).kind is None
    assert with_kind(DataSpec(train=text), toy.teacher()).kind is None


def test_one_word_cannot_be_predicted(tmp_path):
    path = toy.write_jsonl(tmp_path / "x.jsonl", [{"text": "word"}])
    assert len(encoded("lambada", path, teacher(), 20)[1]) == 1  # a token stands before it
    tokenizer = load_tokenizer(teacher())
    with pytest.raises(LimbeckError, match=r"one word.*Take the row out"):
        KINDS["lambada"].tokens(
            tokenizer,
            load(DataSpec(eval=path, kind="lambada"), train=False).evals["dev"],
            stride=0,
            add_special_tokens=False,
        )
