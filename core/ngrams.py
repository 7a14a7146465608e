"""What counting alone predicts: an interpolated n-gram model, the yardstick for a language model on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

EM_STEPS = 30
BUCKETS = 40


class CountModel:
    """n-gram probabilities by Jelinek-Mercer interpolation, each order with the next lower one, the last with 1 / V.

    p_n(token | context) = w f_n(token | context) + (1 - w) p_(n-1)(token | shorter context), where f is the relative
    frequency in all tokens. The weights w are deleted interpolation's: EM maximises the likelihood of the last tokens
    under the counts of those before. A context without counts leaves all to the shorter one. Contexts share a weight
    if they are alike in their counts per distinct successor, which is a stronger model than one weight for all.

    Sources: Jelinek and Mercer, "Interpolated estimation of Markov source parameters from sparse data", 1980; the
    buckets: Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1998, section 4.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = 3, held_out: float = 0.1) -> None:
        """Count ``tokens`` and fit the weights.

        Args:
            tokens: ids of 0 to ``vocab_size`` - 1, one dimension: documents one after the other.
            vocab_size: V, at most 2 ** (62 / order): 2 ** 20 for trigrams.
            order: 3 looks at the two tokens before, 1 at none.
            held_out: the share of ``tokens``, at their end, that the weights are fitted on.

        Raises:
            ValueError: too few tokens, an id outside the vocabulary, or a vocabulary too large for the order.
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        cut = len(tokens) - max(order, round(len(tokens) * held_out))
        if cut < order:
            raise ValueError(f"{len(tokens)} tokens are too few for an order of {order}")
        if tokens.min() < 0 or tokens.max() >= vocab_size or vocab_size**order >= 2**62:
            raise ValueError(f"ids must be 0 to {vocab_size - 1}, and {vocab_size} ** {order} below 2 ** 62")
        self.vocab_size, self.order = vocab_size, order
        self._weights: list[np.ndarray] = []
        self._count(tokens[:cut])
        self._fit(*_windows(tokens[cut - order + 1 :], order))
        self._count(tokens)

    def _count(self, tokens: np.ndarray) -> None:
        """Count n-grams and their contexts, of all orders: sorted keys (an n-gram's number in base V) and counts."""
        self._grams, self._contexts = [], []
        for order in range(1, self.order + 1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens, order)
            grams, counts = np.unique(self._keys(windows), return_counts=True)
            starts = np.flatnonzero(np.diff(grams // self.vocab_size, prepend=-1))  # n-grams of a context are together
            kinds = np.diff(starts, append=len(grams))
            self._grams.append((grams, counts))
            self._contexts.append((grams[starts] // self.vocab_size, np.add.reduceat(counts, starts), kinds))

    def _keys(self, windows: np.ndarray) -> np.ndarray:
        keys = np.zeros(len(windows), dtype=np.int64)
        for column in windows.T:
            keys = keys * self.vocab_size + column  # negative where an id is: no such n-gram was counted
        return keys

    def _fit(self, contexts: np.ndarray, targets: np.ndarray) -> None:
        """Fit the weights of each order in turn, from the shortest. An empty bucket has the weight of the one below."""
        for _ in range(self.order):
            lower = self._probabilities(contexts, targets)
            frequency, bucket = self._frequencies(contexts, targets, len(self._weights))
            tokens, weights = np.bincount(bucket, minlength=BUCKETS), np.full(BUCKETS, 0.5)
            for _ in range(EM_STEPS):
                own = weights[bucket] * frequency
                share = own / (own + (1 - weights[bucket]) * lower)
                found = np.bincount(bucket, share, BUCKETS)
                weights = np.where(tokens > 0, found / np.maximum(tokens, 1), weights)
            filled = np.maximum.accumulate(np.where(tokens > 0, np.arange(BUCKETS), 0))
            self._weights.append(np.minimum(weights[filled], 0.999))  # what was never seen there keeps a chance

    def _frequencies(self, contexts: np.ndarray, targets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Relative frequency of targets after the last ``length`` ids of contexts; each context's bucket, 0 if new."""
        contexts = contexts[:, contexts.shape[1] - length :]
        keys, counts, kinds = self._contexts[length]
        place, known = _find(keys, self._keys(contexts))
        total = np.where(known, counts[place], 0)
        at, seen = _find(self._grams[length][0], self._keys(np.column_stack((contexts, targets))))
        frequency = np.where(seen, self._grams[length][1][at], 0) / np.maximum(total, 1)
        steps = 1 + np.rint(4 * np.log2(np.maximum(total, 1) / kinds[place])).astype(np.int64)
        return frequency, np.where(known, np.minimum(steps, BUCKETS - 1), 0)

    def _probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        probability = np.full(len(targets), 1 / self.vocab_size)
        for length, weights in enumerate(self._weights):
            frequency, bucket = self._frequencies(contexts, targets, length)
            weight = np.where(bucket > 0, weights[bucket], 0.0)
            probability = weight * frequency + (1 - weight) * probability
        return probability

    def log_probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Natural logarithms of the probabilities of targets.

        Args:
            contexts: (targets, order - 1) ids of the tokens before each, the nearest last; -1 where there is none.
            targets: (targets,) ids.
        """
        return np.log(self._probabilities(np.asarray(contexts, dtype=np.int64), np.asarray(targets, dtype=np.int64)))

    def loss(self, blocks: Iterable[np.ndarray]) -> float:
        """Mean negative log-likelihood, in nats, of the tokens of blocks after each block's first one.

        These are a causal language model's targets; like its, their contexts do not reach beyond their block.
        ``exp`` of it is the perplexity. NaN when there is no target.
        """
        rows = [np.asarray(block, dtype=np.int64) for block in blocks]
        lengths = [len(row) for row in rows]
        ids, count = np.concatenate([*rows, np.empty(0, dtype=np.int64)]), sum(lengths)
        place = np.arange(count) - np.repeat(np.cumsum([0, *lengths])[:-1], lengths)  # in its block
        before = [np.where(place >= back, np.roll(ids, back), -1) for back in range(self.order - 1, 0, -1)]
        contexts = np.stack(before, axis=1) if before else np.empty((count, 0), dtype=np.int64)
        losses = -self.log_probabilities(contexts[place > 0], ids[place > 0])
        return float(losses.mean()) if len(losses) else float("nan")


def trigram_perplexity(tokens: Iterable[Any], blocks: Iterable[Any]) -> float:
    """Perplexity of the trigrams of ``tokens`` on the tokens of ``blocks`` after each block's first one.

    Args:
        tokens: the ids of the training documents or blocks, one row each, in their order.
        blocks: the ids of each block that a causal language model is evaluated on.
    """
    train, held_out = _flat(tokens), [np.asarray(block, dtype=np.int64) for block in blocks]
    return math.exp(CountModel(train, _size(train, *held_out)).loss(held_out))


def unigram_perplexity(tokens: Iterable[Any], targets: Iterable[Any]) -> float:
    """Perplexity of the frequencies of ``tokens``, rows of ids, on ``targets``, rows of what masked tokens were."""
    train, wanted = _flat(tokens), _flat(targets)
    model = CountModel(train, _size(train, wanted), order=1)
    return math.exp(-model.log_probabilities(np.empty((len(wanted), 0)), wanted).mean())


def _flat(rows: Iterable[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])


def _size(*rows: np.ndarray) -> int:
    return 1 + max(int(row.max()) for row in rows if len(row))


def _windows(tokens: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the contexts, (targets, order - 1), and the targets, in ``tokens``."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, order)
    return windows[:, :-1], windows[:, -1]


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the sorted ``keys``, and whether what is wanted is there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted
