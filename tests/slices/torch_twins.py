"""The models of `tests.slices.models` in torch, for torch_ref."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.slices.models import HEADS, KV_HEADS, MODELS, SIZE, WIDTH
from torch_ref.models.base import StagedModel


def recurrent(params: Any, x: Tensor, ctx: Any) -> Tensor:
    if ctx.carry is None:
        h = torch.tanh(params["begin"]).expand_as(x[:, 0])
        total = torch.zeros_like(h)
    else:
        h, total = ctx.carry
    states = []
    for now in x.unbind(1):
        h = torch.tanh(now @ params["w"] + h @ params["u"] + 0.1 * total)
        total = 0.9 * total + h
        states.append(h)
    ctx.hand_on((h, total))
    return x + torch.stack(states, 1)


def state_space(params: Any, x: Tensor, ctx: Any) -> Tensor:
    tail, state = x.new_zeros(x.shape[0], 2, WIDTH), x.new_zeros(x.shape[0], WIDTH)
    if ctx.carry is not None:
        tail, state = ctx.carry["tail"], ctx.carry["state"]
    wide, length = torch.cat([tail, x], 1), x.shape[1]
    mixed = wide[:, :length] * params["taps"][0]
    for i in (1, 2):
        mixed = mixed + wide[:, i : i + length] * params["taps"][i]
    decay, given, states = torch.sigmoid(mixed @ params["decay"]), mixed @ params["in"], []
    for a, b in zip(decay.unbind(1), given.unbind(1), strict=True):
        state = a * state + (1 - a) * b
        states.append(state)
    ctx.hand_on({"tail": wide[:, length:], "state": state})
    return x + torch.stack(states, 1) @ params["out"]


def rotated(h: Tensor, at: Tensor) -> Tensor:
    half = h.shape[-1] // 2
    angle = at[:, None, None] * 10.0 ** -torch.arange(half, dtype=h.dtype)
    one, two = h[..., :half], h[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


def attention(params: Any, x: Any, ctx: Any) -> Any:
    h, document = x["h"], x["document"]
    at = ctx.offset(h.shape[1]) + torch.arange(h.shape[1], dtype=h.dtype)

    def split(name: str, heads: int) -> Tensor:
        return (h @ params[name]).reshape(*h.shape[:2], heads, SIZE)

    keys = ctx.append("keys", rotated(split("k", KV_HEADS), at))
    values, documents = ctx.append("values", split("v", KV_HEADS)), ctx.append("docs", document)
    keys, values = (rows.repeat_interleave(HEADS // KV_HEADS, 2) for rows in (keys, values))
    seen = (at[:, None] >= torch.arange(keys.shape[1])) & (
        document[:, :, None] == documents[:, None]
    )
    scores = torch.einsum("rthd,rshd->rhts", rotated(split("q", HEADS), at), keys) / SIZE**0.5
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1)
    h = h + torch.einsum("rhts,rshd->rthd", weights, values).reshape(h.shape) @ params["o"]
    return {**x, "h": h + torch.tanh(h @ params["up"]) @ params["down"]}


STAGES = {"recurrent": recurrent, "state_space": state_space, "attention": attention}


@dataclass(frozen=True)
class Twin(StagedModel):
    """One of `MODELS` with as many stages."""

    takes_slices: ClassVar[bool] = True
    name: str
    num_stages: int
    sum_count: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {f"stages/{k}": (self.num_stages, *v) for k, v in MODELS[self.name][1].items()}
        first = {"first/kernel": (WIDTH, WIDTH)} if self.name == "attention" else {}
        return {**first, **own, "last/kernel": (WIDTH, 3)}

    def first(self, params: Any, microbatch: Any, ctx: Any) -> Any:
        x = microbatch["x"]
        if self.name != "attention":
            return x
        return {"h": x @ params["first/kernel"], "document": microbatch["document"]}

    def stage(self, params: Any, x: Any, ctx: Any) -> Any:
        own = {key.removeprefix("stages/"): leaf for key, leaf in params.items()}
        return STAGES[self.name](own, x, ctx)

    def last(self, params: Any, x: Any, microbatch: Any, ctx: Any) -> Tensor:
        h = x["h"] if self.name == "attention" else x
        return (h @ params["last/kernel"] - microbatch["y"]).square().mean()


def flat(tree: Any) -> dict[str, Any]:
    """Canonical parameters, or gradients, by torch_ref's names."""
    ends = {f"{key}/kernel": tree[key] for key in ("first", "last") if key in tree}
    return {**ends, **{f"stages/{key}": leaf for key, leaf in tree["stages"].items()}}
