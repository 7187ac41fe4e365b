"""A user's mistake is one paragraph and exit status 2, and nothing is written; a failure is one line and status 1."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from limbeck import LimbeckError, Pace, cli, compare, distill, evaluation, models, prepare
from limbeck.data import grammar
from limbeck.data.spec import DataSpec
from tests import toy


@pytest.fixture
def limbeck(monkeypatch, capsys):
    """The real command line, in this process: what it says on stderr, and its exit status."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["limbeck", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().err

    return run


def asked(out, **changes):
    """Options of a run that would succeed, but for the changes; None leaves one out."""
    usual = {"teacher": toy.teacher("bert"), "layers": 2, "out": out, "quiet": True, **toy.data()} | changes
    return toy.options(**{name: value for name, value in usual.items() if value is not None})


def test_the_same_without_a_mistake_succeeds(limbeck, tmp_path):
    """Otherwise every test below could pass for a reason of its own."""
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", epochs=1))
    assert (status or 0, said) == (0, "")
    assert (tmp_path / "run" / "scores.json").exists()


def csv(path, rows, header=("text", "label")):
    return toy.write_csv(path, header, rows)


# recipe, changes of the options, what the message must say
MISTAKES = {
    "unknown recipe": (
        "pkdd",
        {},
        ['there is no recipe "pkdd"', 'Did you mean "pkd"?', "rail-kd-l", "limbeck recipes"],
    ),
    "unknown variant": ("pkd:first", {}, ['no variant "first"', "Variants: last"]),
    "no such recipe file": ("mine.yaml", {}, ['no recipe file "mine.yaml"', "rail-kd-l"]),
    "unknown option of an ingredient": (
        "kd",
        {"set": "stages.distil.objectives.logits.logits.temprature=4"},
        ["stages.distil.objectives.logits", 'no option "temprature"', 'Did you mean "temperature"?', "kl(temperature"],
    ),
    "unknown ingredient": (
        "pkd",
        {"set": "stages.distil.objectives.layers.distance=msee"},
        ["stages.distil.objectives.layers", 'no distance "msee"', 'Did you mean "mse"?'],
    ),
    "option of the wrong type": (
        "kd",
        {"set": "stages.distil.objectives.logits.logits.temperature=hot"},
        ["stages.distil.objectives.logits", "temperature=hot", "number"],
    ),
    "a path that leads nowhere": ("kd", {"set": "stages.distill.lr=1"}, ['no "distill"', 'Did you mean "distil"?']),
    "no equals sign": ("kd", {"set": "stages.distil.lr"}, ['has no "="', "path=value"]),
    "code without leave": (
        "kd",
        {"set": "stages.distil.objectives.logits.logits=os.system"},
        ["os.system", "--allow-code"],
    ),
    "teacher layer out of range": (
        "pkd",
        {"set": "stages.distil.objectives.layers.map=pairs([[1, 99]])"},
        ["[1, 99]", "out of range", "0 to 4"],
    ),
    "student layer out of range": (
        "pkd",
        {"set": "stages.distil.objectives.layers.map=pairs([[3, 1]])"},
        ["[3, 1]", "out of range", "0 to 2"],
    ),
    "more layers than the teacher": ("kd", {"layers": 5}, ["5 layers", "has 4", "--layers 4 or fewer"]),
    "no layers": ("kd", {"layers": 0}, ["--layers 0", "at least one"]),
    "a width nobody has": ("kd", {"width": 30}, ["--width 30", "multiple", "8"]),
    "a width without a random start": ("kd", {"width": 16}, ["width 16", "width 32", "init=[random]"]),
    "missing teacher": ("kd", {"teacher": "/nowhere/teacher"}, ['"/nowhere/teacher"', "config.json"]),
    "no teacher": ("kd", {"teacher": None}, ["--teacher"]),
    "missing data": ("kd", {"train": "/nowhere/train.csv"}, ["/nowhere/train.csv", "no file"]),
    "no data": ("kd", {"train": None, "eval": None}, ["nothing to train on", "--train FILE"]),
    "unknown task": ("kd", {"task": "sst3"}, ['no task "sst3"', 'Did you mean "sst2"?', "rte"]),
    "task without data": ("kd", {"task": "rte", "train": None, "eval": None}, ["rte", "--data FOLDER"]),
    "missing column": ("kd", {"text": "sentence"}, ['no column "sentence"', '"text", "label"', "--text"]),
    "missing label column": ("kd", {"label": "gold"}, ['no column "gold"', '"text", "label"', "--label"]),
    "one label name": ("kd", {"labels": "farm"}, ["--labels farm", "at least two"]),
    "other label names": ("kd", {"labels": "no,yes"}, ["no, yes", "--labels"]),
    "student freezes everything": (
        "kd",
        {"set": "stages.distil.train=[]"},
        ["nothing trains", "train"],
    ),
    "negative learning rate": ("kd", {"lr": -1}, ["stages.distil.lr", "-1", "greater than 0"]),
    "no batch": ("kd", {"batch": 0}, ["stages.distil.batch", "greater than 0"]),
    "negative seed": ("kd", {"seed": -1}, ["--seed -1", "0 or more"]),
    "a seed too large": ("kd", {"seed": 2**63}, ["--seed 9223372036854775808", "below 2**63"]),
    "no length": ("kd", {"max_length": 0}, ["--max-length 0", "3 or more"]),
    "no micro-batch": ("kd", {"micro_batch": 0}, ["--micro-batch 0", "1 or more"]),
    "no logging": ("kd", {"log_every": 0}, ["--log-every 0", "1 or more"]),
    "unknown tracker": ("kd", {"track": "nonesuch"}, ["nonesuch", "tensorboard"]),
}


