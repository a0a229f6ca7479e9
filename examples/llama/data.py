"""The training text: the source code of this Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from xvcomm.errors import ArgumentError


def corpus(limit: int = 8 << 20) -> np.ndarray:
    """Up to `limit` bytes of the standard library's sources as uint8: top-level modules only, in order of their names.

    Raises:
        ArgumentError: this Python was installed without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise ArgumentError(
            f"no Python sources in {folder}: run the trainer with a Python that has its library as files"
        )
    return np.frombuffer(bytes(text[:limit]), np.uint8)


class Batches:
    """Random windows of the text; the same for every layout, framework and process.

    Args:
        text: the corpus.
        sequences: windows per step, over all replicas and micro-batches.
        context: tokens per window; each window has one more, the last target.
        seed: seed of the windows, together with the step.
    """

    def __init__(self, text: np.ndarray, sequences: int, context: int, seed: int) -> None:
        if len(text) <= context + 1:
            raise ArgumentError(f"context {context} is longer than the text of {len(text)} bytes")
        self._text = text
        self._sequences = sequences
        self._context = context
        self._seed = seed

    def step(self, step: int) -> np.ndarray:
        """The windows of one step, int64 of shape (sequences, context + 1)."""
        random = np.random.default_rng([self._seed, step])
        starts = random.integers(0, len(self._text) - self._context - 1, self._sequences)
        return self._text[starts[:, None] + np.arange(self._context + 1)].astype(np.int64)
