"""Questions from SQuAD's files, windows of their contexts, and its scores."""

import json
import re
import string
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from limbeck.data import squad
from limbeck.data.encoding import encode
from limbeck.data.kinds import KINDS
from limbeck.data.kinds.question_answering import LONGEST, Answers, Asked
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec
from limbeck.data.windows import cut
from limbeck.errors import LimbeckError
from limbeck.evaluation import measure
from tests.toy import write_jsonl

KIND = KINDS["question-answering"]
CONTEXT = "The fox, in May, beat an old hen; the hen beat nobody."
LAYOUT = {
    "version": "v2.0",
    "data": [
        {
            "title": "Fox",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Who beat a hen?",
                            "answers": [{"text": "The fox", "answer_start": 0}],
                        },
                        {"id": "q2", "question": "Why?", "is_impossible": True, "answers": [], "plausible_answers": []},
                    ],
                },
                {
                    "context": "Ann won.",
                    "qas": [
                        {"id": "q3", "question": "Who won?", "answers": [{"text": "Ann", "answer_start": 3}]},
                    ],
                },
            ],
        }
    ],
}


def write_json(path, layout=LAYOUT):
    path.write_text(json.dumps(layout), "utf8")
    return str(path)


# reading


def test_squads_own_layout(tmp_path):
    corpus = load(DataSpec(eval=write_json(tmp_path / "dev-v2.0.json")), train=False)
    assert (corpus.task.kind, corpus.task.metrics) == ("question-answering", tuple(KIND.metrics))
    dev = corpus.evals["dev"]
    assert dev.text == ["Who beat a hen?", "Why?", "Who won?"]
    assert dev.text_pair == [CONTEXT, CONTEXT, "Ann won."]
    assert dev.labels.tolist() == [
        Answers("q1", ("The fox",), (0,)),
        Answers("q2", (), ()),
        Answers("q3", ("Ann",), (3,)),
    ]
    said = "\n".join(corpus.notes)
    assert "dev: 1 of the questions have no answer" in said
    assert "1 questions, the first of them q3, have no answer that stands at its answer_start" in said


def test_the_hubs_tables(tmp_path):
    answers = [
        {"text": ["fox", "The fox"], "answer_start": [4, 0]},
        {"text": ["May", ""], "answer_start": [12, 0]},
    ]
    rows = [{"question": "Who?", "context": CONTEXT, "answers": one} for one in answers]
    corpus = load(DataSpec(eval=write_jsonl(tmp_path / "x.jsonl", rows)), train=False)
    assert corpus.task.metrics == ("f1", "exact")
    assert corpus.evals["dev"].labels.tolist() == [
        Answers("0", ("fox", "The fox"), (4, 0)),
        Answers("1", ("May",), (12,)),
    ]
    renamed = [{"q": r["question"], "c": r["context"], "a": r["answers"]} for r in rows]
    spec = DataSpec(eval=write_jsonl(tmp_path / "y.jsonl", renamed), kind=KIND.name, text="q", text_pair="c", label="a")
    assert load(spec, train=False).evals["dev"].labels.tolist() == corpus.evals["dev"].labels.tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answers": []}, "answered from a context.*--text-pair"),
        ({"question": "q", "context": "", "answers": []}, "row 1 has nothing in one of question, context, answers"),
        ({"question": "q", "context": "c"}, "--label"),
        ({"question": "q", "context": "c", "answers": "c"}, "row 1 has no answers that can be read.*answer_start"),
        ({"question": "q", "context": "c", "answers": {"text": ["c"]}}, "row 1 has no answers.*'answer_start'"),
        ({"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": []}}, "row 1 has no answers"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path, row, message):
    with pytest.raises(LimbeckError, match=message):
        load(DataSpec(eval=write_jsonl(tmp_path / "x.jsonl", [row]), kind=KIND.name), train=False)


def test_questions_of_one_context_are_held_out_together(tmp_path):
    none = {"text": [], "answer_start": []}
    rows = [{"question": f"q{i}", "context": f"c{i // 5}", "answers": none} for i in range(100)]
    corpus = load(DataSpec(train=write_jsonl(tmp_path / "x.jsonl", rows)))
    assert not set(corpus.train.text_pair) & set(corpus.evals["dev"].text_pair)


# windows