def assert_taught(status, said, parts, out=None):
    assert status == 2, said
    assert said.startswith("limbeck: ")
    assert "Traceback" not in said
    assert said.count("limbeck: ") == 1
    assert "\n\n" not in said.strip()  # one paragraph
    for part in parts:
        assert part in said
    if out is not None:
        assert not out.exists()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake, limbeck, tmp_path):
    recipe, changes, parts = MISTAKES[mistake]
    assert_taught(*limbeck("distill", recipe, *asked(tmp_path / "run", **changes)), parts, tmp_path / "run")


ROWS = [(f"the hen beat the fox {i} .", ("farm", "wild")[i % 2]) for i in range(8)]


def test_several_faults_of_a_recipe_at_once(limbeck, tmp_path):
    recipe = tmp_path / "faulty.yaml"
    recipe.write_text(
        """
name: faulty
init: [layers(firts)]
stages:
  - name: one
    epochs: 1
    learning_rate: 1
    objectives:
      logits: {logits: kl(temp=2)}
      layers: {match: hiden, map: uniform}
  - name: two
    batch: many
    train: [studnet]
    objectives:
      both: {labels: cross_entropy, logits: kl}
""",
        encoding="utf8",
    )
    # Faults are found before a weight is loaded: the teacher does not even exist.
    status, said = limbeck("distill", recipe, *asked(tmp_path / "run", teacher="/nowhere"))
    parts = [
        'recipe "faulty"', "stages.one.learning_rate", 'no option "temp"', 'no feature "hiden"',
        'Did you mean "hidden"?', "stages.two.batch", "stages.two: give either epochs or steps",
        'no "studnet" to train', "stages.two.objectives.both", "exactly one of",
    ]  # fmt: skip
    assert_taught(status, said, parts, tmp_path / "run")


def test_recipe_that_is_no_yaml(limbeck, tmp_path):
    recipe = tmp_path / "broken.yaml"
    recipe.write_text("name: [", encoding="utf8")
    status, said = limbeck("distill", recipe, *asked(tmp_path / "run"))
    assert_taught(status, said, ["broken.yaml", "not valid YAML"], tmp_path / "run")


def test_labels_that_are_not_the_teachers(limbeck, tmp_path):
    other = toy.teacher("bert", labels=("cat", "dog"))
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=other))
    assert_taught(status, said, ["farm", "wild", "cat", "dog", "--labels cat,dog"], tmp_path / "run")


def test_more_labels_than_the_teacher_has(limbeck, tmp_path):
    other = toy.teacher("bert", labels=3)
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=other))
    assert_taught(status, said, ["farm", "wild", "LABEL_2"], tmp_path / "run")


