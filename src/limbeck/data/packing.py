"""How running text becomes blocks of tokens, in a file that is mapped and never held whole.

Documents stand end to end, each followed by the tokenizer's end or separator token, and are cut into blocks of exactly
the longest length. The last block may be shorter: nothing is dropped. In a text file a blank line ends a document.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock

from limbeck.data.hub import SCHEME, fetch_files
from limbeck.errors import LimbeckError
from limbeck.folder import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".txt", ".jsonl", ".parquet")
FORMAT = "1"  # of the packed files: another one is another file
_PIECE = 2**14  # characters from which on a document is tokenised in pieces, cut at a line's end
_CHUNK = 2**20  # characters a tokenizer call: its Python lists take some forty times the memory of the tokens


class Piece(NamedTuple):
    """Some text, whether its document ends with it, and how much of its file is read by then, from 0 to 1."""

    text: str
    ends: bool
    read: float


class Frame(NamedTuple):
    """The tokens around every block, and those between two documents."""

    before: list[int]
    after: list[int]
    between: list[int]


def find_files(name: str) -> tuple[Path, ...]:
    """The files a user named: one, those in a folder and below it, or those of a pattern such as `wiki/*.txt`; with
    `hf://datasets/OWNER/NAME/` before it, of a dataset of the hub."""
    name = fetch_files(name) if name.startswith(SCHEME) else name
    place = Path(name)
    if place.is_file():
        found = [place]
    else:
        inside = place.rglob("*") if place.is_dir() else map(Path, glob(name, recursive=True))
        found = sorted(path for path in inside if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise LimbeckError(
            f"there is no text in {name}. Give a file, a folder or a pattern; read are {', '.join(SUFFIXES)}. Files of "
            "a dataset of the hub are named hf://datasets/OWNER/NAME/PATH."
        )
    return tuple(found)


def pack(
    files: Sequence[Path], column: str, tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all blocks of `length`, mapped, and where each begins and ends; `column` has the texts of tables.

    They are packed once for these texts, this tokenizer and this length, whoever asks: of several processes one does it
    and the others wait. LIMBECK_CACHE names the folder they are kept in, by default ~/.cache/limbeck.
    """
    frame = _frame(tokenizer)
    folder = Path(os.environ.get("LIMBECK_CACHE", "~/.cache/limbeck")).expanduser() / "packed"
    place = folder / f"{_key(files, column, tokenizer, frame, length)}.tokens"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not place.exists():
            write_file(place, lambda new: _write(new, files, column, tokenizer, frame, length))
    # Copy on write, since torch warns of arrays that cannot be written to; nobody does.
    tokens = np.memmap(place, dtype=np.int32, mode="c")
    return tokens, np.minimum(np.arange(0, len(tokens) + length, length, dtype=np.int64), len(tokens))


def _write(
    place: Path,
    files: Sequence[Path],
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    frame: Frame,
    length: int,
) -> None:
    size = length - len(frame.before) - len(frame.after)
    rest = np.empty(0, dtype=np.int32)
    with place.open("wb") as out:
        for pieces in _chunks(_shown(files, column)):
            rest = np.concatenate([rest, *_tokens(pieces, tokenizer, frame.between)])
            full = len(rest) // size * size
            _frame_blocks(rest[:full].reshape(-1, size), frame).tofile(out)
            rest = rest[full:]
        if len(rest):
            _frame_blocks(rest[None], frame).tofile(out)
        if not out.tell():
            raise LimbeckError(f"there is no text in {', '.join(map(str, files))}: every line is blank.")


