"""The count model against a slow one, as a distribution, and in what its weights are fitted to."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest

from core.ngrams import CountModel, trigram_perplexity, unigram_perplexity

VOCABULARY = 7


def chain(length: int, seed: int = 0) -> np.ndarray:
    """Tokens that depend on the two before them; the last id of the vocabulary never comes."""
    draw, tokens = np.random.default_rng(seed), [0, 1]
    for _ in range(length - 2):
        likely = (2 * tokens[-1] + tokens[-2]) % (VOCABULARY - 1)
        tokens.append(likely if draw.random() < 0.6 else int(draw.integers(VOCABULARY - 1)))
    return np.array(tokens)


def frequency(tokens, context: tuple, target: int) -> float | None:
    """Relative frequency of a target after a context, counted one by one; None after an unknown context."""
    n = len(context) + 1
    grams = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    total = sum(count for gram, count in grams.items() if gram[:-1] == context)
    return grams[(*context, target)] / total if total else None


def bucket(tokens, context: tuple) -> int:
    n = len(context) + 1
    after = [tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tuple(tokens[i : i + n - 1]) == context]
    return 1 + round(4 * math.log2(len(after) / len(set(after))))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_same_as_a_slow_one(order) -> None:
    tokens = chain(300).tolist()
    model = CountModel(np.array(tokens), VOCABULARY, order)
    for *context, target in product(range(-1, VOCABULARY), repeat=order):
        if target < 0:
            continue
        expected = 1 / VOCABULARY
        for length in range(order):
            nearest = tuple(context[len(context) - length :])
            found = frequency(tokens, nearest, target)
            if found is not None:
                weight = model._weights[length][bucket(tokens, nearest)]
                expected = weight * found + (1 - weight) * expected
        got = model.log_probabilities(np.array([context]).reshape(1, -1), np.array([target]))
        assert got[0] == pytest.approx(math.log(expected)), (context, target)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one_and_none_is_zero(order) -> None:
    model = CountModel(chain(400), VOCABULARY, order)
    for context in product(range(-1, VOCABULARY), repeat=order - 1):  # -1 and the last id were never seen
        contexts = np.tile(np.array(context, dtype=int), (VOCABULARY, 1))
        probabilities = np.exp(model.log_probabilities(contexts, np.arange(VOCABULARY)))
        assert probabilities.sum() == pytest.approx(1)
        assert (probabilities > 0).all()


def test_weights_are_those_of_the_highest_held_out_likelihood(monkeypatch) -> None:
    tokens, losses = chain(3000), []
    for steps in (0, 1, 2, 5, 30):
        monkeypatch.setattr("core.ngrams.EM_STEPS", steps)
        model = CountModel(tokens, VOCABULARY)
        model._count(tokens[:2700])  # the counts that the weights were fitted under
        windows = np.lib.stride_tricks.sliding_window_view(tokens[2698:], 3)
        losses.append(-model.log_probabilities(windows[:, :-1], windows[:, -1]).mean())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


def test_a_longer_context_helps_where_tokens_depend_on_it() -> None:
    tokens, held_out = chain(20_000), [chain(4_000, seed=1)]
    losses = [CountModel(tokens, VOCABULARY, order).loss(held_out) for order in (1, 2, 3)]
    # The likely token has 0.6 + 0.4 / 6, each of the five others 0.4 / 6.
    entropy = -(0.6 + 0.4 / 6) * math.log(0.6 + 0.4 / 6) - 5 * 0.4 / 6 * math.log(0.4 / 6)
    assert losses[2] == pytest.approx(entropy, abs=0.05)
    assert losses[2] < losses[1] - 0.1
    assert losses[0] == pytest.approx(math.log(6), abs=0.05)


def test_loss_is_the_mean_over_what_follows_each_blocks_first_token() -> None:
    model, blocks = CountModel(chain(500), VOCABULARY), [chain(9), chain(4, 1), np.array([3])]
    by_hand = [
        model.log_probabilities(np.array([[block[i - 2] if i > 1 else -1, block[i - 1]]]), block[i : i + 1])[0]
        for block in blocks
        for i in range(1, len(block))
    ]
    assert model.loss(blocks) == pytest.approx(-np.mean(by_hand))
    assert math.isnan(model.loss([np.array([3])]))


def test_perplexities_of_rows_of_ids() -> None:
    train, blocks, targets = chain(600), chain(60, 1).reshape(6, 10).tolist(), [[0, 5], [], [1]]
    assert trigram_perplexity(train.reshape(60, 10).tolist(), iter(blocks)) == pytest.approx(
        math.exp(CountModel(train, VOCABULARY - 1).loss(blocks))
    )
    counts = np.bincount(train) / len(train)
    by_hand = math.exp(-np.log(counts[[0, 5, 1]]).mean())
    assert unigram_perplexity(iter([train]), targets) == pytest.approx(by_hand, rel=0.03)
    new = CountModel(train, 100).loss([[0, 99]])
    assert trigram_perplexity([train], [[0, 99]]) == pytest.approx(math.exp(new))
    new = CountModel(train, 100, 1).log_probabilities(np.empty((1, 0)), np.array([99]))[0]
    assert unigram_perplexity([train], [[99]]) == pytest.approx(math.exp(-new))


def test_keys_of_a_large_vocabulary_do_not_collide() -> None:
    tokens = np.array([2**20 - 1, 2**20 - 2, 2**20 - 1, 0] * 50)
    model = CountModel(tokens, 2**20)
    contexts = np.array([[2**20 - 1, 2**20 - 2], [2**20 - 2, 2**20 - 1]])
    assert np.exp(model.log_probabilities(contexts, np.array([2**20 - 1, 0]))) == pytest.approx(1, abs=0.01)


def test_what_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="too few"):
        CountModel(np.array([1, 2, 3]), VOCABULARY)
    with pytest.raises(ValueError, match="ids must be 0 to 6"):
        CountModel(np.array([1, 2, 7] * 9), VOCABULARY)
    with pytest.raises(ValueError, match="below 2"):
        CountModel(np.array([1, 2, 3] * 9), 2**21)
