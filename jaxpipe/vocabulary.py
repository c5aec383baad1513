"""A language model's embedding and head whose vocabulary is cut over the devices of the
pipe axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from .arrays import PyTree
from .errors import Fits, PipelineError, set_typed
from .model.calls import Context
from .model.functions import Loss

# Of a microbatch: "tokens", or "targets" and "weights".
Tokens: TypeAlias = Mapping[str, Array]
_Dim: TypeAlias = Annotated[int, Fits("0 for [V, d], or 1 for [d, V]", lambda dim: dim in (0, 1))]


@dataclass(frozen=True)
class VocabEmbedding:
    """Rows of a table by number, spread over the pipe axis: give it as `Model(...,
    first=jaxpipe.VocabEmbedding())`.

    Each of P devices holds V / P rows of the table (the vocabulary need not divide), looks up those
    of a microbatch's tokens that are among them, and the sum over the axis is x, [..., d].  Its
    parameters are one array [V, d], or a tree with one such leaf; with none, the one leaf under
    "shared" is taken: tied embeddings, with `VocabHead`.  `microbatch["tokens"]` are integers
    [...]; one that is no word makes its x NaN.  The gradient is scattered into a device's rows, the
    table is never gathered.

    Args:
        dim: of the vocabulary: 0 for [V, d], 1 for [d, V].

    Raises:
        PipelineError: the parameters are not one array of two dims; the function is not spread.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> s = jp.schedules.build("1f1b", devices=1, microbatches=2)
        >>> model = jp.Model(
        ...     lambda p, x: x @ p,
        ...     first=jp.VocabEmbedding(),
        ...     last=lambda p, x, microbatch: jnp.mean(x),
        ... )
        >>> pipe = jp.Pipeline(model, s, jax.make_mesh((1,), ("pipe",)))
        >>> params = pipe.place(
        ...     {
        ...         "first": {"w": jnp.arange(8.0).reshape(4, 2)},
        ...         "stages": jnp.eye(2)[None],
        ...         "last": {},
        ...     }
        ... )
        >>> float(pipe.evaluate(params, {"tokens": jnp.array([[0], [3]])}))  # of 0, 1, 6 and 7
        3.5
    """

    spreads: ClassVar[bool] = True  # it runs on all devices of the pipe axis

    dim: _Dim = 0

    def __post_init__(self) -> None:
        set_typed(self, PipelineError)

    def __call__(
        self, params: PyTree, microbatch: Tokens, *, ctx: Context, shared: PyTree = ()
    ) -> Array:
        """The rows of a microbatch's tokens, the same on every device."""
        table, size = one_table("VocabEmbedding", params, shared, ctx)
        table = jnp.moveaxis(table, self.dim, 0)
        count, tokens = table.shape[0], jnp.asarray(microbatch["tokens"])
        mine = tokens - lax.axis_index(ctx.axis) * count
        here = (mine >= 0) & (mine < count)
        rows = table.at[jnp.where(here, mine, count)].get(mode="fill", fill_value=0)
        is_word = (tokens >= 0) & (tokens < size)
        return jnp.where(is_word[..., None], lax.psum(rows, ctx.axis), jnp.nan)


