"""Every call of a user's function has a key of its own: all keys of random models are written down
by the functions themselves, are those of the rule, and are different.
"""

import random
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.keys import FIRST, LAST, MICROBATCH, POSITION, SEQUENCE, STAGE, key_of
from tests.parity.engines import mesh_of
from tests.tiers import exhaustive, slow

TIME = 2  # positions of a slice
STEP = 3  # the seed of the step's key


@dataclass(frozen=True)
class Case:
    """A model, a table and a mesh."""

    form: str = "alike"  # or "list", "letters"
    table: str = "1f1b"
    layout: str = ""
    devices: int = 2
    sequences: int = 2
    slices: int = 1
    data: int = 1
    keeps: str = ""  # "state", or "carry"
    spread: bool = False
    remat: str | None = None
    eager: bool = False
    trains: bool = True  # otherwise an evaluation

    @property
    def schedule(self) -> jp.Schedule:
        """The table."""
        count = self.sequences * self.slices
        return jp.schedules.build(
            self.table, devices=self.devices, microbatches=count, slices=self.slices
        )

    @property
    def numbers(self) -> int:
        """The stages, or layers, of the model."""
        layers = self.layout.translate(str.maketrans("", "", "EL|"))
        return len(layers) if self.form == "letters" else self.schedule.num_stages

    @property
    def shares(self) -> int:
        """Calls of `first`, and of `last`, for a microbatch."""
        return self.devices if self.spread and not self.eager else 1


def draw(seed):
    """The case of this number."""
    rng = random.Random(seed)
    form, devices = rng.choice(["alike", "list", "letters"]), rng.choice([1, 2, 2, 4])
    slices = rng.choice([1, 1, 2])
    tables = ["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"]
    case = Case(
        form=form,
        table=rng.choice(tables[:3] if devices == 1 else tables),
        devices=devices,
        sequences=rng.choice([2, 4]),
        slices=slices,
        data=rng.choice([1, 2]),
        keeps=rng.choice(["", "carry" if slices > 1 else "state"]) if form == "alike" else "",
        spread=rng.random() < 0.5,
        remat=rng.choice([None, "full"]),
        eager=rng.random() < 0.2,
        trains=rng.random() < 0.7,
    )
    layers = [rng.choice("tm") for _ in range(5)] + ["|"] * (case.schedule.num_stages - 1)
    rng.shuffle(layers)
    return replace(case, layout="E" + "".join(layers) + "L")


# Entries of a call: its own key, those that are common, those of positions, those of its shares.
OWN, COMMON, PLACED, SHARED = 0, slice(1, 3), slice(3, 3 + TIME), 3 + TIME


def entries(case, ctx):
    """[entries, 2] of a call; -1 where it has none."""
    keys = jnp.stack([ctx.rng, ctx.microbatch_rng, ctx.sequence_rng, *ctx.position_keys(TIME)])
    found = jax.random.key_data(keys).astype(float)
    shares = jnp.full((case.devices, 2), -1.0)
    if ctx.axis is not None:
        own = jax.random.key_data(ctx.share_rng).astype(float)
        every = jax.lax.all_gather(own, ctx.axis)
        shares = shares.at[: len(every)].set(every)
    return jnp.concatenate([found, shares])


