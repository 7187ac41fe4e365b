"""Recipes as data: every shipped one resolves and has its card; every fault is found at once, with its path."""

import copy
import re
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck import recipe as recipes
from limbeck.errors import LimbeckError
from limbeck.objectives import build
from limbeck.recipe import Recipe, Stage, described, read, resolve, save, shipped, task_values, validate, variant_values
from limbeck.spec import number

NAMES = shipped()
HEADINGS = ["What it adds", "Recipe", "Suggested values", "What the paper leaves open", "Cost", "Citation"]


def choices(name):
    """A recipe, its variants, and the tasks of all of them."""
    data = read(name)
    forms = {name: data, **{f"{name}:{variant}": changes for variant, changes in data.get("variants", {}).items()}}
    return [(form, task) for form, changes in forms.items() for task in (None, *changes.get("tasks", {}))]


EVERY = [choice for name in NAMES for choice in choices(name)]


# What limbeck promises to have: the methods of the five papers, and those they compare with.
PRODUCTS = {
    "finetune", "kd", "pkd", "simkd", "lwd", "ild", "ild-rtc", "rail-kd-l", "rail-kd-c", "tinybert", "minilm",
    "minilmv2", "distilbert", "hid-cls", "hid-seq", "att-mse", "att-kl", "val-kl", "l-ild", "u-ild",
}  # fmt: skip
COMPOSITES = {
    "ted",
    "universal-kd",
    "alp-kd",
    "ckd-combine",
    "bert-emd",
    "emd-ild",
    "codir",
    "hid-cls-contrast",
    "ckd-context",
    "cr-ild",
    "mixkd",
    "theseus",
    "prokt",
}  # methods that are no plain product of the four axes


def test_no_promised_recipe_is_missing():
    missing = (PRODUCTS | COMPOSITES) - set(NAMES)
    assert not missing


@pytest.mark.parametrize(("name", "task"), EVERY)
def test_a_shipped_recipe_reads_back_as_it_was_saved(name, task, tmp_path):
    recipe = resolve(name, task=task)
    assert recipe.name == name
    assert recipe.about
    assert validate(yaml.safe_load(save(recipe))) == recipe
    (tmp_path / "mine.yaml").write_text(save(recipe), "utf8")
    assert resolve(str(tmp_path / "mine.yaml")) == recipe
    for stage in recipe.stages:
        assert (stage.epochs is None) != (stage.steps is None)
        for declared in stage.objectives.values():
            build(declared, recipe.aligners)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_short(name):
    from importlib import resources

    text = (resources.files("limbeck") / "recipes" / f"{name}.yaml").read_text("utf8")
    assert yaml.safe_load(text)["name"] == name
    method = re.split(r"^(?:tasks|variants):", text, flags=re.MULTILINE)[0]  # what follows are values, and other forms
    assert len(method.splitlines()) <= 24
    assert len(without_tables(text)) <= 38


def without_tables(text):
    """The lines of a recipe, less the values for each task."""
    kept, table = [], None  # how far the key is indented whose table is left out
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if table is None or indent <= table:
            table = indent if line.strip().startswith("tasks:") else None
            kept.append(line)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_a_card_with_fixed_headings(name):
    card = recipes.card(name)
    assert card is not None, f"src/limbeck/cards/{name}.md is missing"
    lines = card.splitlines()
    assert lines[0] == f"# {name}"
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS
    bodies = re.split(r"^## .*$", card, flags=re.MULTILINE)[1:]
    assert all(body.strip() for body in bodies)
    assert "```bibtex" in bodies[-1]
    # every @entry closes its braces
    block = bodies[-1].split("```bibtex")[1].split("```")[0]
    assert "@" in block
    assert block.count("{") == block.count("}")


def test_a_card_that_is_not_there():
    assert recipes.card("no-such-recipe") is None


def test_every_card_belongs_to_a_recipe():
    from importlib import resources

    cards = {p.name for p in (resources.files("limbeck") / "cards").iterdir() if p.name.endswith(".md")}
    assert cards <= {f"{name}.md" for name in NAMES}


