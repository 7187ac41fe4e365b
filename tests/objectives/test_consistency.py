"""Consistency: the student on mixed inputs against the mix of itself on plain ones, and the two passes it takes."""

import pytest
import torch

from limbeck.data.mixing import Mixup
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.features import Rows
from limbeck.objectives import Consistency, Labels, Match, Models, Moment, Read
from limbeck.recipe import validate
from limbeck.taps import Tap
from tests.test_objectives import MASK, draw, models
from tests.tiny import every_family, tiny_batch, tiny_model


def bound(objective):
    objective.bind(models(), {})
    objective.at(Moment())
    return objective


def mixing(objectives, *, student=None, rows=8, call="beta(1.0)"):
    student = student or tiny_model("bert", 3, seed=2)
    distiller = Distiller(tiny_model("bert", 6, seed=1), student, objectives, mixup=Mixup(call, rows=rows))
    distiller.at(0, 1)
    return distiller


@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_it_is_a_loop_over_examples(distance):
    term = bound(Consistency("hidden", map="uniform", distance=distance, weight=2))
    share, partner = torch.tensor(0.3, dtype=torch.float64), torch.tensor([1, 2, 0])
    ours = {("hidden", k): Rows(draw(3, 4, 8, seed=k), MASK) for k in (1, 2, 3)}
    plain = {("hidden", k): Rows(draw(3, 4, 8, seed=9 + k), MASK) for k in (1, 2, 3)}
    found = term(ours, plain, {"share": share, "partner": partner})
    for i, j in enumerate(partner.tolist()):
        expected = 0.0
        for k in (1, 2, 3):
            target = share * plain["hidden", k].values[i] + (1 - share) * plain["hidden", k].values[j]
            expected += term.distance(ours["hidden", k].values[i], target)[MASK[i]].mean()
        torch.testing.assert_close(found[i], expected)


def test_it_reads_the_student_twice_and_no_teacher():
    term = Consistency("attention", map="last", distance="kl")
    term.bind(Models(models().student, None), {})
    assert term.reads() == {Read("student", "attention", 3), Read("plain", "attention", 3)}


def test_targets_get_no_gradient():
    term = bound(Consistency("cls", map="last"))
    values = draw(3, 8).requires_grad_()
    row = torch.ones(3, dtype=torch.bool)
    mixed, plain = draw(3, 8, seed=1).requires_grad_(), {("cls", 3): Rows(values, row)}
    batch = {"share": torch.tensor(0.5), "partner": torch.tensor([2, 0, 1])}
    term({("cls", 3): Rows(mixed, row)}, plain, batch).sum().backward()
    assert values.grad is None
    assert mixed.grad.abs().sum() > 0


def test_the_plain_pass_saves_no_gradients_unless_something_learns_from_it(monkeypatch):
    seen = []
    real = Tap.__call__
    monkeypatch.setattr(
        Tap, "__call__", lambda tap, **batch: seen.append(torch.is_grad_enabled()) or real(tap, **batch)
    )
    steady = {"layers": Match("cls", map="last"), "steady": Consistency("cls", map="last")}
    mixing(steady)(**tiny_batch())
    assert seen == [False, True, False]  # the teacher, the mixed inputs, the plain ones
    seen.clear()
    mixing({**steady, "labels": Labels(inputs="plain")})(**tiny_batch())
    assert seen == [False, True, True]
    seen.clear()
    mixing({"labels": Labels()})(**tiny_batch())
    assert seen == [True]


@pytest.mark.parametrize("family", every_family)
@torch.no_grad()
def test_every_family_mixes_what_enters_its_first_block(family):
    model = tiny_model(family, 2)
    tap = Tap(model, [("hidden", 0), ("hidden", 2), ("logits", -1)])
    batch = tiny_batch(model, sizes=(6, 6, 6))
    mixup = Mixup("beta(1.0)", rows=3)
    mixup.at(0, 0, 0)
    plain, mixed = tap(**batch), tap(**mixup(batch))
    share, partner = mixup.share, mixup(batch)["partner"]
    entering = plain["hidden", 0].values
    torch.testing.assert_close(mixed["hidden", 0].values, share * entering + (1 - share) * entering[partner])
    assert not torch.allclose(mixed["hidden", 2].values, plain["hidden", 2].values)
    mixup.share.fill_(1.0)
    same = tap(**mixup(batch))
    torch.testing.assert_close(same["logits", -1].values, plain["logits", -1].values)
    again = tap(**batch)  # nothing stays attached
    torch.testing.assert_close(again["hidden", 2].values, plain["hidden", 2].values)


