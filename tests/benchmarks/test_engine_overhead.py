"""Both loops do the same work: they end with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import engine_overhead
from benchmarks.contests import OURS, Contest, Settings


def test_the_batches_of_the_bare_loop_are_those_of_the_engine(tmp_path: Path) -> None:
    """In the same order, padded to the same lengths."""
    size = engine_overhead.SIZES["short"] | {"n_embd": 16, "n_layer": 1}
    engine, _, rows = engine_overhead.prepare(Settings(tmp_path, small=True), size, turns=1)
    planned = engine_overhead.Batches(rows, engine_overhead.planned(engine.loader, 0))
    seen = []
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            seen.append(batch)
            engine.backward(engine_overhead.loss_sum(engine.model, batch))
        engine.step(window)
    engine.finish_training()
    engine.run.close()
    assert len(seen) == len(planned) == 4
    for ours, theirs in zip(seen, planned, strict=True):
        assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert ours["labels"].tolist() == theirs["labels"].tolist()


def test_both_loops_make_the_same_model(tmp_path: Path) -> None:
    """Without dropout, whose masks differ: other batches or another rate would show in the weights."""
    size = engine_overhead.SIZES["short"] | {"n_embd": 16, "n_layer": 1, "dropout": 0.0}
    settings = Settings(tmp_path, small=True)
    engine, bare, rows = engine_overhead.prepare(settings, size, turns=2)
    first = [parameter.detach().clone() for parameter in bare.model.parameters()]
    ours = engine_overhead.through_the_engine(engine)
    for turn in range(2):
        batches = engine_overhead.Batches(rows, engine_overhead.planned(engine.loader, turn))
        assert min(next(ours), bare.epoch(batches)) > 0
    assert next(ours, None) is None
    engine.finish_training()
    engine.run.close()
    for one, other, begun in zip(engine.model.parameters(), bare.model.parameters(), first, strict=True):
        moved = (other - begun).abs().mean()
        assert (one - other).abs().mean() < 0.02 * moved  # bf16 rounds


@pytest.mark.slow
@pytest.mark.parametrize("contest", engine_overhead.CONTESTS, ids=lambda contest: contest.name)
def test_a_contest_has_a_figure_for_each_turn(contest: Contest, tmp_path: Path) -> None:
    measured = contest.measure(Settings(tmp_path, rounds=2, small=True))
    assert set(measured.values) == {OURS, contest.rows[0].side}
    assert [len(values) for values in measured.values.values()] == [2, 2]
    assert min(measured.values[OURS] + measured.values["bare"]) > 1e-4
    assert len(measured.flops_per_second) == 2
    assert min(measured.flops_per_second) > 1e6
    assert measured.facts["precision"] == "bf16"