def test_student_with_another_vocabulary(limbeck, tmp_path):
    toy.save(toy.model("bert", layers=2, vocab_size=20), tmp_path / "small", bare=True)
    options = asked(tmp_path / "run", layers=None, student=tmp_path / "small")
    status, said = limbeck("distill", "rail-kd-l", *options)
    assert_taught(status, said, ["20 tokens", str(len(toy.tokenizer())), "vocabular"], tmp_path / "run")


def test_student_with_words_in_another_order(limbeck, tmp_path):
    words = [word for word in toy.tokenizer().get_vocab() if not word.startswith("[")]
    other = grammar.build_tokenizer([" ".join([*words[1:], "unheard"])])
    toy.save(toy.model("bert", layers=2), tmp_path / "other", words=other)
    options = asked(tmp_path / "run", layers=None, student=tmp_path / "other")
    status, said = limbeck("distill", "rail-kd-l", *options)
    assert_taught(status, said, ["different vocabularies", "is token"], tmp_path / "run")


def test_student_without_a_tokenizer_reads_the_teachers(limbeck, tmp_path):
    """No mistake: checkpoints are often saved without."""
    bare = toy.save(toy.model("bert", layers=2, seed=1), tmp_path / "bare", bare=True)
    status, said = limbeck("distill", "rail-kd-l", *asked(tmp_path / "run", layers=None, student=bare, epochs=1))
    assert (status or 0, said) == (0, "")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_empty_file(split, limbeck, tmp_path):
    (tmp_path / "empty.csv").touch()
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", **{split: tmp_path / "empty.csv"}))
    assert_taught(status, said, ["empty.csv is empty", "column names"], tmp_path / "run")


def test_file_with_a_header_only(limbeck, tmp_path):
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", train=csv(tmp_path / "bare.csv", [])))
    assert_taught(status, said, ["bare.csv", "no rows"], tmp_path / "run")


def test_file_that_is_not_utf8(limbeck, tmp_path):
    (tmp_path / "latin.csv").write_bytes("text,label\nla poule bat le renard rusé,farm\n".encode("latin-1"))
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", train=tmp_path / "latin.csv"))
    assert_taught(status, said, ["latin.csv is not UTF-8", "line 2", "iconv"], tmp_path / "run")


def test_file_of_an_unknown_kind(limbeck, tmp_path):
    (tmp_path / "train.xlsx").write_text("x", encoding="utf8")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", train=tmp_path / "train.xlsx"))
    assert_taught(status, said, ["train.xlsx", ".csv"], tmp_path / "run")


def test_no_column_that_looks_like_a_label(limbeck, tmp_path):
    bare = csv(tmp_path / "bare.csv", [(text,) for text, _ in ROWS], ("text",))
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", train=bare))
    assert_taught(status, said, ["bare.csv", "label", "--label COLUMN"], tmp_path / "run")


def test_one_class_only(limbeck, tmp_path):
    farm = csv(tmp_path / "farm.csv", [(text, "farm") for text, _ in ROWS])
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", train=farm, eval=None, labels="farm,wild"))
    assert_taught(status, said, ["farm.csv", '"farm"', "at least two labels"], tmp_path / "run")


def test_a_label_of_its_own_in_the_eval_file(limbeck, tmp_path):
    other = csv(tmp_path / "dev.csv", [*ROWS, ("the hen", "city")])
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", eval=other))
    assert_taught(status, said, ["dev.csv: row 9", '"city"', "farm, wild"], tmp_path / "run")


def test_a_term_that_reaches_nothing(limbeck, tmp_path):
    recipe = tmp_path / "idle.yaml"
    recipe.write_text(
        """
name: idle
stages:
  - name: only
    epochs: 1
    train: [aligners]
    objectives:
      words: {match: embeddings, distance: mse}
      states: {match: cls, map: last, align: linear(always=true)}
""",
        encoding="utf8",
    )
    status, said = limbeck("distill", recipe, *asked(tmp_path / "run"))
    assert_taught(status, said, ['"words"', "reaches no parameter that trains", "train list"], tmp_path / "run")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"trian": "train.csv"}, 'no option "trian". Did you mean "train"?'),
        ({"epochs": 2}, r'set=\["stages.\*.epochs=2"\]'),
    ],
)
def test_options_of_python_that_there_are_not(tmp_path, option, said):
    with pytest.raises(LimbeckError, match=said):
        distill("kd", teacher=toy.teacher("bert"), out=tmp_path / "run", **option)