def test_a_variant_changes_what_it_says():
    plain, last = resolve("pkd"), resolve("pkd:last")
    assert last.name == "pkd:last"
    assert plain.stages[0].objectives["layers"]["map"] == "uniform(last=false)"
    assert last.stages[0].objectives["layers"]["map"] == "top(last=false)"
    changed = copy.deepcopy(last.plain())
    changed["name"] = "pkd"
    changed["stages"][0]["objectives"]["layers"]["map"] = "uniform(last=false)"
    assert changed == plain.plain()


def test_the_values_for_a_task_apply_by_themselves():
    stage = resolve("ild-rtc", task="sst2").stages[0]
    assert stage.lr == 1e-5
    assert {n: o["weight"] for n, o in stage.objectives.items()} == {"labels": 0.2, "logits": 0.8, "layers": 10}
    assert resolve("ild-rtc", task="cola") == resolve("ild-rtc")
    assert task_values("ild-rtc", "qqp") == {"stages.distil.lr": "1e-5", "stages.distil.objectives.layers.weight": 500}
    assert task_values("ild-rtc", "cola") == {}
    assert task_values("pkd:last", None) == {}


@pytest.mark.parametrize("name", ["ild", "ild-rtc"])
@pytest.mark.parametrize(
    ("task", "alpha", "beta", "lr"),
    [
        ("sst2", 0.2, 10, 1e-5),
        ("mrpc", 0.5, 500, 5e-5),
        ("qqp", 0.5, 500, 1e-5),
        ("mnli", 0.2, 100, 1e-5),
        ("qnli", 0.7, 1000, 2e-5),
        ("rte", 0.5, 1000, 5e-5),
    ],
)
def test_the_papers_table_of_values(name, task, alpha, beta, lr):
    stage = resolve(name, task=task).stages[0]
    weights = {n: o["weight"] for n, o in stage.objectives.items()}
    assert weights == {"labels": alpha, "logits": pytest.approx(1 - alpha), "layers": beta}
    assert (stage.lr, stage.batch, stage.epochs) == (lr, 8, 4)


@pytest.mark.parametrize("name", ["ild:four-layers", "ild-rtc:four-layers"])
@pytest.mark.parametrize(
    ("task", "alpha", "beta", "lr"),
    [
        ("sst2", 0.2, 1000, 2e-5),
        ("mrpc", 0.5, 500, 1e-5),
        ("qqp", 0.5, 10, 2e-5),
        ("mnli", 0.5, 1000, 2e-5),
        ("qnli", 0.2, 1000, 2e-5),
        ("rte", 0.5, 10, 1e-5),
    ],
)
def test_the_papers_table_of_values_for_four_layers(name, task, alpha, beta, lr):
    test_the_papers_table_of_values(name, task, alpha, beta, lr)


@pytest.mark.parametrize(
    ("task", "logits", "layers"),
    [
        ("mnli", 5, 7500),
        ("qqp", 20, 1000),
        ("qnli", 20, 100),
        ("mrpc", 20, 100),
        ("rte", 20, 50),
        ("stsb", 0, 50),
        ("sst2", 20, 20),
        ("cola", 0, 10),
        ("question-answering", 10, 5000),
        (None, 20, 100),
    ],
)
def test_the_weights_of_teds_scripts(task, logits, layers):
    objectives = resolve("ted:code", task=task).stages[1].objectives
    assert [objectives[name]["weight"] for name in ("logits", "layers")] == [logits, layers]


