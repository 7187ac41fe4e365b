"""Every distance against plain Python numbers. The references are looked up by name: a distance without one fails."""

import math

import pytest
import torch

from limbeck.distances import DISTANCES, PREDICTIONS


def norm(v):
    return math.sqrt(sum(x * x for x in v))


def unit(v):
    return [x / max(norm(v), 1e-12) for x in v]


def ref_mse(s, t):
    return sum((a - b) ** 2 for a, b in zip(s, t)) / len(s)


def ref_unit_mse(s, t):
    return ref_mse(unit(s), unit(t))


def ref_unit_sq(s, t):
    return sum((a - b) ** 2 for a, b in zip(unit(s), unit(t)))


def ref_cosine(s, t):
    return 1 - sum(a * b for a, b in zip(s, t)) / (norm(s) * norm(t))


def ref_kl(s, t):
    return sum(b * math.log(b / a) for a, b in zip(s, t) if b > 0)


def ref_reverse_kl(s, t):
    return sum(a * math.log(a / b) for a, b in zip(s, t) if a > 0)


def ref_soft_ce(s, t):
    return -sum(b * math.log(a) for a, b in zip(s, t) if b > 0)


REFERENCES = {
    "mse": ref_mse,
    "unit_mse": ref_unit_mse,
    "unit_sq": ref_unit_sq,
    "cosine": ref_cosine,
    "kl": ref_kl,
    "reverse_kl": ref_reverse_kl,
    "soft_ce": ref_soft_ce,
}
OF_DISTRIBUTIONS = ("kl", "reverse_kl", "soft_ce")


def log_softmax(v, temperature):
    v = [x / temperature for x in v]
    top = max(v)
    total = top + math.log(sum(math.exp(x - top) for x in v))
    return [x - total for x in v]


def ref_logits_kl(s, t, temperature=1.0, scale=1.0):
    log_s, log_t = log_softmax(s, temperature), log_softmax(t, temperature)
    return scale * sum(math.exp(b) * (b - a) for a, b in zip(log_s, log_t))


def ref_logits_soft_ce(s, t, temperature=1.0, scale=1.0):
    log_s, log_t = log_softmax(s, temperature), log_softmax(t, temperature)
    return -scale * sum(math.exp(b) * a for a, b in zip(log_s, log_t))


PREDICTION_REFERENCES = {"kl": ref_logits_kl, "soft_ce": ref_logits_soft_ce, "mse": ref_mse}
SOFTENED = ("kl", "soft_ce")

PRECISIONS = pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])


def inputs(name, dtype, shape=(2, 3, 7)):
    generator = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if name in OF_DISTRIBUTIONS:
        student, teacher = student.softmax(-1), teacher.softmax(-1)
    return student.to(dtype), teacher.to(dtype)


def test_every_distance_has_a_reference():
    assert set(REFERENCES) == set(DISTANCES)
    assert set(PREDICTION_REFERENCES) == set(PREDICTIONS)


@pytest.mark.parametrize("name", DISTANCES)
@PRECISIONS
def test_a_distance_is_its_formula(name, dtype, close):
    student, teacher = inputs(name, dtype)
    found = DISTANCES[name](student, teacher)
    assert found.shape == student.shape[:-1]
    assert found.dtype == dtype
    for i in range(2):
        for j in range(3):
            expected = REFERENCES[name](student[i, j].tolist(), teacher[i, j].tolist())
            assert found[i, j].item() == pytest.approx(expected, rel=close, abs=close)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_takes_rows_of_any_rank(name):
    student, teacher = inputs(name, torch.float64, (24, 7))
    flat = DISTANCES[name](student, teacher)
    for shape in [(24,), (4, 6), (2, 3, 4), (1, 2, 3, 4)]:
        shaped = DISTANCES[name](student.reshape(*shape, 7), teacher.reshape(*shape, 7))
        assert shaped.shape == shape
        torch.testing.assert_close(shaped.flatten(), flat, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DISTANCES)
def test_the_distance_of_equals(name):
    student, _ = inputs(name, torch.float64)
    entropy = -(student * student.log()).sum(-1) if name == "soft_ce" else torch.zeros(2, 3, dtype=torch.float64)
    torch.testing.assert_close(DISTANCES[name](student, student), entropy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["unit_mse", "unit_sq", "cosine"])