@dataclass(frozen=True)
class VocabHead:
    """Projection onto the vocabulary and cross-entropy, spread over the pipe axis: give it as
    `Model(..., last=jaxpipe.VocabHead())`.

    Each of P devices holds V / P rows of the projection (the vocabulary need not divide) and has V
    / P logits of each token; the maximum and the sums of the softmax go over the axis.  Its
    parameters are one array [V, d], or a tree with one such leaf; with none, the one leaf under
    "shared" is taken: tied embeddings.  x is [..., d], `microbatch["targets"]` are integers [...]
    (one that is no word, and not `ignore`, makes the loss NaN), and `microbatch["weights"]`, where
    there are any, weigh tokens.  Logits are computed in float32 at least.

    The loss of a microbatch is the mean over its tokens; with `Loss.SUM_OVER_COUNT` the sum and the
    count of tokens, so that the step's loss is the mean over all tokens of the batch.  With
    `Model(..., has_metrics=True)` the metrics are {"accuracy": the share of tokens whose target
    has the highest logit (the first of equal ones)}, of a microbatch's weighed tokens and, as all
    metrics, the mean over microbatches.

    Args:
        ignore: targets of this value count for nothing.
        label_smoothing: the share of the target that is spread evenly over the vocabulary (Szegedy
            et al. 2016, section 7; as torch.nn.functional.cross_entropy has it).
        z_loss: this times the square of log(sum(exp(logits))) is added to the loss of a token
            (Chowdhery et al. 2022, PaLM, section 5).
        dim: of the vocabulary: 0 for [V, d], 1 for [d, V], as flax stores the kernel of a Dense.

    Raises:
        PipelineError: the parameters are not one array of two dims; the function is not spread.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> s = jp.schedules.build("1f1b", devices=1, microbatches=2)
        >>> model = jp.Model(lambda p, x: x @ p, last=jp.VocabHead())
        >>> pipe = jp.Pipeline(model, s, jax.make_mesh((1,), ("pipe",)))
        >>> params = pipe.place({"stages": jnp.zeros((1, 4, 4)), "last": {"w": jnp.ones((8, 4))}})
        >>> loss = pipe.evaluate(
        ...     params, {"x": jnp.ones((2, 3, 4)), "targets": jnp.zeros((2, 3), int)}
        ... )
        >>> round(float(loss), 4)  # all 8 words are equally likely: log(8)
        2.0794
    """

    spreads: ClassVar[bool] = True  # it runs on all devices of the pipe axis

    ignore: int = -100
    label_smoothing: Annotated[float, Fits("from 0 to 1", lambda share: 0 <= share <= 1)] = 0.0
    z_loss: Annotated[float, Fits("0 or more", lambda factor: factor >= 0)] = 0.0
    dim: _Dim = 0
    loss: Loss = Loss.MEAN  # set by the pipeline
    has_metrics: bool = False  # likewise

    def __post_init__(self) -> None:
        set_typed(self, PipelineError)

    def __call__(
        self, params: PyTree, x: Array, microbatch: Tokens, *, ctx: Context, shared: PyTree = ()
    ) -> Any:
        """The loss of a microbatch, the same on every device; or (sum, count), and metrics, see
        above.
        """
        nll, weights, hits = self._tokens(params, x, microbatch, ctx, shared)
        total, count = jnp.sum(nll * weights), jnp.sum(weights)
        over = jnp.where(count == 0, 1, count)
        out = (total, count) if self.loss is Loss.SUM_OVER_COUNT else total / over
        if hits is None:
            return out
        return out, {"accuracy": jnp.sum(jnp.where(hits, weights, 0)) / over}

    def returning(self, loss: Loss, *, has_metrics: bool) -> VocabHead:
        """The head that returns what a loss contract asks for, with or without metrics."""
        return replace(self, loss=loss, has_metrics=has_metrics)

    def token_losses(
        self, params: PyTree, x: Array, microbatch: Tokens, *, ctx: Context, shared: PyTree = ()
    ) -> tuple[Array, Array]:
        """(loss of each token, its weight), [...] each and the same on every device: for functions
        of your own under `jaxpipe.spread`.
        """
        return self._tokens(params, x, microbatch, ctx, shared)[:2]

    def _tokens(
        self, params: PyTree, x: Array, microbatch: Tokens, ctx: Context, shared: PyTree
    ) -> tuple[Array, Array, Array | None]:
        """Of each token its loss, its weight, and, for metrics, whether its target has the highest
        logit.
        """
        table, size = one_table("VocabHead", params, shared, ctx)
        count, axis = table.shape[self.dim], ctx.axis
        dtype = jnp.promote_types(jnp.result_type(x, table), jnp.float32)
        logits = lax.dot_general(
            x, table, (((x.ndim - 1,), (1 - self.dim,)), ((), ())), preferred_element_type=dtype
        )
        first = lax.axis_index(axis) * count
        exists = first + jnp.arange(count) < size
        logits = jnp.where(exists, logits, -jnp.inf)
        # The maximum only keeps the exponentials small: the result does not depend on it.
        top = lax.pmax(jnp.max(lax.stop_gradient(logits), axis=-1), axis)
        target = jnp.asarray(microbatch["targets"])
        mine = target - first
        here = (mine >= 0) & (mine < count)
        index = jnp.clip(mine, 0, count - 1)[..., None]
        picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
        sums = [jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), jnp.where(here, picked, 0)]
        if self.label_smoothing:
            sums.append(jnp.sum(jnp.where(exists, logits, 0), axis=-1))
        if self.has_metrics:
            before = first + jnp.arange(count) < target[..., None]
            sums.append(jnp.sum(before & (logits >= top[..., None]), axis=-1, dtype=logits.dtype))
        exponentials, picked, *rest = lax.psum(jnp.stack(sums), axis)
        log_sum = top + jnp.log(exponentials)
        nll = log_sum - picked
        if smoothing := self.label_smoothing:
            nll = (1 - smoothing) * nll + smoothing * (log_sum - rest[0] / size)
        if self.z_loss:
            nll = nll + self.z_loss * jnp.square(log_sum)
        weights = (target != self.ignore).astype(nll.dtype)
        if "weights" in microbatch:
            weights = weights * microbatch["weights"].astype(nll.dtype)
        # A target that is ignored may be any number; any other that is no word is an error of the
        # data, which must not look like a loss.
        nll = jnp.where((target >= 0) & (target < size), nll, jnp.nan)
        # Of several highest logits the first counts, as for argmax: a head of zeros knows nothing.
        hits = (picked >= top) & (rest[-1] == 0) if self.has_metrics else None
        return jnp.where(target != self.ignore, nll, 0), weights, hits


def one_table(name: str, params: PyTree, shared: PyTree, ctx: Context) -> tuple[Array, int]:
    """A device's part of the one array [V, d] or [d, V] among the parameters, or among the shared
    ones, and V.
    """
    own = jax.tree.leaves(params)
    leaves, sizes = (own, ctx.sizes) if own else (jax.tree.leaves(shared), ctx.shared_sizes)
    if ctx.axis is None or (leaves and not any(jax.tree.leaves(sizes))):
        raise PipelineError(
            f"{name} must run on all devices with its parameters cut over them; give it as "
            f"{name}() itself, or call it with `ctx` from a "
            'function under jaxpipe.spread; a table under "shared" is cut where every function '
            "that takes `shared` is spread"
        )
    if len(leaves) != 1 or leaves[0].ndim != 2:
        raise PipelineError(
            f"{name} takes one array [V, d] (or [d, V] with dim=1) as its parameters, or where it "
            f'has none of its own, under "shared"; got {len(leaves)} of shapes '
            f"{[leaf.shape for leaf in leaves]}"
        )
    return leaves[0], jax.tree.leaves(sizes)[0]
