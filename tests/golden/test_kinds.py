"""The losses of every kind of task, written out, in double precision."""

import torch
import torch.nn.functional as F
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from limbeck.distiller import Distiller
from limbeck.objectives import build
from limbeck.recipe import resolve
from tests.test_golden import close, doubled
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"kd"}
# Too short for attention to be the same whether padded or not, were padding to count.
SIZES = (9, 5, 7)


def losses(right, **options):
    """The loss of kd, and what the two models say of the batch."""
    student, teacher = (tiny_model(layers=n, seed=n, **options).double() for n in (3, 6))
    with doubled():
        objectives = {name: build(one, {}) for name, one in resolve("kd").stages[0].objectives.items()}
        distiller = Distiller(teacher, student, objectives).eval()
    batch = {**tiny_batch(student, SIZES, length=12), "labels": right}
    with torch.no_grad():
        return distiller(**batch).loss, *(model(**columns_for(model, batch)) for model in (student, teacher))


def test_multi_label():
    """Binary cross-entropy and divergence, the mean over labels, then over examples."""
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    found, s, t = losses(labels, labels=3, problem_type="multi_label_classification")
    hard = F.binary_cross_entropy_with_logits(s.logits, labels.double())
    p, q = (t.logits / 2).sigmoid(), (s.logits / 2).sigmoid()
    soft = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    close(found, 0.5 * hard + 0.5 * 4 * soft.mean(1).mean())


def test_tagging():
    """The mean over an example's labelled tokens, then over examples; the teacher is heard at those tokens alone."""
    labels = torch.full((3, 12), -100)
    labels[0, [1, 2, 5]], labels[1, 3], labels[2, 1:7] = torch.tensor([0, 2, 1]), 1, 2
    found, s, t = losses(labels, labels=3, auto=AutoModelForTokenClassification)
    expected = 0
    for row in range(3):
        at = (labels[row] >= 0).nonzero()[:, 0]
        hard = F.cross_entropy(s.logits[row, at], labels[row, at])
        p, q = ((m.logits[row, at] / 2).softmax(-1) for m in (t, s))
        expected = expected + (0.5 * hard + 0.5 * 4 * (p * (p / q).log()).sum(-1).mean()) / 3
    close(found, expected)


def test_question_answering():
    """The mean of start and end, each over an example's own tokens; labels that are nowhere teach nothing."""
    labels = torch.tensor([[3, 8], [0, 0], [-100, -100]])
    found, s, t = losses(labels, labels=2, auto=AutoModelForQuestionAnswering)
    expected = 0
    for row, size in enumerate(SIZES):
        for side, name in enumerate(("start_logits", "end_logits")):
            ours, theirs = (getattr(model, name)[row, :size] for model in (s, t))
            hard = -ours.log_softmax(-1)[labels[row, side]] if labels[row, side] >= 0 else 0
            p, q = (theirs / 2).softmax(-1), (ours / 2).softmax(-1)
            expected = expected + (0.5 * hard + 0.5 * 4 * (p * (p / q).log()).sum()) / 6
    close(found, expected)
