import json

import pyarrow
import pyarrow.parquet
import pytest

from limbeck.data.files import read
from limbeck.errors import LimbeckError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_tsv_keeps_stray_quotes(write):
    path = write("a.tsv", 'text\tlabel\n"Oh , he said .\t1\nan " odd " one\t0\n')
    assert read(path) == {"text": ['"Oh , he said .', 'an " odd " one'], "label": ["1", "0"]}


def test_tsv_ends_lines_at_newlines_only(write):
    path = write("a.tsv", "text\tlabel\r\none\x85two\u2028three\t1\r\n\r\n")
    assert read(path) == {"text": ["one\x85two\u2028three"], "label": ["1"]}


def test_csv_reads_quoted_commas_quotes_and_line_breaks(write):
    path = write("a.csv", 'text,label\n"a, ""b""\nc",1\n')
    assert read(path) == {"text": ['a, "b"\nc'], "label": ["1"]}


def test_csv_takes_documents_longer_than_the_csv_module_does_by_default(write):
    path = write("a.csv", "text,label\n" + "x" * 200_000 + ",1\n")
    assert len(read(path)["text"][0]) == 200_000


def test_a_byte_order_mark_is_no_part_of_the_first_name(write):
    assert list(read(write("a.tsv", "\ufeffQuality\t#1 String\n1\ta\n"))) == ["Quality", "#1 String"]


def test_jsonl_fills_absent_keys_with_none(write):
    path = write("a.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b"}\n')
    assert read(path) == {"text": ["a", "b"], "label": [1, None]}


def test_parquet(tmp_path):
    columns = {"text": ["a", "b"], "label": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == columns


def test_a_header_can_be_given(write):
    path = write("a.tsv", "gj04\t1\n")
    assert read(path, header=("source", "label")) == {"source": ["gj04"], "label": ["1"]}


def test_ragged_lines_can_be_blanked(write):
    path = write("a.tsv", "a\tb\n1\t2\n3\n4\t5\t6\n")
    assert read(path, blank_ragged=True) == {"a": ["1", None, None], "b": ["2", None, None]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "a.tsv is empty"),
        ("a.csv", "\n \n", "a.csv is empty"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.csv", "text,text\na,b\n", 'more than one column "text"'),
        ("a.tsv", "a\tb\n1\t2\n3\n", "line 3 has 1 fields where 2 are expected"),
        ("a.csv", 'a,b\n"x\ny",2\n3\n', "line 4 has 1 fields where 2 are expected"),
        ("a.csv", 'a,b\n1,2\n"x,2\n', "line 3: unexpected end of data"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2 holds a list, not an object"),
        ("a.csv", b"a,b\nx,caf\xe9\n", "not UTF-8: byte 9 \\(line 2\\) is 0xe9.*iconv"),
        ("a.csv", b"\xef\xbb\xbfa,b\nx,caf\xe9\n", "not UTF-8: byte 12 \\(line 2\\)"),
        ("a.xls", "x", 'ends in ".xls".*reads .tsv, .jsonl, .csv, .parquet'),
        ("a.json", json.dumps([{"a": 1}]), "not laid out as SQuAD's files.*.jsonl file"),
        ("a.json", '{"data": [{"paragraphs": [{"context": "c"}]}]}', "KeyError\\('qas'\\) after 0 questions"),
        ("a.json", '{"a": 1}\n{"a": 2}', "not JSON: Extra data in line 2.*.jsonl file"),
        ("a.parquet", "not parquet", "cannot be read as Parquet"),
    ],
)
def test_faults_are_told(write, name, content, message):
    path = write(name, content)
    with pytest.raises(LimbeckError, match=message) as raised:
        read(path)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_answered_with_its_neighbour(write, tmp_path):
    write("train.csv", "a\n1\n")
    with pytest.raises(LimbeckError, match=r'no file .*trian\.csv\. Did you mean "train\.csv"'):
        read(tmp_path / "trian.csv")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(LimbeckError, match="is a folder"):
        read(tmp_path)