def test_length_means_nothing_to_unit_distances(name):
    student, teacher = inputs(name, torch.float64)
    scaled = DISTANCES[name](7 * student, teacher / 3)
    torch.testing.assert_close(scaled, DISTANCES[name](student, teacher), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "expected"), [("unit_mse", 1 / 5), ("unit_sq", 1.0), ("cosine", 1.0)])
@pytest.mark.parametrize("zero", ["student", "teacher", "both"])
def test_a_vector_of_zeros_has_no_direction(name, expected, zero):
    zeros, other = torch.zeros(5, requires_grad=True), torch.tensor([3.0, 0, 0, 0, 4.0], requires_grad=True)
    student = other if zero == "teacher" else zeros
    teacher = other if zero == "student" else zeros.detach()
    found = DISTANCES[name](student, teacher)
    if zero == "both":
        expected = 1.0 if name == "cosine" else 0.0
    assert found.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(found, student)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite(name, dtype):
    student, teacher = inputs(name, dtype)
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(DISTANCES[name](student, teacher).sum(), student)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", DISTANCES)
def test_gradients_are_those_of_the_formula(name):
    student, teacher = inputs(name, torch.float64, (2, 4))
    assert torch.autograd.gradcheck(lambda s: DISTANCES[name](s, teacher), student.requires_grad_())


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_times_log_of_nothing_is_nothing(name, dtype):
    teacher = torch.tensor([0.5, 0.5, 0.0], dtype=dtype)
    student = torch.tensor([0.25, 0.75, 0.0], dtype=dtype, requires_grad=True)
    found = DISTANCES[name](student, teacher)
    assert found.item() == pytest.approx(REFERENCES[name]([0.25, 0.75, 0.0], [0.5, 0.5, 0.0]), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, student)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_key_that_one_side_gives_nothing_costs_much_but_not_infinitely(name, dtype):
    one, both = torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([0.5, 0.5], dtype=dtype)
    student, teacher = (both, one) if name == "reverse_kl" else (one, both)
    found = DISTANCES[name](student.requires_grad_(), teacher)
    assert math.isfinite(found.item())
    assert found.item() > 40
    (gradient,) = torch.autograd.grad(found, student)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", PREDICTIONS)
@PRECISIONS
def test_a_prediction_distance_is_its_formula(name, dtype, close):
    student, teacher = inputs(f"logits {name}", dtype)
    settings = [{}]
    if name in SOFTENED:
        settings += [{"temperature": 2.0}, {"temperature": 10.0, "scale": 0.5}]
    for options in settings:
        found = PREDICTIONS[name](student, teacher, **options)
        assert found.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                expected = PREDICTION_REFERENCES[name](student[i, j].tolist(), teacher[i, j].tolist(), **options)
                assert found[i, j].item() == pytest.approx(expected, rel=close, abs=close)


@pytest.mark.parametrize("name", SOFTENED)
def test_the_factor_of_hinton(name):
    student, teacher = inputs("logits", torch.float64)
    plain = PREDICTIONS[name](student, teacher, temperature=10.0)
    torch.testing.assert_close(PREDICTIONS[name](student, teacher, temperature=10.0, scale="T2"), 100 * plain)
    # It keeps the gradient of one size: for large T, T²·KL tends to a constant.
    warm, hot = (PREDICTIONS[name](student, student + teacher, temperature=t, scale="T2") for t in (100.0, 200.0))
    if name == "kl":
        torch.testing.assert_close(warm, hot, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("name", SOFTENED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_predictions_do_not_underflow(name, dtype):
    student = torch.tensor([1000.0, -1000.0, 0.0], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([-1000.0, 1000.0, 0.0], dtype=dtype)
    found = PREDICTIONS[name](student, teacher)
    assert found.item() == pytest.approx(PREDICTION_REFERENCES[name](student.tolist(), teacher.tolist()))
    assert found.item() == pytest.approx(2000)
    (gradient,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(gradient, torch.tensor([1.0, -1.0, 0.0], dtype=dtype))


def test_kl_and_soft_ce_have_one_gradient():
    student, teacher = inputs("logits", torch.float64)
    student.requires_grad_()
    one, other = (
        torch.autograd.grad(PREDICTIONS[name](student, teacher, temperature=2.0).sum(), student)[0] for name in SOFTENED
    )
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
