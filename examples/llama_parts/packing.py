"""Batches of packed documents, from a file of tokens."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Corpus:
    """Documents one after the other, each ended by the token `end`."""

    tokens: Array  # of any integer type; a memory map is read only where it is used
    end: int

    @classmethod
    def read(cls, path: Path, *, end: int, vocab: int) -> Corpus:
        """An .npy file of tokens."""
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise SystemExit(
                f"{path} holds {tokens.dtype}{list(tokens.shape)}; it must be a row of whole "
                "numbers, one a token"
            )
        if tokens[: 1 << 20].max() >= vocab:
            raise SystemExit(
                f"{path} has tokens up to {tokens[: 1 << 20].max()}, but the model's vocabulary "
                f"is {vocab}"
            )
        return cls(tokens, end)

    @classmethod
    def standard_library(cls) -> Corpus:
        """The bytes of the modules of Python's standard library, each ended by a 0: a corpus that
        needs no download.
        """
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return cls(
            np.frombuffer(b"".join(path.read_bytes() + b"\0" for path in modules), np.uint8), 0
        )

    def batch(
        self, step: int, *, rows: int, mine: Array, length: int, seed: int
    ) -> dict[str, Array]:
        """Those rows of a step's batch that `mine` numbers, `packed`; only these are read.

        What a row holds depends on the seed, the step and its number only, so that a resumed run
        sees what an uninterrupted one would have seen, whatever processes feed it.
        """
        if len(self.tokens) <= length:
            raise SystemExit(
                f"the corpus has {len(self.tokens)} tokens, too few for a row of {length} and "
                "the token after it"
            )
        starts = np.random.default_rng((seed, step)).integers(0, len(self.tokens) - length, rows)[
            mine
        ]
        return packed(
            np.stack([self.tokens[start : start + length + 1] for start in starts.tolist()]),
            end=self.end,
        )


def packed(windows: Array, *, end: int) -> dict[str, Array]:
    """Rows of documents, [N, T + 1] tokens -> {"tokens", "targets", "weights", "segments",
    "positions"}, [N, T].

    A document ends with the token `end`.  Segments number the documents of a row, positions restart
    with each, and the target of an `end`, which would be the first token of a document that has
    nothing to do with it, has no weight.
    """
    tokens, targets = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    ends = tokens == end
    segments = np.cumsum(ends, axis=1) - ends  # an `end` belongs to what it ends
    places = np.arange(tokens.shape[1])
    starts = np.maximum.accumulate(
        np.where(np.pad(ends, ((0, 0), (1, 0)))[:, :-1], places, 0), axis=1
    )
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": (~ends).astype(np.float32),
        "segments": segments.astype(np.int32),
        "positions": (places - starts).astype(np.int32),
    }