@torch.no_grad()
def test_padding_and_filling_mean_nothing():
    terms = {
        "layers": Match("hidden", map="last"),
        "steady": Consistency("hidden", map="uniform"),
        "maps": Consistency("attention", map="last", distance="reverse_kl"),
        "labels": Labels(),
        "plain": Labels(inputs="plain"),
    }
    distiller = mixing(terms, call="beta(1.0, partner=reversed)").eval()
    short = distiller(**tiny_batch(sizes=(9, 5, 7)))
    padded = distiller(**tiny_batch(sizes=(9, 5, 7), length=20))
    filled = tiny_batch(sizes=(9, 5, 7))
    filled = {k: torch.cat([v, v[:1], v[:1]]) for k, v in filled.items()}
    filled = distiller(**filled, weight=torch.tensor([1.0, 1, 1, 0, 0]))
    for name, part in short.parts.items():
        assert part > 0
        torch.testing.assert_close(padded.parts[name], part, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(filled.parts[name], part, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_mixed_inputs_cannot_be_kept():
    assert not mixing({"labels": Labels()}).steady
    assert Distiller(None, tiny_model(), {"labels": Labels()}).steady


@pytest.mark.parametrize("objective", [Consistency("cls", map="last"), Labels(inputs="plain")])
def test_without_mixing_there_is_nothing_to_compare(objective):
    with pytest.raises(LimbeckError, match="the stage mixes none: add mixup"):
        Distiller(tiny_model(), tiny_model(), [objective])


def test_faults_of_a_recipe():
    stage = {"name": "distil", "epochs": 1, "objectives": {"steady": {"consistency": "cls", "map": "last"}}}
    with pytest.raises(LimbeckError, match=r"stages.distil.objectives.steady: .*add mixup"):
        validate({"name": "mine", "stages": [stage]})
    with pytest.raises(LimbeckError, match=r"stages.distil.mixup: mixup \"beta\" has no option \"alhpa\""):
        validate({"name": "mine", "stages": [{**stage, "mixup": "beta(alhpa=1)"}]})
    with pytest.raises(LimbeckError, match=r"stages.distil.mixup: .* a batch is 1"):
        validate({"name": "mine", "stages": [{**stage, "mixup": "beta", "batch": 1}]})
    assert validate({"name": "mine", "stages": [{**stage, "mixup": "beta"}]}).stages[0].mixup == "beta"


def test_scores_cannot_be_mixed():
    with pytest.raises(LimbeckError, match="nothing to mix where one text of a pair has ended"):
        Consistency("scores", map="last")


def test_inputs_are_mixed_or_plain():
    with pytest.raises(LimbeckError, match='no inputs "unmixed"'):
        Labels(inputs="unmixed")


@pytest.mark.parametrize("match", ["hidden", "cls"])
def test_a_map_of_the_student_maps_both_and_learns_from_what_is_mixed(match):
    term = Consistency(match, map="last", align="shared")
    term.bind(models(teacher=(6, 12, 2, 3)), {})
    term.at(Moment())
    assert term.aligner.map.weight.shape == (12, 8)
    shape, mask = ((3, 4, 8), MASK) if match == "hidden" else ((3, 8), MASK[:, 0])
    ours, plain = ({(match, 3): Rows(draw(*shape, seed=seed).float(), mask)} for seed in (0, 1))
    share, partner = torch.tensor(0.3), torch.tensor([1, 2, 0])
    term(ours, plain, {"share": share, "partner": partner}).sum().backward()
    found, term.aligner.map.weight.grad = term.aligner.map.weight.grad, None
    values = plain[match, 3].values
    target = term.aligner.map(share * values + (1 - share) * values[partner]).detach()
    rows = (term.aligner.map(ours[match, 3].values) - target).square().mean(-1)
    (sum(row[kept].mean() for row, kept in zip(rows, mask)) if match == "hidden" else rows.sum()).backward()
    torch.testing.assert_close(found, term.aligner.map.weight.grad)


def test_an_aligner_that_maps_a_teacher_is_refused():
    with pytest.raises(LimbeckError, match="compares the student with itself, and align: both"):
        bound(Consistency("hidden", map="last", align="both"))
