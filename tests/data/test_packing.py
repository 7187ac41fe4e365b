import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from limbeck.data import packing, resident
from limbeck.data.corpus import RunningText
from limbeck.data.encoding import encode
from limbeck.data.grammar import build_tokenizer
from limbeck.data.kinds import Kind
from limbeck.data.packing import find_files, pack
from limbeck.errors import LimbeckError

WORDS = ["the", "old", "fox", "beat", "a", "hen", "and", "ran", "home"]
TOKENIZER = build_tokenizer(WORDS)
CLS, SEP = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
# Documents of one line and of several, longer and shorter than a block.
DOCUMENTS = [
    "\n".join(" ".join((WORDS * 3)[line : line + size]) + " " for line in range(lines))
    for size, lines in ((3, 1), (9, 4), (1, 1), (14, 2))
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))


def text_file(folder, documents=DOCUMENTS, name="text.txt"):
    path = folder / name
    path.write_text("\n\n\n".join(documents) + "\n", "utf8")
    return path


def stream(documents=DOCUMENTS):
    """Every word of every document, each document with a separator behind it."""
    return [token for text in documents for token in [*map(TOKENIZER.convert_tokens_to_ids, text.split()), SEP]]


def blocks(files, length=8, tokenizer=TOKENIZER):
    tokens, offsets = pack(files, "text", tokenizer, length)
    return [tokens[start:end].tolist() for start, end in pairwise(offsets)]


@pytest.mark.parametrize("piece", [2**14, 10])
@pytest.mark.parametrize("chunk", [2**20, 30])
@pytest.mark.parametrize("length", [8, 64, 512])
def test_documents_stand_end_to_end_in_blocks(tmp_path, monkeypatch, length, chunk, piece):
    monkeypatch.setattr(packing, "_CHUNK", chunk)
    monkeypatch.setattr(packing, "_PIECE", piece)
    words, size = stream(), length - 2
    expected = [[CLS, *words[at : at + size], SEP] for at in range(0, len(words), size)]
    assert blocks([text_file(tmp_path)], length) == expected


def test_without_special_tokens_blocks_are_all_text(tmp_path):
    tokenizer = build_tokenizer(WORDS)
    tokenizer.backend_tokenizer.post_processor = None
    words = stream()
    expected = [words[at : at + 8] for at in range(0, len(words), 8)]
    assert blocks([text_file(tmp_path)], tokenizer=tokenizer) == expected


def test_every_format_gives_the_same_blocks(tmp_path):
    text = text_file(tmp_path)
    lines = tmp_path / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in [*DOCUMENTS, " "]), "utf8")
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), tmp_path / "text.parquet")
    two = tmp_path / "two"
    two.mkdir()
    text_file(two, DOCUMENTS[:2], "a.txt")
    text_file(two, DOCUMENTS[2:], "b.txt")
    expected = blocks([text])
    assert blocks([lines]) == blocks([tmp_path / "text.parquet"]) == expected
    assert blocks(find_files(str(two))) == blocks(find_files(str(two / "*.txt"))) == expected


def test_a_second_run_starts_at_once_and_other_texts_do_not(tmp_path, monkeypatch):
    path = text_file(tmp_path)
    expected = blocks([path])

    def fail(*args):
        raise AssertionError("packed again")

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_write", fail)
        TOKENIZER("the fox", truncation=True, padding="max_length", max_length=16)  # leaves its mark in the tokenizer
        assert blocks([path]) == expected
        with pytest.raises(AssertionError, match="packed again"):
            blocks([path], length=9)
        with pytest.raises(AssertionError, match="packed again"):
            blocks([path], tokenizer=build_tokenizer(WORDS[:-1]))
    text_file(tmp_path, DOCUMENTS[1:])
    assert blocks([path]) != expected


def test_what_is_held_out_is_the_end(tmp_path):
    def part(held):
        return encode(RunningText("train", (text_file(tmp_path),), "text", held), TOKENIZER, (), 8, Kind())

    whole, most, last = part(None), part(False), part(True)
    assert (len(most), len(last)) == (len(whole) - 1, 1)
    assert [*most.columns["input_ids"], *last.columns["input_ids"]] == [*whole.columns["input_ids"]]
    ids = np.array([0])
    assert torch.equal(last.batch(ids, 8)["input_ids"], whole.batch(ids + len(most), 8)["input_ids"])