@pytest.mark.parametrize(
    ("task", "ted", "lwd", "code", "predictions"),
    [
        ("mnli", 625, 8.3, 100, 5),
        ("qqp", 83, 1.7, 20, 20),
        ("qnli", 8.3, 0.83, 10, 20),
        ("mrpc", 8.3, 0.42, 5, 20),
        ("rte", 4.2, 1.7, 20, 20),
        ("stsb", 4.2, 0.42, 5, 0),
        ("sst2", 1.7, 1.7, 20, 20),
        ("cola", 0.83, 0.42, 5, 0),
        ("question-answering", 417, 8.3, 100, 10),
        (None, 20, 20, 20, 20),
    ],
)
def test_the_weights_of_lwd_and_of_teds_sum_over_layers(task, ted, lwd, code, predictions):
    at = [resolve(name, task=task).stages[-1].objectives for name in ("ted", "lwd", "lwd:code")]
    assert [objectives["layers"]["weight"] for objectives in at] == [ted, lwd, code]
    assert [objectives["logits"]["weight"] for objectives in at] == [2.5, 2.5, predictions]
    assert resolve("ted:kl", task=task).stages[-1].objectives["layers"]["weight"] == 20


# (recipe, task, stage) -> what the papers or their code say: epochs, batch, lr
PACES = {
    **{("tinybert", task, 0): (epochs, 32, 5e-5) for task, epochs in
       {"cola": 50, "rte": 20, "mrpc": 20, "mnli": 10, "qqp": 10, "qnli": 10}.items()},
    **{(name, task, 1): (4, batch, 2e-5) for name in ("l-ild", "u-ild", "emd-ild", "cr-ild") for task, batch in
       {"rte": 32, "mnli": 32, "qnli": 32, "cola": 16, "sst2": 16, "mrpc": 16, "qqp": 16, "stsb": 16}.items()},
    **{(name, task, 0): (20, 32, 5e-5) for name in ("l-ild", "u-ild", "emd-ild") for task in ("rte", "stsb")},
    **{("cr-ild", task, 0): (20, 32, lr) for task, lr in {"rte": 2e-5, "cola": 2e-5, "stsb": 5e-5}.items()},
    **{(name, task, stage): (10, batch, lr) for name in ("hid-cls", "hid-seq", "att-mse", "att-kl", "val-kl",
       "hid-cls-contrast") for stage in (0, 1) for task, (batch, lr) in {
       "mnli": (32, 1e-5), "qnli": (32, 1e-5), "qqp": (32, 1e-5), "sst2": (32, 1e-5), "rte": (16, 2e-5),
       "stsb": (16, 2e-5), "mrpc": (16, 1e-5), "cola": (16, 1e-5)}.items()},
    **{("cr-ild:t5", task, stage): pace for task in (None, "rte", "mrpc", "stsb") for stage, pace in
       ((0, (20, 32, 2e-5)), (1, (10, 8, 1e-3)))},
    **{("ckd-context", task, 0): (epochs, None, lr) for task, (epochs, lr) in {"cola": (4, 5e-5), "sst2": (4, 4e-5),
       "rte": (6, 5e-5), "qnli": (4, 4e-5), "mrpc": (4, 3e-5), "stsb": (4, 5e-5), "mnli": (4, 4e-5),
       "qqp": (4, 5e-5)}.items()},
    ("bert-emd:code", "rte", 0): (10, 32, 3e-5),
    # the published commands', whatever the task
    **{("tinybert:code", task, at): pace for task in (None, "cola", "mnli") for at, pace in
       ((0, (10, 32, 5e-5)), (1, (3, 32, 3e-5)))},
}  # fmt: skip


@pytest.mark.parametrize("case", PACES, ids=lambda case: "-".join(map(str, case)))
def test_the_papers_epochs_batches_and_rates(case):
    name, task, at = case
    stage, (epochs, batch, lr) = resolve(name, task=task).stages[at], PACES[case]
    assert (stage.epochs, stage.lr) == (epochs, lr)
    assert batch in (None, stage.batch)


