"""The errors that jaxpipe raises for what a user wrote, and the checks that raise them.

Every error is a ValueError.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, partial, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

__all__ = [
    "CheckpointError",
    "CostError",
    "JaxpipeError",
    "ParseError",
    "PipelineError",
    "PlanError",
    "ProgramError",
    "ScheduleError",
    "Violation",
    "listed",
    "quoted",
]

# A message stays readable, however many faults there are: it shows this many characters of a value,
# and this many faults.
_MOST_CHARACTERS, _MOST_FAULTS = 60, 100
_MOST_BITS = 512  # of a whole number that is written out


class JaxpipeError(ValueError):
    """Base of every error about user input: what is invalid, where, why, and what to
    write instead.  `.faults` holds every fault.
    """

    faults: tuple[str, ...]

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(map(str, faults)) or (message,)

    @classmethod
    def listing(cls, head: str, faults: Iterable[object]) -> Self:
        """The error whose message has a line for each fault (the first hundred), below `head`."""
        found = tuple(faults)
        return cls(listed(head, found) if head else "\n".join(map(str, found)), found)

    @classmethod
    def refuse(cls, head: str, faults: Iterable[object]) -> None:
        """Raise the error that lists the faults, where there are any.

        >>> PipelineError.refuse("the mesh does not fit", [])
        """
        if found := tuple(faults):
            raise cls.listing(head, found)


class ParseError(JaxpipeError):
    """Text that is not an action, a table or a layout; the message points at the character."""


@dataclass(frozen=True)
class Violation:
    """One broken rule: its name, a sentence, and the cell (device, position in its row, or in its
    line of a file) if there is one.

    `others` are further cells that are involved (a deadlock's cycle, the first of two duplicates).
    """

    rule: str
    message: str
    device: int | None = None
    position: int | None = None
    others: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = "" if self.device is None else f" [device {self.device}, position {self.position}]"
        return f"{self.rule}{where}: {self.message}"


class ScheduleError(JaxpipeError):
    """A schedule that cannot be built or that breaks the rules of a table; `.violations` holds
    every one.
    """

    violations: tuple[Violation, ...]

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message, faults)
        self.violations = tuple(fault for fault in faults if isinstance(fault, Violation))


class CostError(JaxpipeError):
    """Costs that do not fit: a list of another length than the stages, or a cost that is negative
    or not a number.
    """


class PipelineError(JaxpipeError):
    """A mesh, parameter tree, batch or function that does not fit the schedule; `.faults` holds
    every one.
    """


class PlanError(JaxpipeError):
    """A model, costs or a memory limit for which there is no plan; `.faults` holds every reason."""


class CheckpointError(JaxpipeError):
    """A checkpoint that is not there or is of another model, or a state that cannot be saved;
    `.faults` holds every one.
    """


class ProgramError(JaxpipeError):
    """A lowered program that does not compute its schedule: a bug of jaxpipe, found before anything
    is compiled.
    """


def quoted(value: object, most: int = _MOST_CHARACTERS) -> str:
    """A value as an error shows it: its repr, shortened where it is long.  Never fails, whatever
    the value is.

    >>> quoted("2F0"), quoted("x" * 1000, 3), quoted(10**5000)
    ("'2F0'", "'xxx'... (1,000 characters)", 'a number of about 5,001 digits')
    """
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = most
    try:
        text = short.repr(value)
    except Exception:  # a repr of the user's own
        return f"<{type(value).__name__}>"
    return text if len(text) <= 2 * most else text[: 2 * most] + "..."


def listed(head: str, faults: Sequence[object]) -> str:
    """A message with a line for each fault below `head`; of very many, the first hundred and the
    number of the others.

    >>> print(listed("two things are wrong", ["this", "that"]))
    two things are wrong:
      this
      that
    """
    lines = [f"{head}:", *(f"  {fault}" for fault in faults[:_MOST_FAULTS])]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  ... and {len(faults) - _MOST_FAULTS:,} more")
    return "\n".join(lines)


# Sizes far beyond any job, and small enough that a typing error does not take all memory.
MAX_DEVICES = 4096  # rows of a table
MAX_STAGES = 65_536
# of stage and microbatch, in a table that is built: three million actions, half a gigabyte
MAX_PAIRS = 2**20
MAX_DIGITS = 10  # of a stage's or microbatch's number, as text
MAX_COUNT = 10**MAX_DIGITS  # of anything that is counted
MAX_TEXT = 2**25  # characters of a table as text: more than MAX_PAIRS take
MAX_FAULTS = 1000  # cells that cannot be read; reading stops there
MAX_COST = 1e100  # whatever the unit is: sums and squares of such costs are finite numbers


class Fits(NamedTuple):
    """A part of an `Annotated` type: how an error names its values, and which of them fit."""

    text: str
    test: Callable[[Any], object] = lambda _: True


Count: TypeAlias = Annotated[
    int, Fits(f"a whole number of at least 1, at most {MAX_COUNT:,}", lambda n: 1 <= n <= MAX_COUNT)
]
Seed: TypeAlias = Annotated[int, Fits("a whole number of at least 0", lambda n: 0 <= n < 2**31)]
Duration: TypeAlias = Annotated[float, Fits("seconds, 0 or more", lambda s: 0 <= s <= MAX_COST)]

P = ParamSpec("P")
R = TypeVar("R")
_MISFIT = object()
_TEXTS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}

# How to make one, by the name of its class.
_HOW = {
    "Schedule": "; write jaxpipe.schedules.build('1f1b', devices=P, microbatches=M)",
    "Mesh": '; write jax.make_mesh((P,), ("pipe",))',
}


def is_whole(value: object) -> TypeGuard[int]:
    """True for Python's and numpy's whole numbers (True and False are none)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True for Python's and numpy's real numbers (True and False are none)."""
    return isinstance(value, Real) and not isinstance(value, bool)


def typed(error: type[JaxpipeError] = ScheduleError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a function whose arguments are what its annotations say; the error lists every
    one that is not.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        untyped: Callable[..., R] = function

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.arguments |= _read_all(bound.arguments, function, error)
            return untyped(*bound.args, **bound.kwargs)

        return call

    return decorate


def set_typed(value: Any, error: type[JaxpipeError], *, but: Collection[str] = ()) -> None:
    """The same for the fields of a frozen dataclass, in its `__post_init__`; those named in `but`
    are left as they are.
    """
    names = [field.name for field in fields(value) if field.name not in but]
    values = {name: getattr(value, name) for name in names}
    for name, read in _read_all(values, type(value), error).items():
        object.__setattr__(value, name, read)


def plain(number: float) -> int | float:
    """A number as Python's own int or float; infinite where no float is so large."""
    try:
        as_float = float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
    return int(number) if is_whole(number) else as_float


def is_cost(value: object) -> bool:
    """Whether a value is a finite number of at least 0, of `MAX_COST` at most."""
    return is_number(value) and 0 <= plain(value) <= MAX_COST


_hints = cache(partial(get_type_hints, include_extras=True))


def _read_all(
    values: Mapping[str, object], owner: Callable[..., object], error: type[JaxpipeError]
) -> dict[str, object]:
    """Every value as its annotation wants it; a value without one stays as it is."""
    hints = _hints(owner)
    read = {name: _read(value, hints.get(name, Any)) for name, value in values.items()}
    faults = [_fault(n, values[n], hints[n]) for n, value in read.items() if value is _MISFIT]
    name = owner.__qualname__.removesuffix(".__init__").split(".")[-1]
    error.refuse(f"{name} cannot take this", faults)
    return read


def misfit(name: str, value: object, hint: object) -> str | None:
    """The fault of a value that is not what an annotation says; None where it is.

    >>> misfit("chunks", 0, Count), misfit("chunks", 1, Count)
    ('chunks must be a whole number of at least 1, at most 10,000,000,000, not 0', None)
    """
    return _fault(name, value, hint) if _read(value, hint) is _MISFIT else None


def _fault(name: str, value: object, hint: object) -> str:
    how = _HOW.get(getattr(hint, "__name__", ""), "")
    return f"{name} must be {_type_text(hint)}, not {quoted(value)}{how}"


def _read(value: object, hint: Any) -> object:
    """A value as an annotation wants it; _MISFIT where it does not fit."""
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin is Annotated:
        inner, fits = get_args(hint)
        read = _read(value, inner)
        return read if read is not _MISFIT and fits.test(read) else _MISFIT
    if origin in (Union, UnionType):
        reads = (_read(value, each) for each in get_args(hint))
        return next((read for read in reads if read is not _MISFIT), _MISFIT)
    if origin is not None:
        return _read_container(value, origin, get_args(hint))
    if hint is float:
        return plain(value) if is_number(value) else _MISFIT
    if hint is int:
        return int(value) if is_whole(value) else _MISFIT
    if hint is bool:
        return bool(value) if isinstance(value, bool | np.bool_) else _MISFIT
    return value if isinstance(value, hint) else _MISFIT


def _read_container(value: object, origin: type, inner: tuple[object, ...]) -> object:
    """A container with its items; an iterator, which can be read only once, stays as it is."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, origin) or isinstance(value, str | bytes):
        return _MISFIT
    if origin in (Iterable, Callable) or not isinstance(value, Collection):
        return value
    if isinstance(value, Mapping) and issubclass(origin, Mapping):
        read = [(_read(key, inner[0]), _read(each, inner[1])) for key, each in value.items()]
        return _MISFIT if any(_MISFIT is each for pair in read for each in pair) else dict(read)
    is_uniform = len(inner) == 1 or inner[1:] == (...,)
    one_of = get_args(inner[0]) if get_origin(inner[0]) in (Union, UnionType) else inner[:1]
    if is_uniform and int in one_of and {*map(type, value)} == {int}:
        return tuple(value)  # as they are: a placement has tens of thousands
    hints = inner[:1] * len(value) if is_uniform else inner
    if len(hints) != len(value):
        return _MISFIT
    items = tuple(_read(each, hint) for each, hint in zip(value, hints, strict=True))
    return _MISFIT if any(_MISFIT is each for each in items) else items


def _type_text(hint: Any) -> str:
    """An annotation as an error names it."""
    origin = get_origin(hint)
    if origin is Annotated:
        return str(get_args(hint)[1].text)
    if origin in (Union, UnionType):
        return " or ".join(map(_type_text, get_args(hint)))
    if origin is Callable:
        return "a function"
    if origin is not None:
        what = "a mapping" if issubclass(origin, Mapping) else "a sequence"
        inner = _SEVERAL.get(get_args(hint)[-1])
        return f"{what} of {inner}" if inner else what
    if hint in _TEXTS:
        return _TEXTS[hint]
    if issubclass(hint, Enum):
        return f"one of {', '.join(map(str, hint))}"
    return f"a {_public(hint)}"


def _public(hint: type) -> str:
    """The path of a class for users of jaxpipe: at the top, or in its room."""
    package, room, *_ = f"{hint.__module__}.".split(".")
    if package != "jaxpipe":
        return f"{package} {hint.__name__}"
    top = sys.modules["jaxpipe"]
    return f"jaxpipe.{'' if hint.__name__ in top.__all__ else f'{room}.'}{hint.__name__}"
