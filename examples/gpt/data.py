"""A corpus that needs no download: the source of the running Python's own standard library.

A token is an ASCII character or one of the most frequent pieces of the text (a word with the space
before it, a line break with its indentation), so that a few minutes of training show more than
spelling.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHARACTERS = 128  # ASCII; any other character becomes "?"
HELD_OUT = 20  # every twentieth file is kept for validation
PIECE = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z0-9\s]+|\n *| +|.", re.DOTALL)

Tokens = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(frozen=True)
class Vocabulary:
    """The first 128 tokens are ASCII's characters, the others are frequent pieces of two characters
    or more.
    """

    pieces: tuple[str, ...]

    @classmethod
    def of(cls, text: str, *, size: int) -> Vocabulary:
        """The `size - 128` pieces that save most tokens in `text`."""
        if size < CHARACTERS:
            raise SystemExit(
                f"a vocabulary of {size} cannot hold the {CHARACTERS} characters of ASCII; give "
                f"--vocab {CHARACTERS} or more"
            )
        counts = Counter(PIECE.findall(text))
        saved = {
            piece: (len(piece) - 1) * count for piece, count in counts.items() if len(piece) > 1
        }
        return cls(
            tuple(sorted(saved, key=lambda piece: (-saved[piece], piece))[: size - CHARACTERS])
        )

    def encode(self, text: str) -> Tokens:
        """Text -> tokens; a piece that is not in the vocabulary is spelled out in characters."""
        number = {piece: CHARACTERS + i for i, piece in enumerate(self.pieces)}
        spelled = (
            (number[p],) if p in number else p.encode() for p in PIECE.findall(ascii_only(text))
        )
        return np.fromiter(itertools.chain.from_iterable(spelled), np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens -> text."""
        return "".join(
            chr(t) if t < CHARACTERS else self.pieces[t - CHARACTERS] for t in map(int, tokens)
        )


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training files and of the held-out files, and what they mean."""

    vocabulary: Vocabulary
    train: Tokens
    valid: Tokens
    summary: str
    digest: str  # of the tokens: another version of Python has another corpus

    def batch(
        self, step: int, *, size: int, context: int, seed: int, held_out: bool = False
    ) -> dict[str, np.ndarray]:
        """The batch of one step: {"tokens", "targets"}, int32 [size, context].

        It depends on the seed and the step only, so that a resumed run sees what an uninterrupted
        one would have seen.
        """
        text = self.valid if held_out else self.train
        starts = np.random.default_rng((seed, int(held_out), step)).integers(
            0, len(text) - context, size
        )
        windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def standard_library(*, vocab: int) -> Corpus:
    """Read the top-level modules of the standard library (some million characters)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        ascii_only(path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(folder.glob("*.py"))
    ]
    if len(texts) < 2 * HELD_OUT:
        raise SystemExit(
            f"{folder} holds {len(texts)} .py files; use a Python that ships with its library's "
            "source"
        )
    train_text = "".join(text for i, text in enumerate(texts) if i % HELD_OUT)
    vocabulary = Vocabulary.of(train_text, size=vocab)
    train, valid = vocabulary.encode(train_text), vocabulary.encode("".join(texts[::HELD_OUT]))
    sizes = (
        f"{sum(map(len, texts)) / 1e6:.1f} million characters, {len(train) / 1e6:.1f} "
        "million tokens"
    )
    summary = f"{len(texts)} modules of Python's standard library, {sizes}"
    digest = hashlib.sha256(train.tobytes() + valid.tobytes()).hexdigest()[:16]
    return Corpus(vocabulary, train, valid, summary, digest)


def ascii_only(text: str) -> str:
    return text.encode("ascii", "replace").decode()