# recipe -> of every stage: β₂ and ε of Adam, weight decay, clipping
CONSTANTS = {
    **dict.fromkeys(("codir", "codir:code", "hid-cls-contrast", "hid-cls", "hid-cls:code", "hid-seq", "hid-seq:code",
        "att-mse", "att-mse:hid-seq", "att-kl", "att-kl:hid-seq", "att-kl:val-kl", "val-kl"), (0.98, 1e-6, 0.1, 0)),
    **dict.fromkeys(("ted", "ted:kl", "lwd"), (0.98, 1e-6, 0, 1)),
    **dict.fromkeys(("ted:code", "lwd:code"), (0.999, 1e-8, 0, 0)),
    **dict.fromkeys(("l-ild:code", "u-ild:code", "emd-ild:code", "cr-ild:code", "tinybert:code", "bert-emd:code"),
        (0.999, 1e-6, 0.01, 1)),
    "distilbert": (0.98, 1e-6, 0.01, 5),
    "ckd-context:code": (0.999, 1e-8, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_optimisers_constants(name):
    for task in (None, "rte"):
        for stage in resolve(name, task=task).stages:
            assert (stage.betas, (stage.betas[1], stage.eps, stage.weight_decay, stage.clip)) == (
                [0.9, CONSTANTS[name][0]],
                CONSTANTS[name],
            )


def test_the_paces_of_language_models_and_of_running_text():
    for name in ("kd", "lwd", "ted", "ted:kl"):
        for stage in resolve(name, task="causal-lm").stages:
            teds = (2.5e-4, 0.05, 0, [0.9, 0.98], 1e-6)
            assert (stage.lr, stage.warmup, stage.weight_decay, stage.betas, stage.eps) == teds
    stage = resolve("distilbert", task="masked-lm").stages[0]
    assert (stage.lr, stage.batch, stage.warmup, stage.weight_decay) == (5e-4, 250, 0.05, 0)
    for name in ("minilm", "minilmv2"):
        stage = resolve(name, task="text").stages[0]
        assert (stage.steps, stage.epochs, stage.batch, stage.lr, stage.warmup) == (400_000, None, 256, 3e-4, 0.01)


def test_the_weight_of_predictions_in_ckds_code():
    for tasks, alpha in (("cola mrpc mnli", 0.7), ("sst2 rte qnli stsb qqp", 0.9)):
        for task in tasks.split():
            terms = resolve("ckd-context", task=task).stages[0].objectives
            assert (terms["labels"]["weight"], terms["logits"]["weight"]) == (pytest.approx(1 - alpha), alpha)
            terms = resolve("ckd-context:code", task=task).stages[0].objectives
            assert (terms["labels"]["weight"], terms["logits"]["weight"]) == (0, 1)  # where it is not read


@pytest.mark.parametrize("name", ["cr-ild:code", "l-ild:code", "u-ild:code", "emd-ild:code"])
def test_scores_are_divided_by_the_temperature_in_cr_ilds_script(name):
    weights = [resolve(name, task=task).stages[1].objectives["logits"].get("weight", 1) for task in ("stsb", "rte")]
    assert [number(weight) for weight in weights] == [1 / 4, 1]


@pytest.mark.parametrize("name", ["cr-ild:code", "l-ild:code", "u-ild:code", "emd-ild:code"])
@pytest.mark.parametrize(
    ("task", "epochs"), [("rte", 20), ("stsb", 20), ("sst2", 10), ("qnli", 10), ("mnli", 5), ("qqp", 5)]
)
def test_the_schedule_of_cr_ilds_script(name, task, epochs):
    layers, predictions = resolve(name, task=task).stages
    assert (layers.lr, layers.batch, layers.epochs) == (3e-5, 32, epochs)
    assert (predictions.lr, predictions.batch, predictions.epochs) == (3e-5, 16, 4)
    stairs = {o["weight"] for n, o in layers.objectives.items() if n.endswith("consistency")}
    assert stairs <= {f"stairs(0.1, steps={epochs})"}  # one an epoch


def test_a_variants_values_for_tasks_are_shown_and_stand_alone():
    path = "stages.distil.objectives.layers.weight"
    assert task_values("ild-rtc:four-layers", "rte") == {"stages.distil.lr": "1e-5", path: 10}
    assert task_values("cr-ild:code", "rte") == {}
    assert (path, 1000, 10) in variant_values("ild-rtc:four-layers", "rte")
    weights = [resolve("cr-ild:t5", task=task).stages[0].objectives["attention-consistency"]["weight"]
               for task in (None, "mrpc", "rte")]  # fmt: skip
    assert weights == ["ramp(0.2)", "ramp(0.2)", "ramp(0.3)"]


@pytest.mark.parametrize(
    "name", [one for base in shipped() for one in (base, *(f"{base}:{v}" for v in read(base).get("variants", {})))]
)
def test_a_recipe_as_it_is_shown_is_the_recipe(name, tmp_path):
    """For every task: it may be saved, and changed."""
    text = described(name)["yaml"]
    assert "&" not in text  # nothing is said by reference
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf8")
    for task in (None, *described(name).get("tasks", {})):
        assert resolve(str(path), task=task).plain() == resolve(name, task=task).plain()


def test_what_a_variant_changes():
    at = "stages.layers.objectives"
    gone = read("cr-ild")["stages"][0]["objectives"]
    assert variant_values("cr-ild:mixup", None) == [
        (f"{at}.attention-consistency", gone["attention-consistency"], None),
        (f"{at}.hidden-consistency", gone["hidden-consistency"], None),
    ]
    changes = variant_values("cr-ild:code", "stsb")
    assert ("stages.predictions.lr", 2e-5, 3e-5) in changes
    assert ("stages.layers.lr", 5e-5, 3e-5) in changes  # not the paper's value for the task: a variant has its own
    assert variant_values("cr-ild", "stsb") == []
    assert all(now is not None for _, _, now in variant_values("ted:code", None))  # it leaves nothing out


@pytest.mark.parametrize("value", ["0.9", "[0.9]", "[0.9, 1]", "[0.9, high]", "'\"00\"'", "'00'"])
def test_betas_are_two_numbers_below_one(value):
    with pytest.raises(LimbeckError, match="two numbers from 0 to below 1"):
        resolve("kd", overrides=[f"stages.*.betas={value}"])


def test_what_is_set_wins_over_the_task_and_the_variant():
    recipe = resolve("ild-rtc", task="sst2", overrides=["stages.distil.lr=7e-5", "stages.distil.lr=8e-5"])
    assert recipe.stages[0].lr == 8e-5
    recipe = resolve("pkd:last", overrides=["stages.distil.objectives.layers.map=first"])
    assert recipe.stages[0].objectives["layers"]["map"] == "first"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("stages.distil.lr=5e-5", lambda r: r.stages[0].lr == 5e-5),
        ("stages.*.lr=5e-5", lambda r: r.stages[0].lr == 5e-5),
        ("stages.0.lr=5e-5", lambda r: r.stages[0].lr == 5e-5),
        ("stages.distil.warmup = 1/8", lambda r: r.stages[0].warmup == 0.125),
        ("stages.distil.epochs=0.5", lambda r: r.stages[0].epochs == 0.5),
        ("stages.distil.steps=7", lambda r: (r.stages[0].steps, r.stages[0].epochs) == (7, None)),
        ("stages.distil.clip=0", lambda r: r.stages[0].clip == 0),
        ("stages.distil.schedule=cosine", lambda r: r.stages[0].schedule == "cosine"),
        ("init=[layers(top)]", lambda r: r.init == ["layers(top)"]),
        ('init=["layers([1, 2])"]', lambda r: r.init == ["layers([1, 2])"]),
        ("stages.distil.objectives.layers.weight=1/3", lambda r: r.stages[0].objectives["layers"]["weight"] == 1 / 3),
        (
            "stages.distil.objectives.logits.logits.temperature=4",
            lambda r: r.stages[0].objectives["logits"]["logits"] == "kl(temperature=4, scale=T2)",
        ),
        (
            "stages.distil.objectives.layers.align.always=true",
            lambda r: r.stages[0].objectives["layers"]["align"] == "linear(always=true)",
        ),
        (
            "stages.distil.objectives.layers.map.last=true",
            lambda r: r.stages[0].objectives["layers"]["map"] == "uniform(last=true)",
        ),
        ("stages.distil.objectives.more={labels: cross_entropy}", lambda r: "more" in r.stages[0].objectives),
        ("aligners={mine: linear}", lambda r: r.aligners == {"mine": "linear"}),
    ],
)
def test_a_value_is_set_by_its_path(override, value):
    recipe = resolve("pkd", overrides=[override])
    assert value(recipe)
    assert validate(yaml.safe_load(save(recipe))) == recipe
    assert resolve("pkd") != recipe


