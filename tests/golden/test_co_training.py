"""ProKT's loss, written out."""

import pytest
import torch

from tests.test_golden import Case, close

RECIPES = {"prokt"}


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1).mean()


def test_prokt():
    """KL(teacher, student) for the student; 0.6 CE + 0.4 KL(student, teacher) for the teacher."""
    case = Case("prokt")
    p, q = case.t.logits.softmax(-1), case.s.logits.softmax(-1)
    ce = -case.t.logits.log_softmax(-1)[torch.arange(len(case.y)), case.y].mean()
    close(case.loss(), kl(p, q) + 0.6 * ce + 0.4 * kl(q, p))


def test_prokt_of_a_score():
    case = Case("prokt", labels=1)
    apart = (case.s.logits - case.t.logits).square().mean()
    close(case.loss(), 1.4 * apart + 0.6 * (case.t.logits.squeeze(-1) - case.y).square().mean())


def test_each_side_takes_the_other_as_given():
    """Gradients are those of each side's own loss, and the teacher given stays as it is until the stage is over."""
    case = Case("prokt")
    term = case.distiller.terms["teaching"]
    case.distiller(**case.batch).loss.backward()
    student = torch.autograd.grad(
        kl(case.t.logits.softmax(-1), case.student(**inputs(case)).logits.softmax(-1)), case.student.classifier.weight
    )[0]
    torch.testing.assert_close(case.student.classifier.weight.grad, student, rtol=1e-10, atol=1e-12)
    logits = term.teacher(**inputs(case)).logits
    labels = torch.nn.functional.cross_entropy(logits, case.y)
    loss = 0.6 * labels + 0.4 * kl(case.s.logits.softmax(-1), logits.softmax(-1))
    teacher = torch.autograd.grad(loss, term.teacher.classifier.weight)[0]
    torch.testing.assert_close(term.teacher.classifier.weight.grad, teacher, rtol=1e-10, atol=1e-12)
    assert case.teacher.classifier.weight.grad is None
    with torch.no_grad():
        term.teacher.classifier.weight.add_(1.0)
    assert not torch.equal(case.teacher.classifier.weight, term.teacher.classifier.weight)
    term.finish()
    assert torch.equal(case.teacher.classifier.weight, term.teacher.classifier.weight)


def inputs(case):
    return {k: v for k, v in case.batch.items() if k != "labels"}


@pytest.mark.parametrize("options", [{"share": 1.5}, {"share": -0.1}, {"share": "half"}, {"pace": 0}, {"pace": "slow"}])
def test_options_are_checked(options):
    from limbeck.errors import LimbeckError
    from limbeck.objectives import CoTraining

    with pytest.raises(LimbeckError, match=r"(share|pace) \S+ must be a number (from 0 to 1|above 0)"):
        CoTraining(**options)