def test_batches_from_the_host_are_those_from_the_device(tmp_path, monkeypatch):
    data = encode(RunningText("train", (text_file(tmp_path),), "text"), TOKENIZER, (), 8, Kind())
    there = data.on("cpu")
    monkeypatch.setattr(resident, "fits", lambda size, device: False)
    streamed = data.on("cpu")
    assert isinstance(streamed, resident.Streamed)
    for ids in (np.array([3, 0, -1]), np.array([1, 2, 0]), np.array([-1])):
        streamed.fetch(ids, 8)
        found, expected = (tokens.batch(torch.from_numpy(ids), 8) for tokens in (streamed, there))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_batches_are_copied_to_a_device_from_pinned_memory(tmp_path, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda values: pinned.append(values.data_ptr()) or values)
    monkeypatch.setattr(resident, "fits", lambda size, device: False)
    streamed = encode(RunningText("train", (text_file(tmp_path),), "text"), TOKENIZER, (), 8, Kind()).on("meta")
    ids = np.array([0, 1])
    streamed.fetch(ids, 8)
    assert len(set(pinned)) == len(streamed.batch(torch.from_numpy(ids), 8))


def test_a_captured_step_reads_where_the_last_batch_was_put(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "fits", lambda size, device: False)
    streamed = encode(RunningText("train", (text_file(tmp_path),), "text"), TOKENIZER, (), 8, Kind()).on("cpu")
    places = []
    for ids in (np.array([0, 1]), np.array([2, 3])):
        streamed.fetch(ids, 8)
        places.append({name: v.data_ptr() for name, v in streamed.batch(torch.from_numpy(ids), 8).items()})
    assert places[0] == places[1]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"\n \n", "every line is blank"),
        ("a.txt", b"fine\n\xff\n", "line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', 'line 2 is no object with the key "text"'),
        ("a.jsonl", b'{"text": 3}\n', "holds a int"),
    ],
)
def test_faults_of_texts(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LimbeckError, match=fault):
        blocks([tmp_path / name])
    assert not list(Path(tmp_path / "cache").rglob("*.tokens"))


def test_no_files_are_a_fault(tmp_path):
    with pytest.raises(LimbeckError, match="there is no text in"):
        find_files(str(tmp_path / "*.txt"))
    with pytest.raises(LimbeckError, match="too few to hold some out"):
        encode(RunningText("train", (text_file(tmp_path),), "text", False), TOKENIZER, (), 512, Kind())


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest(file, kind))
    path = text_file(tmp_path)
    before = blocks([path])
    assert blocks([path]) == before
    assert len(hashed) == 1
    text_file(tmp_path, DOCUMENTS[::-1])
    assert blocks([path]) != before
    assert len(hashed) == 2


def test_files_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants, utils

    asked, download = [], huggingface_hub.snapshot_download

    def recorded(name, allow_patterns, **options):
        there = ["en/train-0.txt", "en/train-1.txt", "en/test.txt", "de/train-0.txt"]
        asked.append(list(utils.filter_repo_objects(there, allow_patterns=allow_patterns)))
        return download(name, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", recorded)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what was downloaded before is found
    home = tmp_path / "hub" / "datasets--someone--wiki"
    snapshot = home / "snapshots" / "abc"
    for folder in (home / "refs", snapshot / "en", snapshot / "de"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    one, two, other = (
        text_file(snapshot, name=name) for name in ("en/train-0.txt", "en/train-1.txt", "de/train-0.txt")
    )
    assert find_files("hf://datasets/someone/wiki/en/train-*.txt") == (one, two)
    assert find_files("hf://datasets/someone/wiki/de/") == (other,)
    assert find_files("hf://datasets/someone/wiki/de/train-0.txt") == (other,)
    assert asked == [["en/train-0.txt", "en/train-1.txt"], ["de/train-0.txt"], ["de/train-0.txt"]]  # and no more
    with pytest.raises(LimbeckError, match="there is no text in"):
        find_files("hf://datasets/someone/wiki/fr")
    with pytest.raises(LimbeckError, match=r"gave no files hf://datasets/someone/else/en: .*Check the spelling"):
        find_files("hf://datasets/someone/else/en")
    with pytest.raises(LimbeckError, match="Say hf://datasets/OWNER/NAME/PATH"):
        find_files("hf://someone/wiki")