def test_stars_reach_every_stage(tmp_path):
    path = tmp_path / "two.yaml"
    data = {"name": "two", "stages": [stage("a"), stage("b")]}
    path.write_text(yaml.safe_dump(data))
    recipe = resolve(str(path), overrides=["stages.*.steps=3", "stages.b.lr=1e-3"])
    assert [(s.steps, s.epochs, s.lr) for s in recipe.stages] == [(3, None, 2e-5), (3, None, 1e-3)]


def test_a_star_at_the_end_is_every_place():
    recipe = resolve("ted", overrides=["aligners.*=shared", "stages.*.train.*=student"])
    assert recipe.aligners == {"task": "shared"}
    assert [s.train for s in recipe.stages] == [["student"], ["student", "student"]]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.distil.lr", ["has no", "path=value"]),
        ("init.1=checkpoint", ['no "1"', "There: 0."]),
        ("stages.distl.lr=1", ['no "distl"', 'Did you mean "distil"?']),
        ("stages.distil.objectives.layer.weight=1", ['no "layer"', 'Did you mean "layers"?']),
        ("stages.distil.lr.x.y=1", ["leads nowhere"]),
        ("stage.distil.lr=1", ['no "stage"', 'Did you mean "stages"?']),
        ("steps=3", ["steps: belongs to a stage", "stages.*.steps"]),
        ("stages.distil.lrr=1", ["stages.distil.lrr", "no such key", 'Did you mean "lr"?']),
        ("stages.distil.lr=fast", ["stages.distil.lr: 'fast' does not fit. Allowed: a number, such as 2e-5 or 1/3."]),
        ("stages.distil.lr=-1", ["stages.distil.lr", "Allowed: a number greater than 0."]),
        ("stages.distil.lr=1/0", ["stages.distil.lr: '1/0' does not fit. Allowed: a number"]),
        ("stages.distil.batch=0", ["stages.distil.batch"]),
        ("stages.distil.batch=many", ["stages.distil.batch: 'many' does not fit. Allowed: a whole number."]),
        ("stages.distil.batch=1.5", ["stages.distil.batch: 1.5 does not fit. Allowed: a whole number."]),
        ("stages.distil.batch=true", ["stages.distil.batch: True does not fit. Allowed: a whole number."]),
        ("stages.distil.objectives.layers.weight=much", ["weight much is no number", "Allowed: ramp, stairs"]),
        ("stages.distil.warmup=2", ["stages.distil.warmup"]),
        ("stages.distil.schedule=linar", ["stages.distil.schedule", "'linear'"]),
        (
            "stages.distil.objectives.logits.logits.temprature=4",
            ['no option "temprature"', 'Did you mean "temperature"?'],
        ),
        ("stages.distil.objectives.layers.weight.over=1", ["is not a call"]),
        ("init=[layers(first", ["cannot be read"]),
        ("init=[layers([1, 2])]", ["cannot be read", "quote"]),
        ("=3", ["no such key"]),
    ],
)
def test_what_cannot_be_set_says_why(override, said):
    with pytest.raises(LimbeckError) as caught:
        resolve("pkd", overrides=[override])
    for part in said:
        assert part in str(caught.value)


