import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from limbeck.data.loading import load
from limbeck.data.spec import DataOptions, DataSpec
from limbeck.errors import LimbeckError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working folder: lists of rows as TSV or CSV, lists of dicts as JSONL."""
    monkeypatch.chdir(tmp_path)

    def write(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            lines = [json.dumps(row) for row in rows]
        else:
            lines = [("\t" if path.suffix == ".tsv" else ",").join(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return name

    return write


def csv_of(pairs, header=("text", "label")):
    return [header, *pairs]


# --- GLUE folders ---------------------------------------------------------------------------------------------------

STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"]
MNLI = ["index", "sentence1", "sentence2", "label1", "gold_label"]

OFFICIAL = {
    "cola": ("CoLA", None, [["gj04", "0", "*", "bad it"], ["gj04", "1", "", "good"]], ("bad it", None), [0, 1]),
    "sst2": ("SST-2", ["sentence", "label"], [["fine ", "1"], ["dull ", "0"]], ("fine ", None), [1, 0]),
    "mrpc": (
        "MRPC",
        ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        [["1", "7", "8", 'He said " no', "He refused"], ["0", "7", "8", "x", "y"]],
        ('He said " no', "He refused"),
        [1, 0],
    ),
    "stsb": (
        "STS-B",
        STSB,
        [[*"0123456", "a", "b", "4.750"], [*"0123456", "c", "d", "0.0"]],
        ("a", "b"),
        [4.75, 0.0],
    ),
    "qqp": (
        "QQP",
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        [["1", "2", "3", "why", "how", "0"], ["1", "2", "3", "who", "whom", "1"]],
        ("why", "how"),
        [0, 1],
    ),
    "qnli": (
        "QNLI",
        ["index", "question", "sentence", "label"],
        [["0", "q", "s", "entailment"], ["1", "p", "t", "not_entailment"]],
        ("q", "s"),
        [0, 1],
    ),
    "rte": (
        "RTE",
        ["index", "sentence1", "sentence2", "label"],
        [["0", "p", "h", "not_entailment"], ["1", "q", "i", "entailment"]],
        ("p", "h"),
        [1, 0],
    ),
    "wnli": (
        "WNLI",
        ["index", "sentence1", "sentence2", "label"],
        [["0", "p", "h", "1"], ["1", "q", "i", "0"]],
        ("p", "h"),
        [1, 0],
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_layout(write, name):
    folder, header, rows, first, labels = OFFICIAL[name]
    for split in ("train", "dev"):
        write(f"glue/{folder}/{split}.tsv", [header, *rows] if header else rows)
    corpus = load(DataSpec(task=name, data="glue/"))
    for split in (corpus.train, corpus.evals["dev"]):
        assert (split.text[0], split.text_pair and split.text_pair[0]) == first
        np.testing.assert_array_equal(split.labels, np.array(labels, split.labels.dtype))
        assert split.labels.dtype == (np.float32 if name == "stsb" else np.int64)


def test_mnli_has_two_dev_sets_and_skips_broken_lines(write):
    good = [["0", "p", "h", "neutral", "neutral"], ["1", "p", "i", "neutral", "contradiction"]]
    write("MNLI/train.tsv", [MNLI, *good, ["2", "broken"], ["3", "p", "", "neutral", "neutral"]])
    write("MNLI/dev_matched.tsv", [MNLI, *good])
    write("MNLI/dev_mismatched.tsv", [MNLI, *good[:1]])
    corpus = load(DataSpec(task="mnli", data="MNLI"))
    assert list(corpus.evals) == ["dev", "dev_mismatched"]
    assert corpus.train.labels.tolist() == [1, 2]
    assert any("2 rows with missing fields skipped" in note for note in corpus.notes)


def test_a_broken_line_of_another_task_is_an_error(write):
    write("RTE/train.tsv", [["index", "sentence1", "sentence2", "label"], ["0", "p", "h", "entailment"], ["1", "q"]])
    with pytest.raises(LimbeckError, match=r"train\.tsv, line 3 has 2 fields"):
        load(DataSpec(task="rte", data="RTE"))


@pytest.mark.parametrize("folder", ["glue/rte", "glue/RTE", "glue/Rte"])
def test_folder_spellings_and_hub_columns(write, folder):
    rows = [
        {"sentence1": "a", "sentence2": "b", "label": 0},
        {"sentence1": "c", "sentence2": "d", "label": 1},
    ]
    write(f"{folder}/train.jsonl", rows)
    write(f"{folder}/validation.jsonl", rows)
    for data in ("glue", folder):
        corpus = load(DataSpec(task="rte", data=data))
        assert corpus.train.labels.tolist() == [0, 1]
        assert corpus.evals["dev"].text_pair == ["b", "d"]


def test_the_official_file_wins(write):
    for suffix, text in (("tsv", "official"), ("jsonl", "hub")):
        rows = [["sentence", "label"], [text, "1"], [text + "!", "0"]]
        if suffix == "jsonl":
            rows = [{"sentence": text, "label": 1}]
        write(f"SST-2/train.{suffix}", rows)
        write(f"SST-2/dev.{suffix}", rows)
    assert load(DataSpec(task="sst2", data="SST-2")).train.text[0] == "official"


def test_a_folder_without_the_train_file_can_still_be_evaluated_on(write):
    write("QNLI/dev.tsv", [OFFICIAL["qnli"][1], *OFFICIAL["qnli"][2]])
    spec = DataSpec(task="qnli", data=".")
    with pytest.raises(LimbeckError, match=r"no train\.tsv.*QNLI, which holds dev\.tsv"):
        load(spec)
    corpus = load(spec, train=False)
    assert corpus.train is None
    assert len(corpus.evals["dev"]) == 2


# --- the hub --------------------------------------------------------------------------------------------------------


def _load_local(monkeypatch, folder):
    """datasets.load_dataset, answering every id from a folder."""
    import datasets

    real, asked = datasets.load_dataset, []

    def load_dataset(name, config=None):
        asked.append((name, config))
        return real(str(folder), cache_dir=str(folder / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_glue_from_the_hub(tmp_path, monkeypatch):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            # The reverse of the official order: names count, not numbers.
            "label": ClassLabel(names=["not_entailment", "entailment"]),
        }
    )
    columns = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0, 1]}
    for split in ("train", "validation"):
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    asked = _load_local(monkeypatch, tmp_path)
    corpus = load(DataSpec(task="RTE", data="nyu-mll/glue"))
    assert asked == [("nyu-mll/glue", "rte")]
    assert corpus.train.labels.tolist() == [1, 0]
    assert corpus.evals["dev"].text_pair == ["c", "d"]


def test_any_dataset_of_the_hub_has_its_own_label_names(tmp_path, monkeypatch):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["zebra", "ant"])})
    for split, labels in (("train", [0, 1] * 10), ("test", [-1] * 20)):
        columns = {"text": [f"text {n}" for n in range(20)], "label": labels}
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    _load_local(monkeypatch, tmp_path)
    corpus = load(DataSpec(data="someone/animals"))
    assert corpus.task.name == "animals"
    assert corpus.task.labels == ("zebra", "ant")
    assert list(corpus.evals) == ["dev"]  # held out; the test set has no labels


@pytest.mark.parametrize(
    ("kind", "columns", "metric"),
    [
        ("tagging", {"tokens": [["a", "fox"], ["b"]], "ner_tags": [[0, 1], [0]]}, "f1"),
        ("multi-label", {"text": ["a fox", "b"], "labels": [[0, 1], []]}, "micro_f1"),
    ],
)
def test_lists_of_labels_of_the_hub_have_names_too(tmp_path, monkeypatch, kind, columns, metric):
    from datasets import ClassLabel, Dataset, Features, List, Value

    text, label = columns
    texts = List(Value("string")) if kind == "tagging" else Value("string")
    features = Features({text: texts, label: List(ClassLabel(names=["O", "B-animal"]))})
    for split in ("train", "validation"):
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    _load_local(monkeypatch, tmp_path)
    corpus = load(DataSpec(data="someone/animals"))
    assert (corpus.task.kind, corpus.task.labels, corpus.task.metrics[0]) == (kind, ("O", "B-animal"), metric)
    assert corpus.train.labels[0].tolist() == ([0, 1] if kind == "tagging" else [1, 1])


def test_an_unreachable_hub_is_told(monkeypatch):
    import datasets

    def fail(*_):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(LimbeckError, match=r"no folder nyu-mll/glue here.*configuration rte: Couldn't reach the Hub"):
        load(DataSpec(task="rte", data="nyu-mll/glue"))


def test_a_path_that_is_no_id_does_not_reach_for_the_hub():
    with pytest.raises(LimbeckError, match=r"there is no folder \./glue/"):
        load(DataSpec(task="rte", data="./glue/"))


# --- files of one's own ---------------------------------------------------------------------------------------------


def test_columns_are_guessed_and_said(write):
    write(
        "train.csv", csv_of([("1", "p", "h", "yes"), ("2", "q", "i", "no")], ("id", "Premise", "Hypothesis", "label"))
    )
    write("dev.csv", csv_of([("1", "p", "h", "yes")], ("id", "Premise", "Hypothesis", "label")))
    corpus = load(DataSpec(train="train.csv", eval="dev.csv"))
    assert corpus.train.text_pair == ["h", "i"]
    assert corpus.task.labels == ("no", "yes")
    assert corpus.task.metrics == ("accuracy", "f1", "matthews")
    assert corpus.task.name == Path.cwd().name  # "train" would say nothing
    expected = "train: 2 examples of train.csv (text = Premise, text_pair = Hypothesis, label = label; guessed by name)"
    assert corpus.notes[0] == expected


def test_the_only_column_of_words_is_the_text(write):
    write("a.csv", csv_of([(str(n), f"word {n}", str(n % 3)) for n in range(30)], ("row", "body", "target")))
    corpus = load(DataSpec(train="a.csv", eval="a.csv"))
    assert corpus.train.text[0] == "word 0"
    assert corpus.task.labels == ("0", "1", "2")
    assert corpus.task.metrics == ("accuracy",)


def test_the_text_must_be_named_where_it_is_not_clear(write):
    write("a.csv", csv_of([("a", "b", "0"), ("c", "d", "1")], ("one", "two", "label")))
    with pytest.raises(LimbeckError, match=r'not clear which column of a\.csv.*"one", "two".*--text COLUMN'):
        load(DataSpec(train="a.csv"))
    assert load(DataSpec(train="a.csv", eval="a.csv", text="two")).train.text == ["b", "d"]


@pytest.mark.parametrize(("option", "flag"), [("text", "--text"), ("text_pair", "--text-pair"), ("label", "--label")])
def test_a_named_column_must_be_there(write, option, flag):
    write("a.csv", csv_of([("a", "0"), ("b", "1")], ("sentence", "label")))
    with pytest.raises(LimbeckError, match=rf'a\.csv has no column "sentense".*Did you mean "sentence"\? Give {flag}'):
        load(DataSpec(train="a.csv", **{option: "sentense"}))


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        (["b", "a", "b"], "classification", ("a", "b")),
        ([10, 9, 10], "classification", ("9", "10")),
        (["10", "9", "10"], "classification", ("9", "10")),
        ([1.0, 0.0, 1.0], "classification", ("0", "1")),
        ([True, False, True], "classification", ("false", "true")),
        ([0.5, 1.0, 0.0], "regression", ()),
        (["0.5", "1", "2e0"], "regression", ()),
        ([".5", "-.25", "1."], "regression", ()),
    ],
)
def test_kind_of_label(write, values, kind, labels):
    write("a.jsonl", [{"text": f"t{n}", "label": value} for n, value in enumerate(values)])
    corpus = load(DataSpec(train="a.jsonl", eval="a.jsonl"))
    assert corpus.task.kind == kind
    assert corpus.task.labels == labels
    if kind == "regression":
        assert corpus.task.metrics == ("spearman", "pearson")
        np.testing.assert_allclose(corpus.train.labels, [float(value) for value in values])
    else:
        assert corpus.train.labels.max() == 1


def test_label_names_can_be_fixed(write):
    write("words.csv", csv_of([("a", "yes"), ("b", "no")]))
    write("numbers.csv", csv_of([("a", "1"), ("b", "0")]))
    for file in ("words.csv", "numbers.csv"):
        corpus = load(DataSpec(train=file, eval=file, labels=("no", "yes")))
        assert corpus.task.labels == ("no", "yes")
        assert corpus.train.labels.tolist() == [1, 0]
    corpus = load(DataSpec(train="numbers.csv", eval="numbers.csv", labels=("1", "0")))
    assert corpus.train.labels.tolist() == [0, 1]


def test_a_label_outside_the_fixed_names(write):
    write("a.csv", csv_of([("a", "yes"), ("b", "noo")]))
    with pytest.raises(
        LimbeckError, match=r'a\.csv: row 2 has the label "noo".*--labels \(no, yes\)\. Did you mean "no"'
    ):
        load(DataSpec(train="a.csv", labels=("no", "yes")))


def test_a_label_that_training_never_saw(write):
    write("train.csv", csv_of([("a", "1"), ("b", "2")]))
    write("dev.csv", csv_of([("a", "0")]))
    with pytest.raises(LimbeckError, match=r'dev\.csv: row 1 has the label "0".*labels of train\.csv \(1, 2\)'):
        load(DataSpec(train="train.csv", eval="dev.csv"))


@pytest.mark.parametrize("labels", [("yes",), ("yes", "yes")])
def test_label_names_must_be_two_or_more(write, labels):
    write("a.csv", csv_of([("a", "yes"), ("b", "no")]))
    with pytest.raises(LimbeckError, match="at least two labels, each once"):
        load(DataSpec(train="a.csv", labels=labels))


def test_one_class_is_nothing_to_learn(write):
    write("a.csv", csv_of([("a", "yes"), ("b", "yes")]))
    with pytest.raises(LimbeckError, match=r'every example of a\.csv has the label "yes"'):
        load(DataSpec(train="a.csv", eval="a.csv"))


def test_a_score_that_is_no_number(write):
    write("train.csv", csv_of([("a", "0.5"), ("b", "1.5")]))
    write("dev.csv", csv_of([("a", "high")]))
    with pytest.raises(LimbeckError, match=r'dev\.csv: row 1 has the label "high"'):
        load(DataSpec(train="train.csv", eval="dev.csv"))


@pytest.mark.parametrize("row", [{"text": "", "label": 1}, {"text": None, "label": 1}, {"text": "a"}])
def test_a_missing_field(write, row):
    write("a.jsonl", [{"text": "a", "label": 0}, row, row])
    with pytest.raises(LimbeckError, match=r"a\.jsonl: row 2 has nothing in one of text, label, as have 1 other rows"):
        load(DataSpec(train="a.jsonl"))


def test_a_text_that_is_no_text(write):
    write("a.jsonl", [{"text": ["a"], "label": 0}, {"text": ["b"], "label": 1}])
    with pytest.raises(LimbeckError, match='text column "text" holds a list'):
        load(DataSpec(train="a.jsonl"))


def test_texts_that_are_trained_on_and_scored_on_are_counted(write):
    write("train.csv", csv_of([(f"text {n}", str(n % 2)) for n in range(8)]))
    write("dev.csv", csv_of([("text 1", "1"), ("other", "0"), ("more", "1")]))
    write("clean.csv", csv_of([("other", "0"), ("more", "1")]))
    leaked, clean = (load(DataSpec(train="train.csv", eval=file)).notes for file in ("dev.csv", "clean.csv"))
    assert "dev: 1 of its 3 texts are trained on too, so that its scores flatter" in leaked
    assert not any("trained on" in note for note in clean)


def test_held_out_examples_are_the_same_every_time_and_share_no_text(write):
    rows = [(f"text {n % 150}", str(n % 2)) for n in range(300)]
    write("a.csv", csv_of(rows))
    write("b.csv", csv_of(rows[::-1]))
    first, second = (load(DataSpec(train=file)) for file in ("a.csv", "b.csv"))
    assert set(first.evals["dev"].text) == set(second.evals["dev"].text)
    assert not set(first.evals["dev"].text) & set(first.train.text)
    assert len(first.evals["dev"]) == 30
    assert len(first.train) == 270
    assert any("held out of a.csv" in note for note in first.notes)


def test_a_test_file_comes_after_dev(write):
    write("a.csv", csv_of([(f"text {n}", str(n % 2)) for n in range(20)]))
    assert list(load(DataSpec(train="a.csv", eval="a.csv", test="a.csv")).evals) == ["dev", "test"]
    assert list(load(DataSpec(train="a.csv", test="a.csv")).evals) == ["dev", "test"]


def test_an_eval_file_alone(write):
    write("a.csv", csv_of([("a", "yes"), ("b", "no")]))
    corpus = load(DataSpec(eval="a.csv"), train=False)
    assert corpus.train is None
    assert corpus.evals["dev"].labels.tolist() == [1, 0]
    with pytest.raises(LimbeckError, match="nothing to train on"):
        load(DataSpec(eval="a.csv"))


def test_a_glue_task_with_files(write):
    write(
        "a.jsonl", [{"premise": "p", "hypothesis": "h", "label": label} for label in ("Not-Entailment", "entailment")]
    )
    corpus = load(DataSpec(task="rte", train="a.jsonl", eval="a.jsonl"))
    assert corpus.task.name == "rte"
    assert corpus.train.labels.tolist() == [1, 0]
    assert corpus.train.text_pair == ["h", "h"]


def test_unlabelled_files(write):
    write("train.jsonl", [{"text": "a"}, {"text": "b"}])
    write("dev.csv", csv_of([("a", "yes"), ("b", "no")]))
    with pytest.raises(LimbeckError, match=r"no column of train\.jsonl looks like a label"):
        load(DataSpec(train="train.jsonl", eval="dev.csv"))
    corpus = load(DataSpec(train="train.jsonl", eval="dev.csv"), labelled=False)
    assert corpus.train.labels is None
    assert corpus.evals["dev"].labels.tolist() == [1, 0]
    assert corpus.task.labels == ("no", "yes")
    nothing = load(DataSpec(train="train.jsonl", eval="train.jsonl"), labelled=False)
    assert (nothing.task.labels, nothing.task.metrics) == ((), ())


def test_pairs_and_single_texts_do_not_mix(write):
    write("train.csv", csv_of([("a", "b", "0"), ("c", "d", "1")], ("sentence1", "sentence2", "label")))
    write("dev.csv", csv_of([("a", "0")], ("sentence", "label")))
    with pytest.raises(LimbeckError, match="single texts, unlike the files before it"):
        load(DataSpec(train="train.csv", eval="dev.csv"))


def test_a_folder_of_files_named_after_splits(write):
    for split in ("train", "dev"):
        write(f"mine/{split}.csv", csv_of([("a", "yes"), ("b", "no")]))
    corpus = load(DataSpec(data="mine"))
    assert corpus.task.name == "mine"
    assert list(corpus.evals) == ["dev"]


def test_parquet_files(tmp_path):
    table = pyarrow.table({"text": ["a", "b"], "label": [0.0, 1.0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    spec = DataSpec(train=str(tmp_path / "a.parquet"), eval=str(tmp_path / "a.parquet"))
    assert load(spec).task.labels == ("0", "1")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(), "nothing to train on"),
        (DataSpec(task="rte"), "--task rte is given without its data"),
        (DataSpec(task="ret", data="x"), 'Did you mean "rte"'),
        (DataSpec(data="x", train="a.csv"), "both --data x and files"),
        (DataSpec(data="a.csv"), "--data a.csv is a file.*--train a.csv"),
        (DataSpec(data="."), "holds no train file"),
        (DataSpec(task="stsb", train="a.csv", labels=("a", "b")), "stsb predicts a score"),
    ],
)
def test_a_spec_that_makes_no_sense(write, spec, message):
    write("a.csv", csv_of([("a", "1"), ("b", "2")]))
    with pytest.raises(LimbeckError, match=message):
        load(spec)


def test_functions_take_what_a_spec_has():
    assert list(DataOptions.__annotations__) == [field.name for field in fields(DataSpec)]