def _tokens(pieces: list[Piece], tokenizer: PreTrainedTokenizerBase, between: list[int]) -> Iterator[np.ndarray]:
    found: Any = tokenizer(
        [piece.text for piece in pieces],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for piece, ids in zip(pieces, found["input_ids"], strict=True):
        yield np.array([*ids, *between] if piece.ends else ids, dtype=np.int32)


def _frame_blocks(blocks: np.ndarray, frame: Frame) -> np.ndarray:
    before, after = (np.tile(np.array(side, dtype=np.int32), (len(blocks), 1)) for side in frame[:2])
    return np.concatenate([before, blocks, after], axis=1)


def _frame(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """What the tokenizer puts around a text, and its token for the end of a document, if it has one."""
    word: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed: Any = tokenizer("a")["input_ids"]
    start = next(at for at in range(len(framed)) if framed[at : at + len(word)] == word)
    end: Any = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return Frame(framed[:start], framed[start + len(word) :], [] if end is None else [end])


def _key(files: Sequence[Path], column: str, tokenizer: PreTrainedTokenizerBase, frame: Frame, length: int) -> str:
    digest = hashlib.sha256(repr((FORMAT, column, frame, length, _rules(tokenizer))).encode())
    for path in files:
        found = path.stat()
        digest.update(_contents(path, found.st_size, found.st_mtime_ns))
    return digest.hexdigest()[:32]


@cache
def _contents(path: Path, size: int, changed: int) -> bytes:
    """A hash of a file, made once as long as it does not change: train and dev may be parts of one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """All that decides which tokens a text becomes."""
    if not tokenizer.is_fast:
        return type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)
    rules = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    return {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    chunk, size = [], 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _shown(files: Sequence[Path], column: str) -> Iterator[Piece]:
    """The pieces of all files, with a bar on a terminal that says how far reading is."""
    from rich.console import Console
    from rich.progress import Progress

    sizes = [path.stat().st_size for path in files]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("packing", total=sum(sizes))
        for at, path in enumerate(files):
            for piece in _pieces(path, column):
                bar.update(task, completed=sum(sizes[:at]) + piece.read * sizes[at])
                yield piece


def _pieces(path: Path, column: str) -> Iterator[Piece]:
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path, column)
        return
    with path.open("rb") as file:
        yield from _jsonl(path, file, column) if path.suffix.lower() == ".jsonl" else _text(path, file)


def _text(path: Path, file: BinaryIO) -> Iterator[Piece]:
    lines, size, begun = [], 0, False
    for line, read in _lines(path, file):
        blank = not line.strip()
        if not blank:
            lines.append(line)
            size += len(line)
        if size >= _PIECE or (blank and (lines or begun)):
            yield Piece("".join(lines), blank, read)
            lines, size, begun = [], 0, not blank
    if lines or begun:
        yield Piece("".join(lines), True, 1.0)


def _jsonl(path: Path, file: BinaryIO, column: str) -> Iterator[Piece]:
    for number, (line, read) in enumerate(_lines(path, file), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[column]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise LimbeckError(
                f'{path}, line {number} is no object with the key "{column}". Name another with --text, or mend the '
                f'line: {{"{column}": "A document."}}'
            ) from error
        if _checked(text, path, column).strip():
            yield Piece(text, True, read)


def _parquet(path: Path, column: str) -> Iterator[Piece]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    if column not in file.schema_arrow.names:
        raise LimbeckError(
            f'{path} has no column "{column}"; its columns are {", ".join(file.schema_arrow.names)}. Name one with '
            "--text COLUMN."
        )
    read = 0
    for batch in file.iter_batches(batch_size=256, columns=[column]):
        read += batch.num_rows
        for text in batch.column(0).to_pylist():
            if _checked(text, path, column).strip():
                yield Piece(text, True, read / file.metadata.num_rows)


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, float]]:
    """Lines with their ends, and how much of the file is read."""
    total, read = path.stat().st_size, 0
    for number, raw in enumerate(file, start=1):
        read += len(raw)
        try:
            yield raw.decode("utf-8").removeprefix("\ufeff"), read / total
        except UnicodeDecodeError as error:
            raise LimbeckError(
                f"{path}, line {number} is not UTF-8. Convert the file first, for instance with: iconv -f ISO-8859-1 "
                f"-t UTF-8 {path} > converted{path.suffix}"
            ) from error


def _checked(text: object, path: Path, column: str) -> str:
    if not isinstance(text, str):
        raise LimbeckError(
            f'{path}: "{column}" holds a {type(text).__name__} ({str(text)[:40]}). Name a column of texts with --text.'
        )
    return text