def stage(name="distil", **changes):
    return {"name": name, "epochs": 1, "objectives": {"labels": {"labels": "cross_entropy"}}, **changes}


def faults(data):
    with pytest.raises(LimbeckError) as caught:
        validate(data)
    head, *lines = str(caught.value).splitlines()
    return head, [line.strip() for line in lines]


def test_every_fault_is_reported_together():
    head, lines = faults(
        {
            "name": "mine",
            "about": "faulty throughout",
            "innit": ["layers(first)"],
            "init": ["layrs(first)", "classifier(frosen=true)"],
            "aligners": {"task": "liner"},
            "stages": [
                {
                    "name": "distil",
                    "epochs": 1,
                    "steps": 2,
                    "lr": "fast",
                    "bach": 32,
                    "train": ["student", "teacher"],
                    "objectives": {
                        "a": {"labels": "cross_entropy", "logits": "kl"},
                        "b": {"logits": "kl(temprature=2)"},
                        "c": {"match": "clss", "map": "last"},
                        "d": {"match": "cls", "map": "unifrm"},
                        "e": {"match": "cls", "map": "last", "align": "tusk"},
                        "f": {"match": "cls", "map": "last", "align": "task", "distance": "mze"},
                        "values": {"labels": "cross_entropy"},
                        "ok": {"labels": "cross_entropy"},
                    },
                },
                {"name": "second", "objectives": {"l": {"labels": "cross_entropy", "wieght": 2}}},
            ],
        }
    )
    expected = {
        "innit": 'no such key. Did you mean "init"?',
        "init: there is no start": 'Did you mean "layers"?',
        'init: start "classifier"': 'Did you mean "frozen"?',
        "aligners.task": 'Did you mean "linear"?',
        "stages.distil: ": "give either epochs or steps",
        "stages.distil.lr": "'fast' does not fit",
        "stages.distil.bach": 'Did you mean "batch"?',
        "stages.distil.train": 'no "teacher" to train. Allowed: student, aligners, task',
        "stages.distil.objectives.a": "exactly one of labels, logits, match",
        "stages.distil.objectives.b": 'Did you mean "temperature"?',
        "stages.distil.objectives.c": 'Did you mean "cls"?',
        "stages.distil.objectives.d": 'Did you mean "uniform"?',
        "stages.distil.objectives.e": 'there is no aligner "tusk"',
        "stages.distil.objectives.f": 'Did you mean "mse"?',
        "stages.distil.objectives.values": "cannot name an objective",
        "stages.second: ": "give either epochs or steps",
        "stages.second.objectives.l": 'Did you mean "weight"?',
    }
    for path, said in expected.items():
        assert [line for line in lines if line.startswith(path) and said in line], (path, lines)
    assert len(lines) == len(expected)
    assert head == f'recipe "mine" has {len(expected)} faults:'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, ["name: is missing", "stages: is missing"]),
        ({"name": "x", "stages": []}, ["stages: ", "at least 1"]),
        ({"name": "x", "stages": 3}, ["stages: 3 does not fit"]),
        ({"name": "x", "stages": [3]}, ["stages.0"]),
        ({"name": "x", "stages": [{"epochs": 1}]}, ["name: is missing", "objectives: is missing"]),
        ({"name": "x", "stages": [stage(objectives={})]}, ["stages.distil.objectives", "at least 1"]),
        ({"name": "x", "stages": [stage(objectives=None)]}, ["stages.distil.objectives"]),
        ({"name": "x", "stages": [stage(objectives={"a": None})]}, ["stages.distil.objectives.a"]),
        ({"name": "x", "stages": [stage(objectives={"a.b": {"labels": "cross_entropy"}})]}, ["cannot name"]),
        ({"name": "x", "stages": [stage(train="student")]}, ["stages.distil.train: 'student' does not fit"]),
        ({"name": "x", "stages": [stage(train=5)]}, ["stages.distil.train: 5 does not fit"]),
        ({"name": "x", "stages": [stage(keep="all")]}, ["stages.distil.keep"]),
        ({"name": "x", "stages": [stage(patience=0)]}, ["stages.distil.patience"]),
        ({"name": 3, "stages": [stage(name=4, lr=0)]}, ["name: 3 does not fit", "stages.4.lr"]),
        ({"name": "x", "init": "layers(first)", "stages": [stage()]}, ["init: 'layers(first)' does not fit"]),
    ],
)
def test_a_fault_names_its_place_once(data, said):
    head, lines = faults(data)
    for part in said:
        assert any(part in line for line in lines), lines
    assert len(lines) == len(set(lines))
    assert ("a fault" in head) == (len(lines) == 1)