def test_paths_and_lists_of_python(tmp_path):
    data = {name: Path(file) for name, file in toy.data().items()}
    spec = DataSpec.named(**data, labels=["hen", "fox"])
    assert spec == DataSpec(**toy.data(), labels=("hen", "fox"))
    assert DataSpec.named(labels="hen, fox") == DataSpec(labels=("hen", "fox"))  # as on the command line


def test_folder_of_another_run(limbeck, tmp_path):
    assert not limbeck("distill", "kd", *asked(tmp_path / "run", epochs=1))[0]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", epochs=1))
    assert_taught(status, said, ["holds a finished run", "another folder"])
    status, said = limbeck("distill", "pkd", *asked(tmp_path / "run", epochs=1, resume=True))
    assert_taught(status, said, ["recipe.name: was 'kd', now 'pkd'", "--out"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_folder_with_something_else(limbeck, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run"))
    assert_taught(status, said, ["no run", "empty or new folder"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_file_where_a_folder_is_wanted(limbeck, tmp_path):
    (tmp_path / "run").touch()
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run"))
    assert_taught(status, said, [str(tmp_path / "run"), "folder"])


def test_teacher_of_a_folder_misspelt(limbeck, tmp_path, monkeypatch):
    (tmp_path / "runs" / "teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher="runs/techer"))
    assert_taught(status, said, ['there is no folder "runs/techer"', 'Did you mean "runs/teacher"?'], tmp_path / "run")


def test_teacher_without_classifier(limbeck, tmp_path):
    bare = toy.save(toy.model("bert", headless=True), tmp_path / "bare")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=bare))
    assert_taught(status, said, ["no classifier", "BertModel", "limbeck finetune --model"], tmp_path / "run")


def test_teacher_of_an_unknown_family(limbeck, tmp_path):
    from transformers import BloomConfig, BloomForSequenceClassification

    config = BloomConfig(vocab_size=len(toy.tokenizer()), hidden_size=32, n_layer=2, n_head=4)
    odd = toy.save(BloomForSequenceClassification(config), tmp_path / "odd")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=odd))
    assert_taught(status, said, ['"bloom"', "distilbert"], tmp_path / "run")


def test_teacher_without_weights_or_tokenizer(limbeck, tmp_path):
    whole = Path(toy.teacher("bert"))
    for missing in ("model.safetensors", "tokenizer.json"):
        folder = tmp_path / missing
        folder.mkdir()
        for path in whole.iterdir():
            if path.name != missing and not (missing == "tokenizer.json" and path.name.startswith("tokenizer")):
                (folder / path.name).write_bytes(path.read_bytes())
        status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=folder))
        assert_taught(status, said, [str(folder), missing.partition(".")[0]], tmp_path / "run")


def changed_file(folder, change):
    """A copy of a teacher, whose file of weights is changed."""
    copy = Path(shutil.copytree(toy.teacher("bert"), folder))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("command", [("distill", "kd"), ("evaluate",)])
def test_teacher_that_lacks_weights(command, limbeck, tmp_path):
    """transformers would draw them at random, and say so in a warning among others."""

    def rename(weights):
        weights["bert.encoder.layers.1.output.dense.weight"] = weights.pop("bert.encoder.layer.1.output.dense.weight")

    broken = changed_file(tmp_path / "broken", rename)
    words = (
        asked(tmp_path / "run", teacher=broken) if command[0] == "distill" else [broken, "--eval", toy.data()["eval"]]
    )
    status, said = limbeck(*command, *words)
    there = ["lacks 1 of the weights of a BertForSequenceClassification", "bert.encoder.layer.1.output.dense.weight"]
    assert_taught(status, said, [*there, "bert.encoder.layers.1.output.dense.weight", "save_pretrained"])
    assert not (tmp_path / "run").exists()


def test_a_model_without_its_classifier_is_whole_where_one_is_made_anew(limbeck, tmp_path):
    body = toy.save(toy.model("bert").bert, tmp_path / "body", bare=True)
    toy.tokenizer().save_pretrained(body)
    words = ["finetune", "--model", body, "--out", tmp_path / "run", "--epochs", 1, "--quiet"]
    status, said = limbeck(*words, *toy.options(**toy.data()))
    assert (status or 0, said) == (0, "")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "other", teacher=body))
    assert_taught(status, said, ["no classifier of its own"])


