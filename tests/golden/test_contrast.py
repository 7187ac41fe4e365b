"""CoDIR's contrast with memory banks, anchor by anchor."""

import pytest
import torch

from limbeck.data.plan import FILL
from tests.golden.test_earth_mover import learning
from tests.test_golden import Case, close, linear, unit

RECIPES = {"codir", "codir:code", "hid-cls-contrast"}
LABELS = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 0, 1])
IDS = [7, FILL, 2, 4]


def contrasting(recipe, width, **options):
    """Four rows, the second of them fill, of ten examples."""
    case = Case(recipe, width=width, train_labels=LABELS, **options)
    rows = [0, 0, 1, 2]
    case.batch = {name: column[rows] for name, column in case.batch.items()}
    case.batch |= {"id": torch.tensor(IDS), "weight": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    return case


def estimate(products, total):
    """Of one anchor, its own entry first: NCE with K negatives of n examples, at τ 0.07."""
    noise = 100 / len(LABELS)
    h = [p / (p + noise) for p in (products / 0.07).exp() / total]
    return -torch.log(h[0]) - sum(torch.log(1 - other) for other in h[1:])


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize(
    ("recipe", "ours", "theirs"),
    [
        ("codir", (1, 2, 3), (1, 3, 5)),
        ("codir:code", (1, 2, 3), (1, 3, 5)),
        ("hid-cls-contrast", (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_contrast(recipe, ours, theirs, width):
    """Unit vectors of joined layers against the other side's bank; banks move half way; Z is of the first batch."""
    case = contrasting(recipe, width)
    term = case.distiller.terms["contrast"]
    pooled = case.pooled if recipe == "codir" else case.cls
    joined = [torch.cat([pooled(m, k) for k in met], -1) for m, met in ((case.s, ours), (case.t, theirs))]
    z = [unit(linear(term.maps[side], states)).detach() for side, states in zip(("student", "teacher"), joined)]
    banks = [term.student_bank.clone(), term.teacher_bank.clone()]
    totals, rest = [None, None], 0
    if recipe != "hid-cls-contrast":
        rest = 0.5 * case.ce() + 0.5 * 4 * case.kl(2)
    learning(case)
    for epoch in range(3):
        found, losses = case.loss(epoch), []
        drawn = term.others(torch.tensor([7, 2, 4]))
        for side, other in ((0, 1), (1, 0)):
            rows = [[example, *drawn[i].tolist()] for i, example in enumerate((7, 2, 4))]
            products = [banks[other][row] @ z[side][i] for i, row in enumerate(rows)]
            if totals[side] is None:
                totals[side] = len(LABELS) * (torch.stack(products) / 0.07).exp().mean()
            losses += [estimate(product, totals[side]) for product in products]
        close(found, rest + torch.stack(losses).mean())
        for side in (0, 1):
            for i, example in enumerate((7, 2, 4)):
                banks[side][example] = unit(0.5 * banks[side][example] + 0.5 * z[side][i])
        for bank, expected in zip((term.student_bank, term.teacher_bank), banks):
            torch.testing.assert_close(bank[: len(LABELS)], expected[: len(LABELS)])


def test_hid_cls_contrast_ends_with_labels_and_predictions():
    case = Case("hid-cls-contrast", stage=1)
    close(case.loss(), 0.5 * case.ce() + 0.5 * 4 * case.kl(2))
