"""How a CSV, TSV, JSONL or Parquet file becomes columns, or a JSON file of SQuAD's."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from limbeck.data import squad
from limbeck.errors import LimbeckError, did_you_mean

SUFFIXES = (".tsv", ".jsonl", ".csv", ".parquet", ".json")
# The csv module refuses fields above 128 KiB by default; whole documents are longer.
_LONGEST_FIELD = 2**31 - 1


def read(path: str | Path, *, header: Sequence[str] | None = None, blank_ragged: bool = False) -> dict[str, list]:
    """The file's columns by name, all of one length.

    TSV is read with quoting off (GLUE's files hold stray quotes), CSV with standard quoting. `header` names the columns
    of a file without a header line. With `blank_ragged` a line with the wrong number of fields becomes a row of None
    instead of an error.
    """
    path = Path(path)
    _check_exists(path)
    suffix = path.suffix.lower()
    if suffix == ".tsv":
        columns = _from_lines(path, _tsv_lines(path), header, blank_ragged)
    elif suffix == ".csv":
        columns = _from_lines(path, _csv_lines(path), header, blank_ragged)
    elif suffix == ".jsonl":
        columns = _from_jsonl(path)
    elif suffix == ".json":
        columns = _from_json(path)
    elif suffix == ".parquet":
        columns = _from_parquet(path)
    else:
        raise LimbeckError(
            f'{path} ends in "{path.suffix}", which limbeck does not read; it reads {", ".join(SUFFIXES)}. '
            "Convert the file, or rename it if it already is one of these."
        )
    if not any(columns.values()):
        raise LimbeckError(f"{path} has column names but no rows. Give a file with at least one example.")
    return columns


def _check_exists(path: Path) -> None:
    if path.is_dir():
        raise LimbeckError(f"{path} is a folder where a file is wanted. Name one file in it, such as {path}/train.tsv.")
    if not path.exists():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise LimbeckError(
            f"there is no file {path}.{did_you_mean(path.name, beside)} Check the path and type it again."
        )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LimbeckError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error


def _text(path: Path) -> str:
    raw = _bytes(path)
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")  # the byte order mark Windows writes
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise LimbeckError(
            f"{path} is not UTF-8: byte {error.start} (line {line}) is 0x{raw[error.start]:02x}. Convert the file "
            f"first, for instance with: iconv -f ISO-8859-1 -t UTF-8 {path} > converted{path.suffix}"
        ) from error
    if not text.strip():
        raise LimbeckError(f"{path} is empty. Give a file with column names and at least one example.")
    return text


Lines = list[tuple[int, list[str]]]  # line number, fields


def _tsv_lines(path: Path) -> Lines:
    # Split at "\n" alone: sentences may hold the other characters that str.splitlines takes for line ends.
    lines = enumerate(_text(path).split("\n"), start=1)
    return [(number, line.removesuffix("\r").split("\t")) for number, line in lines if line.strip()]


def _csv_lines(path: Path) -> Lines:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    lines: Lines = []
    begins = 1  # a quoted field may run over several lines: a row is named by its first
    try:
        for fields in reader:
            if fields:
                lines.append((begins, fields))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise LimbeckError(
            f"{path}, line {begins}: {error}. In a CSV file a field that holds a comma, a quote or a line break stands "
            'in double quotes, with the quotes inside it doubled (""). Mend the line, or save the file as TSV or JSONL.'
        ) from error
    return lines


def _from_lines(path: Path, lines: Lines, header: Sequence[str] | None, blank_ragged: bool) -> dict[str, list]:
    names = list(header) if header else [name.strip() for name in lines[0][1]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LimbeckError(f'{path} has more than one column "{twice[0]}" in line 1. Give every column its own name.')
    rows = []
    for number, fields in lines if header else lines[1:]:
        if len(fields) == len(names):
            rows.append(fields)
        elif blank_ragged:
            rows.append([None] * len(names))
        else:
            raise LimbeckError(
                f"{path}, line {number} has {len(fields)} fields where {len(names)} are expected ({', '.join(names)}). "
                "Mend the line or take it out."
            )
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _from_jsonl(path: Path) -> dict[str, list]:
    rows: list[dict] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(_json_object(path, number, line))
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _from_json(path: Path) -> dict[str, list]:
    try:
        layout = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise LimbeckError(
            f"{path} is not JSON: {error.msg} in line {error.lineno}. Rows of a table, one object a line, go into a "
            ".jsonl file."
        ) from error
    return squad.columns(layout, str(path))


def _json_object(path: Path, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        _refuse_json(path, number, f"is not JSON ({error.msg} at character {error.colno})", error)
    if not isinstance(row, dict):
        _refuse_json(path, number, f"holds a {type(row).__name__}, not an object")
    return row


def _refuse_json(path: Path, number: int, fault: str, cause: Exception | None = None) -> NoReturn:
    raise LimbeckError(
        f"{path}, line {number} {fault}. A .jsonl file has one object a line, such as "
        '{"text": "a fine day", "label": "positive"}.'
    ) from cause


def _from_parquet(path: Path) -> dict[str, list]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        fault = str(error).splitlines()[0]
        raise LimbeckError(
            f"{path} cannot be read as Parquet: {fault} Write the file again, or give another."
        ) from error