def test_teacher_whose_file_is_cut_off(limbeck, tmp_path):
    copy = Path(shutil.copytree(toy.teacher("bert"), tmp_path / "cut"))
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=copy))
    assert_taught(status, said, ['cut" could not be loaded', "model.safetensors"], tmp_path / "run")


def test_teacher_whose_weights_are_pickled(limbeck, tmp_path):
    copy = Path(shutil.copytree(toy.teacher("bert"), tmp_path / "pickled"))
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=copy))
    assert_taught(status, said, ["pickled (.bin)", "can run any code", "save_pretrained"], tmp_path / "run")


def test_what_else_is_wrong_is_not_said_to_be_pickled(limbeck, tmp_path):
    for name, faults in (("empty", ["model.safetensors"]), ("broken", ["config.json"])):
        copy = Path(shutil.copytree(toy.teacher("bert"), tmp_path / name))
        (copy / "model.safetensors").rename(copy / ("training_args.bin" if name == "empty" else "pytorch_model.bin"))
        if name == "broken":
            (copy / "config.json").write_text("{", "utf8")
        status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=copy))
        assert_taught(status, said, [f'{name}" could not be loaded', *faults], tmp_path / "run")
        assert "pickled" not in said


def test_tables_of_sines_may_be_missing(tmp_path):
    """transformers builds them; a published Pegasus has none."""
    toy.save(toy.model("pegasus", auto="AutoModelForSeq2SeqLM"), tmp_path, bare=True)
    weights = load_file(tmp_path / "model.safetensors")
    tables = {name: weights.pop(name) for name in list(weights) if "embed_positions" in name}
    assert len(tables) == 2
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = models.load_model(str(tmp_path)).state_dict()
    assert all(torch.equal(found[name], table) for name, table in tables.items())


def test_numbers_in_one_file_and_words_in_the_other(limbeck, tmp_path):
    """Which number is which word, nobody said: in alphabetical order half of all students would learn the reverse."""
    numbers = csv(tmp_path / "numbers.csv", [(text, ("farm", "wild").index(label)) for text, label in ROWS])
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", eval=numbers))
    assert_taught(status, said, ["numbers.csv are numbers", "words (farm, wild)", "--labels"], tmp_path / "run")
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", eval=numbers, labels="farm,wild", epochs=1))
    assert (status or 0, said) == (0, "")


def test_regression_and_classification_do_not_mix(limbeck, tmp_path):
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", **toy.scores()))
    assert_taught(status, said, ["2 classes", "regression"], tmp_path / "run")
    one = toy.teacher("bert", labels=1)
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", teacher=one))
    assert_taught(status, said, ["a score", "classification"], tmp_path / "run")
    status, said = limbeck("evaluate", toy.teacher("bert"), *toy.options(eval=toy.scores()["eval"]))
    assert_taught(status, said, ["2 classes", "regression"])