def test_what_a_stage_may_leave_out():
    recipe = validate({"name": "x", "stages": [stage()]})
    assert recipe == Recipe("x", [Stage("distil", {"labels": {"labels": "cross_entropy"}}, epochs=1.0)])
    assert recipe.init == ["layers(first)"]
    assert recipe.stages[0].train == ["student", "aligners"]
    with pytest.raises(AttributeError):
        recipe.name = "y"


junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(),
        st.sampled_from(["", "x", "1/0", "kl", "cls", "last", "linear", "ramp(0.1)", "kl(", "student", "a.b", "²"]),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.one_of(st.integers(0, 2), st.text(max_size=3)), inner, max_size=2),
    ),
    max_leaves=4,
)


def places(node, here=()):
    """The path of every value of a recipe."""
    yield here
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*here, key))


FULL = {**resolve("lwd").plain(), "aligners": {"task": "linear"}}
PLACES = [path for path in places(FULL) if path]


@settings(max_examples=200)
@given(st.sampled_from(PLACES), junk)
def test_no_recipe_however_wrong_ends_in_a_traceback(path, value):
    data = copy.deepcopy(FULL)
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    try:
        recipe = validate(data)
    except LimbeckError:
        return
    assert validate(yaml.safe_load(save(recipe))) == recipe


