"""Any table on the smallest MLP: the error of each engine against the oracle."""

from __future__ import annotations

from functools import lru_cache

import jaxpipe as jp
from tests.models import Twin, to_tree, twin

from .engines import case_data, jaxpipe_step, pipeline, torch_step, truth, worst_error

ROWS = 1


@lru_cache
def model_of(stages: int) -> Twin:
    """One twin for each S, so that `truth` computes the oracle's answer once."""
    return twin("mlp", stages, width=2, features_in=2, features_out=1)


def torch_error(schedule: jp.Schedule) -> float:
    """torch_ref's largest relative error: of loss and gradients, or of the loss alone for a table
    of forwards.
    """
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    found, right = (
        torch_step(schedule, model, *case_data(model, count, ROWS)),
        truth(model, count, ROWS),
    )
    return abs(found.loss / right.loss - 1) if schedule.forward_only else worst_error(found, right)


def jaxpipe_error(schedule: jp.Schedule) -> float:
    """The same of jaxpipe's lowered program."""
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    weights, batch = case_data(model, count, ROWS)
    pipe, right = pipeline(schedule, model), truth(model, count, ROWS)
    if schedule.forward_only:
        return abs(float(pipe.evaluate(pipe.place(to_tree(weights)), batch)) / right.loss - 1)
    return worst_error(jaxpipe_step(pipe, weights, batch), right)


def length(schedule: jp.Schedule) -> int:
    """How many cells are not idle."""
    return sum(cell is not None for row in schedule.rows for cell in row)
