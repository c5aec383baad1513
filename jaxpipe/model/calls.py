"""A user's function as it is called: the keywords that it takes, the context that it may take, and
errors from inside that name it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import PyTree, described, summable
from ..errors import PipelineError
from .user_shardings import check_returned, refusal


class Context(NamedTuple):
    """The context of a call, for functions that take `ctx` by keyword: stage and microbatch index
    (int32 scalars), and a key of both.

    `rng` depends on the step's key, the stage, the microbatch and the data shard, never on the
    schedule; it is None where the step got no key.
    """

    stage: Any
    microbatch: Any
    rng: Any = None
    microbatch_rng: Any = None  # a key of the step and the microbatch alone: equal on all stages
    # where the model is given by layers: the layer's number, from which `rng` is made instead of
    # the stage
    layer: Any = None
    # of a function under `jaxpipe.spread`: the name of the pipe axis, for collectives
    axis: str | None = None
    # and there: for each parameter, the whole length of the dim that is cut, without padding; 0
    # where it is whole
    sizes: PyTree = None
    shared_sizes: PyTree = None  # the same for the shared parameters
    # position in its sequence of the slice's first row of time; 0 where sequences are whole
    offset: Any = None
    ledger: Any = None  # where `append` writes
    sequence_rng: Any = None  # with several slices, a key of the step and the sequence

    def append(self, name: str, rows: Any, axis: int = 1) -> Any:
        """Write a slice's rows into the buffer of its sequence in this stage; the whole buffer.

        Rows [..., T / K, ...] are at `offset` along `axis` of the buffer [..., T, ...].  Rows of
        later slices are there too in a backward, so the reader masks what comes after its own
        position.  The gradients of all slices that read a row add up before the slice that made it
        has its backward.

        Raises:
            PipelineError: a name is used twice in a stage.

        Example:
            keys = ctx.append("keys", h @ params["k"])
        """
        return rows if self.ledger is None else self.ledger.append(name, rows, axis)

    def position_keys(self, count: int) -> Any:
        """A key for each of the slice's `count` positions, [count], of the stage (or layer), the
        sequence and the position: random numbers that do not depend on how a sequence is cut.

        Example:
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (width,)))(
                ctx.position_keys(x.shape[1])
            )
        """
        common = self.microbatch_rng if self.sequence_rng is None else self.sequence_rng
        if common is None:
            raise PipelineError(
                "ctx.position_keys needs the step's key; pass rng=jax.random.key(...)"
            )
        key = jax.random.fold_in(common, self.stage if self.layer is None else self.layer)
        return jax.vmap(lambda at: jax.random.fold_in(key, at))(
            self.offset + jnp.arange(count, dtype=jnp.int32)
        )


STAGE_KEYWORDS = ("carry", "ctx", "microbatch", "shared", "state", "training")
# of `first` and `last`, which are given the microbatch anyway
OUTER_KEYWORDS = ("ctx", "shared", "training")
# the inputs of both that differ by microbatch
OUTER_WANTS = frozenset({"microbatch", "ctx"})


@dataclass(frozen=True)
class Function:
    """A user function and which of the keywords offered to it it takes."""

    call: Callable[..., Any]
    name: str
    wants: frozenset[str]
    spread: bool = False  # runs on all devices of the pipe axis at once
    cached: bool = False  # its carry and appended rows are its state, from call to call

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        name: str,
        offered: Collection[str] = STAGE_KEYWORDS,
        *,
        takes: Sequence[str] = ("params", "x"),
    ) -> Function:
        """Read the signature for the keywords that are offered; PipelineError if it cannot be
        called so.

        `takes` names what is passed by position.
        """
        if not callable(call):
            raise PipelineError(f"`{name}` must be a function; got {type(call).__name__}")
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return cls(call, name, frozenset())
        parameters = list(signature.parameters.values())
        # A parameter after those that are passed by position may be given by its name, whether it
        # has a default or not.
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        named += [p for p in parameters[len(takes) :] if p.kind is p.POSITIONAL_OR_KEYWORD]
        wants = frozenset({p.name for p in named} & set(offered))
        try:
            signature.bind(*takes, **dict.fromkeys(wants))
        except TypeError as error:
            raise PipelineError(
                f"`{name}` is called as {name}({', '.join(takes)}), and by keyword with those of "
                f"{', '.join(sorted(offered))} that it "
                f"takes, but its parameters are {signature}: {error}"
            ) from None
        return cls(call, name, wants)

    def under(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Function:
        """The same function changed, with the keywords that it is known to take (a wrapper hides
        its signature).
        """
        return replace(self, call=change(self.call))

    @property
    def wants_arrays(self) -> frozenset[str]:
        """The keywords whose values differ by microbatch or stage."""
        more = {"ctx"} if "carry" in self.wants else set()
        more |= {"ctx", "state"} if self.cached else set()
        return self.wants & {"ctx", "microbatch", "state"} | more

    def run(
        self, *arguments: PyTree, shared: PyTree, extra: dict[str, PyTree], training: bool
    ) -> Any:
        """Call it with those keywords that it takes."""
        have = {
            "shared": shared,
            "training": training,
            **{k: extra.get(k) for k in ("carry", "ctx", "microbatch", "state")},
        }
        return self.calling(
            lambda: self.call(*arguments, **{k: have[k] for k in sorted(self.wants)}),
            arguments,
            have["ctx"],
        )

    def loss_of(self, loss: Any) -> Any:
        """The loss that a stage or a layer returns besides x, as a scalar; PipelineError for what
        is none.

        None is no loss, and a Python number is one.
        """
        if loss is None:
            return jnp.zeros((), jnp.float32)
        try:
            found = jnp.asarray(loss)
        except (TypeError, ValueError):
            what: Any = jax.tree.structure(loss)
        else:
            weak = jax.typeof(found).weak_type and jnp.issubdtype(found.dtype, jnp.integer)
            if found.shape == () and (weak or jnp.issubdtype(found.dtype, jnp.floating)):
                # Half a precision ends at 65504, and losses are summed.
                return summable(found)
            what = f"{found.dtype}{list(found.shape)}"
        raise PipelineError(
            f"`{self.name}` must return a floating scalar as its loss; it returns {what}"
        )

    def calling(self, call: Callable[[], Any], arguments: Sequence[PyTree], ctx: Any) -> Any:
        """Call it; an error from inside says which function it was and what it was given."""
        try:
            found = call()
        except PipelineError:
            raise
        except Exception as error:
            text = str(error)
            if (
                "ctx" in self.wants
                and isinstance(ctx, Context)
                and ctx.rng is None
                and re.search(r"\b(key|PRNG)", text)
            ):
                raise PipelineError(
                    f"`{self.name}` uses ctx.rng, but the step got no key; pass "
                    "rng=jax.random.key(...)"
                ) from error
            if refused := refusal(self.name, error):
                raise refused from error
            what = "; ".join(described(tree) for tree in arguments)
            error.add_note(
                f"jaxpipe: this was raised by `{self.name}` ({_place(self.call)}) when it was "
                f"traced with ({what})"
            )
            raise
        check_returned(self.name, found)
        return found


def _place(call: Callable[..., Any]) -> str:
    """The name, file and line of a function."""
    call = inspect.unwrap(call)
    code = getattr(call, "__code__", None)
    name = getattr(call, "__qualname__", type(call).__name__)
    return (
        name
        if code is None
        else f"{name}, {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    )