@settings(max_examples=100)
@given(
    st.sampled_from(PLACES), st.one_of(st.sampled_from(["[", "{a: b", "1/0", "", "null", "@", "a: b: c"]), st.text())
)
def test_no_override_however_wrong_ends_in_a_traceback(path, value):
    with suppress(LimbeckError):
        resolve("lwd", overrides=[f"{'.'.join(map(str, path))}={value}"])


def test_recipes_that_are_not_there(tmp_path):
    with pytest.raises(LimbeckError, match=r'no recipe "pdk"\. Did you mean "pkd"\? Shipped: .*rail-kd-l'):
        resolve("pdk")
    with pytest.raises(LimbeckError, match=r"no recipe file .*nowhere\.yaml"):
        resolve(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(LimbeckError, match=r'no variant "lst"\. Did you mean "last"\? Variants: last'):
        resolve("pkd:lst")
    with pytest.raises(LimbeckError, match="Variants: none"):
        resolve("kd:last")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "not valid YAML"),
        ("name: x\n\tstages: 3", "not valid YAML"),
        ("- a\n- b", "holds no mapping"),
        ("", "holds no mapping"),
        ("just words", "holds no mapping"),
        ("name: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("name: x\nvariants: [a]\nstages: []", "variants of recipe"),
        ("name: x\ntasks: {rte: 3}\nstages: []", "tasks of recipe"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(LimbeckError, match=said) as caught:
        resolve(str(path))
    assert "bad.yaml" in str(caught.value)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(LimbeckError, match=r"bad\.yaml"):
        resolve(str(path))


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    data = {"name": "mine", "variants": {"slow": {"stages.distil.lr": "1e-6"}}, "tasks": None, "stages": [stage()]}
    path.write_text(yaml.safe_dump(data))
    assert resolve(str(path)).name == "mine"
    assert resolve(f"{path}:slow").name == "mine:slow"
    assert resolve(f"{path}:slow").stages[0].lr == 1e-6
    assert task_values(str(path), "rte") == {}


def test_stages_of_one_name_are_a_fault():
    stage = {"name": "one", "epochs": 1, "objectives": {"labels": {"labels": "cross_entropy"}}}
    with pytest.raises(LimbeckError, match='two are named "one"'):
        validate({"name": "x", "stages": [stage, dict(stage)]})