def test_other_commands(limbeck, tmp_path):
    data = toy.options(**toy.data())
    for words, parts in (
        (["finetune", "--model", "/nowhere", "--out", tmp_path / "run", *data], ["/nowhere"]),
        (["check", "pkdd", "--teacher", toy.teacher("bert"), *data], ['no recipe "pkdd"']),
        (["evaluate", toy.teacher("bert")], ["nothing to evaluate on", "--eval FILE"]),
        (["evaluate", "/nowhere", "--eval", toy.data()["eval"]], ["/nowhere"]),
        (["report", tmp_path], ["not a run folder", "--out"]),
        (["recipes", "pkdd"], ['no recipe "pkdd"', 'Did you mean "pkd"?']),
    ):
        assert_taught(*limbeck(*words), parts, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def fail(*_, **__):
    raise RuntimeError("the disk\nis on fire [bold]")


def test_a_failure_is_one_line(limbeck, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", fail)
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", epochs=1))
    assert status == 1
    assert said == "limbeck: failed: RuntimeError: the disk\\nis on fire [bold] (--debug shows where)\n"


def test_debug_shows_where(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", fail)
    monkeypatch.setattr(sys, "argv", ["limbeck", "distill", "kd", *asked(tmp_path / "run", epochs=1, debug=True)])
    with pytest.raises(RuntimeError):
        cli.main()


def test_interrupted(limbeck, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "evaluate", interrupt)
    status, said = limbeck("distill", "kd", *asked(tmp_path / "run", epochs=1))
    assert status == 130
    assert "--resume" in said


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path):
    wrong = toy.command("distill", "pkdd", *asked(tmp_path / "run"))
    assert_taught(wrong.returncode, wrong.stderr, ['there is no recipe "pkdd"'], tmp_path / "run")
    assert wrong.stdout == ""
    out_of_range = {"set": "stages.distil.objectives.layers.map=pairs([[1, 99]])"}
    wrong = toy.command("distill", "pkd", *asked(tmp_path / "run", **out_of_range))
    assert_taught(wrong.returncode, wrong.stderr, ["[1, 99]"], tmp_path / "run")
    shown = toy.command("distill", "pkd", *asked(tmp_path / "run", debug=True, **out_of_range))
    assert shown.returncode != 0
    assert "Traceback" in shown.stderr
    assert "LimbeckError" in shown.stderr


@pytest.mark.parametrize("choice", ["of", "autoo"])
def test_a_misspelt_cache_is_no_folder(choice):
    with pytest.raises(LimbeckError, match="Did you mean"):
        Pace(cache=choice)


def test_a_cache_without_a_name():
    with pytest.raises(LimbeckError, match="no folder"):
        Pace(cache="")


def test_a_cache_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LimbeckError, match="no folder"):
        Pace(cache=str(tmp_path / "file" / "cache"))


def test_a_tokenizer_of_another_model(tmp_path):
    small = toy.save(toy.model(vocab_size=20), tmp_path / "small")
    with pytest.raises(LimbeckError, match="do not belong together"):
        toy.distill("kd", tmp_path / "run", teacher=small)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that nobody may write in, not even root, whom rights do not bind."""
    place = tmp_path / "closed"
    place.mkdir()
    monkeypatch.setattr(os, "access", lambda path, rights: Path(path) != place)
    return place


@pytest.mark.parametrize("below", ["file", "closed"])
def test_what_cannot_be_written_is_said_before_anything_is_loaded(below, limbeck, closed, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for module, name in ((prepare, "load"), (models, "load_model"), (compare, "load")):
        monkeypatch.setattr(module, name, fail)
    out, data = tmp_path / below / "new" / "run", toy.options(**toy.data())
    said = ["lies below a file" if below == "file" else "closed lets you write nothing", "Give another place"]
    for words, option in (
        (["distill", "kd", *asked(out)], "--out"),
        (["distill", "kd", *asked(tmp_path / "run", cache=out)], "--cache"),
        (["finetune", "--model", toy.teacher("bert"), "--out", out, *data], "--out"),
        (["finetune", "--model", toy.teacher("bert"), "--out", out, "--grid", "lr=1e-5", *data], "--out"),
        (["evaluate", toy.teacher("bert"), "--eval", toy.data()["eval"], "--predictions", out], "--predictions"),
        (["report", tmp_path, "--out", out], "--out"),
        (["demo", "--out", out], "--out"),
    ):
        assert_taught(*limbeck(*words), [option, *said] if option != "--cache" or below == "closed" else [option])
    assert not (tmp_path / "run").exists()


def test_a_folder_where_a_file_is_wanted(limbeck, tmp_path):
    status, said = limbeck("report", tmp_path, "--out", tmp_path)
    assert_taught(status, said, ["is a folder", "Name a file in it"])


def test_another_teacher_under_the_same_name(tmp_path):
    """Half of a student from one teacher and half from another is nobody's."""
    teacher = toy.save(toy.model("bert"), tmp_path / "teacher")
    toy.distill("kd", tmp_path / "run", teacher=teacher, steps=1)
    other = toy.model("bert")
    with torch.no_grad():
        next(other.parameters())[-1, -1] += 1e-3  # one number is enough
    toy.save(other, tmp_path / "teacher")
    with pytest.raises(LimbeckError, match="teacher_fingerprint"):
        toy.distill("kd", tmp_path / "run", teacher=teacher, steps=1, resume=True)
