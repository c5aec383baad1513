"""Blocks read and write what their effects name, and nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxpipe.spmd.block import TOKEN, BlockCode, Key, State
from jaxpipe.table.effects import EFFECTS, Access, Place, by_function
from jaxpipe.table.kinds import Kind

LOSSES, X = Key(Place.LOSSES), Key(Place.X)
STATE: State = {TOKEN: jnp.zeros((), bool), LOSSES: jnp.zeros(2), X: [jnp.ones(2)]}


def test_a_block_changes_what_it_may() -> None:
    def run(state: State) -> State:
        return state | {LOSSES: state[LOSSES] + state[X][0]}

    assert BlockCode({X}, {LOSSES}, run).after(STATE)[LOSSES].tolist() == [1, 1]


def test_a_read_that_no_effect_names_fails() -> None:
    block = BlockCode(set(), {LOSSES}, lambda state: state | {LOSSES: state[X][0]})
    with pytest.raises(AssertionError, match=r"reads.*place=.*X"):
        block.after(STATE)


def test_a_write_that_no_effect_names_fails() -> None:
    block = BlockCode({X}, {LOSSES}, lambda state: state | {X: [jnp.zeros(2)]})
    with pytest.raises(AssertionError, match=r"changes.*X"):
        block.after(STATE)


@pytest.mark.parametrize("kind", [kind for kind in Kind if any(e.kind is kind for e in EFFECTS)])
def test_a_field_has_one_place_and_a_function_each_place_once(kind: Kind) -> None:
    own = [effect for effect in EFFECTS if effect.kind is kind]
    fields = {(e.field, e.place) for e in own if e.field}
    assert len({field for field, _ in fields}) == len(fields)
    for _, effects in by_function(own):
        reads = [e.place for e in effects if e.access is Access.READ]
        assert len(set(reads)) == len(reads)