def model_of(case):
    """Functions that write their keys into x, and `last` all of them into a metric."""
    count, total = case.numbers + 1, case.sequences * case.slices * case.data

    def first(params, microbatch, *, ctx):
        keys = jnp.zeros((count, SHARED + case.devices, 2)).at[0].set(entries(case, ctx))
        return {"h": microbatch["x"], "keys": keys}

    def stage(params, x, *, ctx):
        number = ctx.stage if ctx.layer is None else ctx.layer
        keys = x["keys"].at[number + 1].set(entries(case, ctx))
        return {"h": x["h"] * params["w"], "keys": keys}

    def last(params, x, microbatch, *, ctx):
        keys = jnp.concatenate([x["keys"], entries(case, ctx)[None]])
        at = microbatch["shard"][0] * (total // case.data) + ctx.microbatch
        every = jnp.zeros((total, *keys.shape)).at[at].set(jax.lax.stop_gradient(keys))
        return jnp.mean(x["h"] ** 2), every * total  # metrics are means

    def with_state(params, x, *, ctx, state):
        return stage(params, x, ctx=ctx), state + 1

    def with_carry(params, x, *, ctx, carry):
        return stage(params, x, ctx=ctx), carry + 1

    def other(params, x, *, ctx):
        return stage(params, x, ctx=ctx)

    if case.spread:
        first, last = jp.spread(first), jp.spread(last)
    more = {"time": ("x",), "has_metrics": True}
    if case.form == "letters":
        layers = case.layout.replace("|", "")
        functions = {"E": first, "t": stage, "m": other, "L": last}
        return jp.Model({k: f for k, f in functions.items() if k in layers}, layers=layers, **more)
    more |= {"first": first, "last": last}
    if case.keeps == "carry":
        more["carry"] = lambda params, x: jnp.zeros((1, 1))
    if case.form == "list":
        return jp.Model([stage if s % 2 else other for s in range(case.numbers)], **more)
    return jp.Model({"": stage, "state": with_state, "carry": with_carry}[case.keeps], **more)


def params_of(case):
    """Canonical parameters."""
    stages = {"w": np.ones(case.numbers)}
    if case.form == "list":
        stages = [{"w": np.ones(())}] * case.numbers
    if case.form == "letters":
        stages = {k: {"w": np.ones(n)} for k in "tm" if (n := case.layout.count(k))}
    return {"first": {}, "stages": stages, "last": {}}


def rows_of(case):
    """A row a sequence."""
    rows = case.sequences * case.data
    shards = np.repeat(np.arange(case.data), case.sequences)
    return {"x": np.ones((rows, TIME * case.slices)), "shard": shards}


def promised(case, shares):
    """[data shards * M, calls, entries, 2] by the rule."""
    step, found = jax.random.key(STEP), []
    for shard in range(case.data):
        own = step if case.data == 1 else key_of(step, shard)
        for m in range(case.sequences * case.slices):
            sequence, k = divmod(m, case.slices)
            for function, number in calls(case):
                keys = [
                    key_of(own, function, m, number),
                    key_of(own, MICROBATCH, m),
                    key_of(own, SEQUENCE, sequence),
                ]
                places = range(k * TIME, (k + 1) * TIME)
                keys += [key_of(own, POSITION, function, sequence, number, t) for t in places]
                is_spread = case.spread and function != STAGE
                keys += [key_of(own, function, m, 1 + d) for d in range(is_spread * shares)]
                none = [(-1, -1)] * (SHARED + case.devices - len(keys))
                found.append([*map(tuple, np.asarray(jax.random.key_data(jnp.stack(keys)))), *none])
    return np.array(found, int).reshape(-1, case.numbers + 2, SHARED + case.devices, 2)


def calls(case):
    """The function and the number of each call of a microbatch."""
    return [(FIRST, 0), *((STAGE, n) for n in range(case.numbers)), (LAST, 0)]


def pipeline_keys(case):
    """Those of a step, or of an evaluation."""
    pipe = jp.Pipeline(
        model_of(case),
        case.schedule,
        mesh_of(case.devices, data=case.data),
        layout=case.layout if case.form == "letters" else None,
        sharding=jp.Sharding(data=("data",)),
        memory=jp.Memory(remat=case.remat),
        executor=EagerExecutor() if case.eager else None,
    )
    more, placed = {"rng": jax.random.key(STEP)}, pipe.place(params_of(case))
    if case.keeps == "state":
        more["state"] = pipe.place_state(np.zeros(case.numbers))
    if case.trains:
        return pipe.value_and_grad(placed, rows_of(case), **more)[0][1]
    return pipe.evaluate(placed, rows_of(case), **more)[1]


def plain_keys(case):
    """Those of the model without a pipeline."""
    more = {"state": np.zeros(case.numbers)} if case.keeps == "state" else {}
    counts = {"microbatches": case.sequences * case.slices, "slices": case.slices}
    key = jax.random.key(STEP)
    return model_of(case).loss(params_of(case), rows_of(case), rng=key, **counts, **more)[1]


QUICK = (
    Case(data=2, keeps="state"),
    Case(form="letters", layout="Et|tL", spread=True, trains=False),
)


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(slow(draw(n)) for n in (*range(8), 19, 26, 57)),
        *(exhaustive(draw(n)) for n in range(8, 60)),
    ],
    ids=str,
)
def test_every_call_has_a_key_of_its_own(case):
    wanted = promised(case, case.shares)
    assert np.array_equal(np.rint(pipeline_keys(case)), wanted)
    if case.data == 1:
        assert np.array_equal(np.rint(plain_keys(case)), promised(case, 1))
    own = np.delete(wanted, COMMON, axis=2).reshape(-1, 2)
    microbatches, sequences = (wanted[:, 0, at] for at in range(*COMMON.indices(SHARED)))
    every = [*own[own[:, 0] >= 0], *microbatches, *sequences[:: case.slices]]
    assert len({*map(tuple, every)}) == len(every)
    assert (wanted[:, :, COMMON] == wanted[:, :1, COMMON]).all()
