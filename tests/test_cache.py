"""The teacher's cache: the same answers as the teacher, and never somebody else's."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import ModernBertForTokenClassification

import limbeck
from limbeck import cache, store, teachers
from limbeck.check import examine, precision
from limbeck.data.encoding import Encoded
from limbeck.data.plan import BUCKETS
from limbeck.data.spec import DataSpec
from limbeck.distiller import Distiller
from limbeck.features import LOGITS, Rows, seen_at
from limbeck.folder import write_file
from limbeck.objectives import Match
from limbeck.prepare import prepare
from limbeck.request import request
from limbeck.spec import allowing
from limbeck.taps import Site, Tap
from limbeck.teachers import Cached, Live
from tests import toy
from tests.tiny import every_family, tiny_model, tiny_pair

CPU = torch.device("cpu")
SITES = [("cls", 2), ("mean", 3), ("hidden", 1), ("hidden", 4), ("embeddings", 0), ("logits", LOGITS)]


@seen_at("hidden", width="width", rows="example")
def twice(seen, layer):
    return Rows(2 * seen.hidden[layer][:, 0], seen.one_row)


def examples(count: int = 23, seed: int = 0, pad: int = 1) -> Encoded:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 40, count)
    total = int(lengths.sum())
    columns = {
        "input_ids": rng.integers(5, 100, total).astype(np.int32),
        "token_type_ids": np.zeros(total, np.int32),
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Encoded(columns, offsets, rng.integers(0, 3, count), {"input_ids": pad, "token_type_ids": 0})


def subset(data: Encoded, ids: list[int]) -> Encoded:
    spans = [slice(data.offsets[i], data.offsets[i + 1]) for i in ids]
    columns = {name: np.concatenate([column[s] for s in spans]) for name, column in data.columns.items()}
    offsets = np.concatenate([[0], np.cumsum(data.lengths[ids])])
    return Encoded(columns, offsets, data.labels[ids], data.pads)


def built(model, data: Encoded, sites=SITES, folder: Path | None = None, dtype=torch.float32):
    said: list[str] = []
    live = Live(model, sites)

    def asked(fewer):
        return live.only(fewer).features

    tables = cache.build(live.tap, asked, data, device=CPU, dtype=dtype, folder=folder, say=said.append)
    return tables, said


def room(**places: int):
    """A budget of no more than this."""
    return lambda device, folder: {"device": 0, "host": 0, "file": 0} | places


def size_of(model, data: Encoded, site: tuple[str, int]) -> int:
    return store.Layout.of(Site(*site), Tap(model, [site]), torch.float32).size(data)


def cached(model, data: Encoded, sites=SITES, folder: Path | None = None) -> Cached:
    return Cached(Live(model, sites), built(model, data, sites, folder)[0], data, CPU)


@pytest.mark.parametrize("attention", [[], [("attention", 3)]])  # is not cached: the teacher runs for it
@pytest.mark.parametrize("family", every_family)
def test_cached_is_live(family, attention):
    model = tiny_model(family)
    data = examples(pad=model.config.pad_token_id)
    sites = SITES + attention
    teacher, live = cached(model, data, sites), Live(model, sites)
    assert (teacher.live.tap.depth == 3) if attention else (teacher.live is None)
    assert len(teacher.tables) == (2 if attention else len(SITES))
    for ids, length in (([3, 1, 22], 40), ([7, 7, -1], 48), ([0], 40)):
        batch = data.batch(np.array(ids), length)
        ours, theirs = teacher.features(**batch), live.features(**batch)
        assert ours.keys() == theirs.keys()
        real = batch["weight"] > 0
        for site in theirs:
            values, mask = theirs[site].values, theirs[site].mask
            assert torch.equal(ours[site].mask[real], mask[real])
            gap = (ours[site].values - values)[real][mask[real]].abs().max()
            assert gap < 1e-5, site


def test_alike_tables_are_joined_and_held_once():
    model, data = tiny_model("bert"), examples()
    sites = [("cls", 1), ("cls", 3), ("mean", 2), ("hidden", 2), ("logits", -1)]
    apart = Cached(Live(model, sites), built(model, data, sites)[0], data, CPU)
    tables = built(model, data, sites)[0]
    for table in tables:
        table.mapped = True  # what lies in a file stays there
    batch = data.batch(np.array([3, 1, -1]), 40)
    joined = {len(found): values for found, values in apart.pooled}
    assert set(joined) == {3, 1}
    pooled = [table for table in apart.tables if table.layout.site.feature in ("cls", "mean")]
    assert len({table.values.untyped_storage().data_ptr() for table in pooled}) == 1
    whole = Cached(Live(model, sites), tables, data, CPU)
    assert not whole.pooled
    ours, theirs = apart.features(**batch), whole.features(**batch)
    assert ours.keys() == theirs.keys() == set(sites)
    assert all(torch.equal(ours[site].values, theirs[site].values) for site in sites)


def test_a_teacher_that_only_looks_up_is_not_moved():
    """It may have left the device, to make room."""
    model, data = tiny_model("bert"), examples()
    distiller = Distiller(model, tiny_model("bert"), [Match("cls", map="last")])
    sites = distiller.teacher.tap.sites
    distiller.teacher = cached(model, data, sites)
    assert distiller.double().teacher.model.dtype == torch.float32
    distiller.teacher = Live(model, sites)
    assert distiller.double().teacher.model.dtype == torch.float64


def test_a_value_depends_on_no_other_example():
    model, data = tiny_model("bert"), examples()
    whole = built(model, data)[0]
    ids = [20, 4, 11]
    some = built(model, subset(data, ids))[0]
    for all_of_them, few in zip(whole, some):
        expected = [all_of_them.values[all_of_them.layout.span(data, i)] for i in ids]
        assert torch.equal(few.values, torch.cat(expected))


def test_a_folder_is_shared_by_subsets_and_other_labels(tmp_path):
    model, data = tiny_model("bert"), examples()
    built(model, subset(data, [1, 2, 3]), folder=tmp_path)
    tables, said = built(model, data, folder=tmp_path)
    assert "20 examples" in said[0]
    noisy = Encoded(data.columns, data.offsets, 2 - data.labels, data.pads)
    again, said = built(model, noisy, folder=tmp_path)
    assert not said
    assert all(torch.equal(a.values, b.values) for a, b in zip(tables, again))


def test_equal_examples_take_as_long_as_others(tmp_path):
    """As many again would take the square of it."""
    model, data = tiny_model("bert"), subset(examples(), [5] * 3000)
    built(model, data, [("cls", 2)], tmp_path)
    began = time.monotonic()
    tables, said = built(model, data, [("cls", 2)], tmp_path)
    assert not said
    assert time.monotonic() - began < 5
    assert len({tuple(row) for row in tables[0].values.tolist()}) == 1


def test_what_differs_is_another_entry(tmp_path, monkeypatch):
    model, data = tiny_model("bert"), examples()
    built(model, data, folder=tmp_path)
    assert built(model, data, folder=tmp_path)[1] == []
    text = Encoded({k: v.copy() for k, v in data.columns.items()}, data.offsets, data.labels, data.pads)
    text.columns["input_ids"][0] += 1
    assert "for 1 examples" in built(model, text, folder=tmp_path)[1][0]
    assert "for 23 examples" in built(model, data, [("cls", 1)], tmp_path)[1][0]
    assert "for 23 examples" in built(model, data, folder=tmp_path, dtype=torch.bfloat16)[1][0]
    with monkeypatch.context() as later:  # code that may compute a feature otherwise
        later.setattr(store, "own_code", lambda: "later")
        assert "for 23 examples" in built(model, data, folder=tmp_path)[1][0]
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    assert "for 23 examples" in built(model, data, folder=tmp_path)[1][0]


def test_what_another_process_lacks_is_asked_by_all(tmp_path, monkeypatch):
    """Another run may store it while the processes look: a sharded teacher would wait for those that do not ask."""
    model, data = tiny_model("bert"), examples()
    built(model, data, folder=tmp_path)
    monkeypatch.setattr(cache, "_least", lambda values, device: values * (np.arange(len(values)) > 0))
    assert "for 1 examples" in built(model, data, folder=tmp_path)[1][0]


def test_a_changed_weight_changes_the_answers(tmp_path):
    model, data = tiny_model("bert"), examples()
    before = built(model, data, folder=tmp_path)[0]
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    after = built(model, data, folder=tmp_path)[0]
    logits = [next(t.values for t in tables if t.layout.site.feature == "logits") for tables in (before, after)]
    assert not torch.allclose(*logits)


def test_what_does_not_fit_is_asked_of_the_teacher(monkeypatch):
    model, data = tiny_model("bert"), examples()
    monkeypatch.setattr(cache, "budget", room(host=23 * 32 * 4))
    tables, said = built(model, data, [("cls", 4), ("hidden", 2)])
    assert [table.layout.site for table in tables] == [("cls", 4)]
    assert "hidden of layer 2" in said[0]
    assert "runs 2 of 4 layers" in said[0]


@pytest.mark.parametrize("deep", ["hidden", "attention"])  # too large, and not to be cached
def test_what_a_teacher_gives_anyway_is_not_kept(monkeypatch, deep):
    """One that runs to its last layer has been through all below, so looking these up would save nothing."""
    model, data = tiny_model("bert"), examples()
    monkeypatch.setattr(cache, "budget", room(host=5 * 23 * 32 * 4))
    tables, said = built(model, data, [("cls", 2), ("mean", 4), ("embeddings", 0), (deep, 4)])
    assert not tables
    assert f"{deep} of layer 4" in "".join(said)
    assert said[0].endswith("runs 4 of 4 layers at every step")


def test_an_encoder_is_not_looked_up_beside_a_decoder_that_runs():
    model, data = tiny_pair("bart"), examples()
    states, scores = ("hidden(side=encoder)", 2), ("scores", 1)
    for sites, kept in (([states], [states]), ([states, scores], [])):
        choice = cache.choose(Tap(model, sites), data, torch.float32, {"host": 10**9})
        assert [layout.site for layout in choice.places] == kept


def test_what_does_not_fit_in_memory_goes_to_a_file(monkeypatch, tmp_path):
    model, data = tiny_model("bert"), examples()
    expected = built(model, data, [("hidden", 4)])[0]
    monkeypatch.setattr(cache, "budget", room(file=10**9))
    tables, _ = built(model, data, [("hidden", 4)], tmp_path)
    assert torch.equal(tables[0].values, expected[0].values)
    assert not list(tmp_path.rglob("*.table"))  # mapped, and gone with the run
    assert list(tmp_path.rglob("*.safetensors"))


def test_a_disk_without_room_is_not_written_to(monkeypatch, tmp_path):
    """Where a mapped file finds no room, the system ends the process."""
    model, data = tiny_model("bert"), examples()
    size = size_of(model, data, ("hidden", 4))
    real = cache.budget
    monkeypatch.setattr(cache, "budget", lambda *where: {**real(*where), "host": 0})
    for free, places in ((2 * size - 2, []), (2 * size, [("hidden", 4)])):
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        tables, said = built(model, data, [("hidden", 4)], tmp_path / str(free))
        assert [table.layout.site for table in tables] == places
        assert ("is not cached" in said[0]) == (not places)


def test_what_finds_no_room_on_the_disk_is_not_stored(monkeypatch, tmp_path):
    """It is looked up in this run all the same."""
    model, data = tiny_model("bert"), examples()
    size, real = size_of(model, data, ("hidden", 4)), cache.budget
    for free, stored in ((size - 1, False), (size, True)):
        monkeypatch.setattr(cache, "budget", lambda *where, free=free: {**real(*where), "file": free})
        tables, said = built(model, data, [("hidden", 4)], tmp_path / str(free))
        assert len(tables) == 1
        assert bool(list((tmp_path / str(free)).rglob("*.safetensors"))) == stored
        assert ("not stored for other runs" in said[-1]) == (not stored)


def test_room_is_needed_for_what_is_missing_alone(monkeypatch, tmp_path):
    model, data = tiny_model("bert"), examples()
    built(model, subset(data, range(22)), [("hidden", 4)], tmp_path)
    real = cache.budget
    few = size_of(model, subset(data, [22]), ("hidden", 4))
    monkeypatch.setattr(cache, "budget", lambda *where: {**real(*where), "file": few})
    assert len(built(model, data, [("hidden", 4)], tmp_path)[1]) == 1
    assert not built(model, data, [("hidden", 4)], tmp_path)[1]


@pytest.mark.parametrize("problem", [OSError("quota"), SafetensorError("I/O error")])
def test_a_disk_that_fills_up_costs_no_run_its_answers(problem, monkeypatch, tmp_path):
    model, data = tiny_model("bert"), examples()
    expected = built(model, data, [("hidden", 4)])[0]

    def full(*_, **__):
        raise problem

    monkeypatch.setattr(store, "save_file", full)
    tables, said = built(model, data, [("hidden", 4)], tmp_path)
    assert torch.equal(tables[0].values, expected[0].values)
    assert said[-1].endswith(f"not stored for other runs, since {problem}")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_feature_of_ones_own_is_not_said_to_pair_positions():
    model, data = tiny_model("bert"), examples()
    with allowing(code=True):
        for feature, why in ((f"{__name__}.twice", "code of your own"), ("attention", "it pairs positions")):
            assert why in cache.choose(Tap(model, [(feature, 1)]), data, torch.float32, {"host": 10**9}).why


def test_processes_find_room_alike(monkeypatch, tmp_path):
    """Each has its own table; and one that saw a fuller disk would wait for answers that the others do not ask."""
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda place: SimpleNamespace(free=800))
    monkeypatch.setattr(cache, "_least", lambda values, device: values - 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cache.budget(CPU, tmp_path)["file"] == 199


def test_only_what_is_kept_is_computed(monkeypatch):
    """Attention, which is not kept, would take more memory than all else."""
    model, data = tiny_model("bert"), examples()
    live, asked = Live(model, [("hidden", 1), ("hidden", 4), ("attention", 1)]), []

    def asking(sites):
        asked.extend(sites)
        return live.only(sites).features

    cache.build(live.tap, asking, data, device=CPU, dtype=torch.float32, folder=None, say=print)
    assert asked == [("hidden", 4)]


def test_models_of_two_kinds_share_nothing(tmp_path):
    """They may have the same weights by the same names, and say other things with them."""
    sequence, data = tiny_model("modernbert"), examples(pad=0)
    tagging = ModernBertForTokenClassification(sequence.config)
    tagging.load_state_dict(sequence.state_dict())
    assert "for 23 examples" in built(sequence, data, [("logits", LOGITS)], tmp_path)[1][0]
    assert "for 23 examples" in built(tagging, data, [("logits", LOGITS)], tmp_path)[1][0]


def test_what_lies_on_the_host_is_brought_along(monkeypatch):
    """As on a GPU that has no room: values go through buffers that stay where they are."""
    model, data = tiny_model("bert"), examples()
    monkeypatch.setattr(Cached, "_on_host", lambda self, table: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    teacher, live, places = cached(model, data), Live(model, SITES), []
    for ids in ([3, 1, 22], [7, 7, -1]):
        batch = data.batch(np.array(ids), 40)
        teacher.fetch(np.array(ids), 40)
        ours, theirs = teacher.features(**batch), live.features(**batch)
        real = batch["weight"] > 0
        assert ours.keys() == theirs.keys() == {site for site, _, _ in teacher.staged}
        for site in theirs:
            mask = theirs[site].mask[real]
            gap = (ours[site].values - theirs[site].values)[real][mask].abs().max()
            assert gap < 1e-5, site
        places.append({key: value.data_ptr() for key, value in teacher.staged.items()})
    assert places[0] == places[1]


def test_sizes_are_those_of_the_tables():
    model, data = tiny_model("bert"), examples()
    for table in built(model, data)[0]:
        assert table.layout.size(data) == table.values.nbytes


@pytest.mark.parametrize(("epochs", "pays"), [(3, True), (1, False)])
def test_check_says_what_a_run_will_hold(epochs, pays, tmp_path, monkeypatch):
    asked = {"teacher": toy.teacher("bert"), "layers": 2, "set": [f"stages.*.epochs={epochs}"]}
    data, held, build = toy.data(), [], cache.build

    def watch(*args, **options):
        tables = build(*args, **options)
        held.extend(table.values.nbytes for table in tables)
        return tables

    monkeypatch.setattr(teachers, "build", watch)
    limbeck.distill("lwd", out=tmp_path / "run", quiet=True, **asked, **data)
    said = examine(prepare(request("lwd", DataSpec(**data), **asked)), {}).stages[0].cache_gib
    assert bool(held) == pays
    assert said * 2**30 == sum(held)
    assert [precision(torch.device(name)) for name in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("site", ["attention", "scores", "value_relation"])
def test_what_pairs_positions_is_not_cached(site):
    assert store.Layout.of(Site(site, 1), Tap(tiny_model("bert"), [(site, 1)]), torch.float32) is None


def test_a_batch_for_computing_has_no_more_tokens_than_fit():
    lengths = [16] * 3 + [4096] * 9
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    data = Encoded({"input_ids": np.zeros(offsets[-1], np.int32)}, offsets, None, {"input_ids": 0})
    shapes = [(len(ids), length) for ids, length in cache.canonical(data, np.arange(12), 10**18, 64)]
    assert shapes == [(64, 16), (8, 4096), (8, 4096)]


def test_a_batch_for_computing_has_the_shape_its_examples_lengths_give():
    """Not the shape of what else is in the data: kernels, and so last bits, follow from the shape."""
    model, data = tiny_model("bert"), examples()
    short = [int(i) for i in np.flatnonzero(data.lengths <= 20)]
    assert data.lengths[short].max() not in BUCKETS  # padded to a bucket, not to the longest there is
    live, seen = Live(model, SITES), []

    def answer(**batch):
        seen.append(dict.fromkeys(batch["id"][batch["id"] >= 0].tolist(), tuple(batch["input_ids"].shape)))
        return live.features(**batch)

    shapes = []
    for part in (data, subset(data, short)):
        seen.clear()
        options = {"device": CPU, "dtype": torch.float32, "folder": None, "say": print}
        cache.build(live.tap, lambda sites: answer, part, **options)
        shapes.append({i: shape for batch in seen for i, shape in batch.items()})
    assert [shapes[0][i] for i in short] == [shapes[1][i] for i in range(len(short))]


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path):
    """What is left of pieces would fill the disk that is full already."""

    def fail(place):
        place.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "piece", fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "why"), [("l-ild", "attention of layer 4 .* pairs positions"), ("mixkd", "mixes|mixed")]
)
def test_check_says_why_the_teacher_runs(recipe, why):
    data = toy.data()
    report = examine(prepare(request(recipe, DataSpec(**data), teacher=toy.teacher("bert"), layers=2)), {})
    assert report.stages[0].cache_gib == 0
    assert re.search(why, " ".join([*report.notes, report.stages[0].uncached]))