@pytest.fixture(scope="module")
def tokenizer():
    """Letters and signs are tokens; a word's own letters are not joined, so that answers can begin inside words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.printable]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 [SEP]:1 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def dev(tmp_path):
    return load(DataSpec(eval=write_json(tmp_path / "dev.json")), train=False).evals["dev"]


def encoded(tmp_path, tokenizer, max_length, stride):
    return encode(dev(tmp_path), tokenizer, ("input_ids", "token_type_ids"), max_length, KIND, stride=stride)


@pytest.mark.parametrize(("max_length", "stride"), [(256, 128), (36, 6), (36, 0), (30, 2)])
def test_windows_are_the_tokenizers_own(tmp_path, tokenizer, max_length, stride):
    split, found = dev(tmp_path), encoded(tmp_path, tokenizer, max_length, stride)
    theirs = tokenizer(
        split.text,
        split.text_pair,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_token_type_ids=True,
    )
    assert len(found) == len(theirs["input_ids"])
    for name in ("input_ids", "token_type_ids"):
        rows = [found.columns[name][low:high].tolist() for low, high in zip(found.offsets[:-1], found.offsets[1:])]
        assert rows == theirs[name]
    owners = np.repeat(np.arange(len(split)), np.diff(found.gold.questions))
    assert owners.tolist() == theirs["overflow_to_sample_mapping"]


def test_labels_are_the_tokens_of_the_answer_or_the_first(tmp_path, tokenizer):
    split, found = dev(tmp_path), encoded(tmp_path, tokenizer, 36, 6)
    asked = found.gold
    owners = np.repeat(np.arange(len(split)), np.diff(asked.questions))
    seen = Counter()
    for window, (first, last) in enumerate(found.labels):
        low, owner = found.offsets[window], owners[window]
        if owner == 2:  # whose answer is not where the file says
            assert (first, last) == (-100, -100)
        elif first:
            assert CONTEXT[asked.starts[low + first] : asked.ends[low + last]] == "The fox"
            seen[owner] += 1
        else:
            assert last == 0
            inside = asked.starts[low : found.offsets[window + 1]]
            assert owner == 1 or inside[inside >= 0].min() > 0
    assert set(seen) == {0}


def test_a_long_question_leaves_room_for_its_context(tmp_path, tokenizer):
    found = encoded(tmp_path, tokenizer, 12, 128)
    assert found.lengths.max() <= 12
    covered = [set(found.gold.starts[slice(*found.offsets[found.gold.questions[[i, i + 1]]])]) for i in range(2)]
    assert covered[0] == covered[1] == {-1, *(m.start() for m in re.finditer(r"\S", CONTEXT))}


@pytest.mark.parametrize(
    ("max_length", "stride", "message"), [(5, 0, "--max-length 5 leaves no room"), (36, -1, "--stride -1 must be 0")]
)
def test_windows_that_cannot_be(tmp_path, tokenizer, max_length, stride, message):
    with pytest.raises(LimbeckError, match=message):
        encoded(tmp_path, tokenizer, max_length, stride)


def test_windows_cover_everything_and_share_the_stride():
    assert list(cut(10, 4, 1)) == [(0, 4), (3, 7), (6, 10)]
    assert list(cut(11, 4, 9)) == [(0, 4), (2, 6), (4, 8), (6, 10), (8, 11)]
    assert list(cut(4, 4, 2)) == [(0, 4)]
    assert list(cut(0, 4, 2)) == [(0, 0)]


# answers


def naive(logits, asked):
    """The answer by trying every span of every window."""
    found = []
    for question in range(len(asked.answers)):
        best, text, nothing = -np.inf, "", np.inf
        for window in range(asked.questions[question], asked.questions[question + 1]):
            low, high = asked.offsets[window : window + 2]
            nothing = min(nothing, logits[low, 0] + logits[low, 1])
            for s in range(low, high):
                for e in range(s, min(high, s + LONGEST)):
                    score = logits[s, 0] + logits[e, 1]
                    if min(asked.starts[s], asked.starts[e]) >= 0 and score > best:
                        best, text = score, asked.contexts[question][asked.starts[s] : asked.ends[e]]
        answerable = all(answers.texts for answers in asked.answers)
        found.append(text if answerable or best >= nothing else "")
    return found


@pytest.mark.parametrize("answerable", [True, False])
def test_the_best_span_of_all_windows(tmp_path, tokenizer, answerable):
    asked = encoded(tmp_path, tokenizer, 60, 20).gold
    if answerable:
        full = np.empty(3, dtype=object)
        full[:] = [answers._replace(texts=("x",), starts=(0,)) for answers in asked.answers]
        asked = asked._replace(answers=full)
    rng, answered = np.random.default_rng(0), set()
    for _ in range(20):
        logits = rng.normal(size=(len(asked.starts), 2)).astype(np.float32)
        logits[asked.offsets[:-1]] += rng.choice([0.0, 4.0])
        found = KIND.decided(logits, (), asked)
        assert found == [text.strip() for text in naive(logits, asked)]
        answered |= {bool(text) for text in found}
    assert answered == ({True} if answerable else {True, False})


def test_a_model_that_diverged_answers_nothing(tmp_path, tokenizer):
    asked = encoded(tmp_path, tokenizer, 60, 20).gold
    assert KIND.decided(np.full((len(asked.starts), 2), np.nan), (), asked) == ["", "", ""]


def test_answers_have_the_ids_of_the_file(tmp_path, tokenizer):
    asked = encoded(tmp_path, tokenizer, 256, 20).gold
    found = KIND.answers(np.zeros((len(asked.starts), 2)), (), asked)
    assert [answer["id"] for answer in found] == ["q1", "q2", "q3"]
    assert found[0]["prediction"] == "T"


# scores


@pytest.mark.parametrize(
    ("found", "right", "f1", "exact"),
    [
        ("The fox.", ("fox",), 1, 1),  # case, punctuation, articles
        ("a an the", ("The",), 1, 1),  # nothing is left of either
        ("U.S.", ("US",), 1, 1),  # punctuation goes without a space
        ("anthem", ("them",), 0, 0),  # articles are whole words
        ("old   hen", ("old hen",), 1, 1),
        ("", ("",), 1, 1),
        ("hen", ("",), 0, 0),
        ("", ("hen",), 0, 0),
        ("the", ("hen",), 0, 0),
        ("old hen", ("hen", "fox"), 2 / 3, 0),
        ("old hen", ("fox", "an old hen"), 1, 1),  # the best of all
        ("hen hen hen", ("hen hen",), 4 / 5, 0),  # each word as often as it comes
        ("hen fox", ("fox hen",), 1, 0),
    ],
)
def test_scores_of_an_answer(found, right, f1, exact):
    assert squad.f1([found], [right]) == pytest.approx(f1)
    assert squad.exact([found], [right]) == exact


def official(found, right):
    """Exact match and F1 of one answer, from the rules of the task."""

    def words(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    scores = []
    for one in right:
        ours, theirs = words(found), words(one)
        common = sum((Counter(ours) & Counter(theirs)).values())
        precision, recall = (common / len(side) if side else float(ours == theirs) for side in (ours, theirs))
        scores.append((ours == theirs, 2 * precision * recall / (precision + recall) if precision + recall else 0.0))
    return max(s[0] for s in scores), max(s[1] for s in scores)


def test_scores_by_another_way():
    rng = np.random.default_rng(0)
    words = ["the", "a", "an", "fox", "hen", "Fox", "hen,", "-", "old", "it's"]

    def text():
        return " ".join(rng.choice(words, rng.integers(0, 5)))

    found = [text() for _ in range(300)]
    answers = np.empty(300, dtype=object)
    answers[:] = [Answers(str(i), tuple(text() for _ in range(i % 4)), (0,) * (i % 4)) for i in range(300)]
    right = KIND.expected(Asked(answers, *[None] * 5), ())
    assert right[0] == ("",)
    assert all(squad.plain(one) for texts in right for one in texts if texts != ("",))
    exact, f1 = np.mean([official(*pair) for pair in zip(found, right, strict=True)], axis=0)
    assert squad.exact(found, right) == pytest.approx(exact)
    assert squad.f1(found, right) == pytest.approx(f1)
    there = [texts != ("",) for texts in right]
    parts = {
        side: np.mean([official(f, r) for f, r, t in zip(found, right, there) if t == side], axis=0)
        for side in (True, False)
    }
    assert squad.has_answer_exact(found, right) == pytest.approx(parts[True][0])
    assert squad.has_answer_f1(found, right) == pytest.approx(parts[True][1])
    assert squad.no_answer(found, right) == pytest.approx(parts[False][0]) == pytest.approx(parts[False][1])


def test_a_perfect_model_scores_a_hundred(tmp_path, tokenizer):
    corpus = load(DataSpec(eval=write_json(tmp_path / "dev.json")), train=False)
    found = encode(corpus.evals["dev"].at(np.arange(2)), tokenizer, ("input_ids",), 36, KIND, stride=6)
    logits = np.zeros((len(found.columns["input_ids"]), 2), dtype=np.float32)
    for row in (0, 1):
        logits[found.offsets[:-1] + found.labels[:, row], row] = 9
    assert set(measure(corpus.task, logits, found.right).values()) == {100.0}
