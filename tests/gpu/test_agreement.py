"""Collectives that can hang are found in compiled programs, and those of pipelines have none."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.cli.checks import Verdict
from jaxpipe.doctor import steps
from jaxpipe.inspect.hlo import Instruction, connected, groups_of, parse
from jaxpipe.inspect.programs import collective_faults
from tests.gpu.programs import ROWS, TIME, VOCAB, WIDTH, gpu_mesh, needs_gpu_compiler, shapes, stage

HEAD = "HloModule m, is_scheduled=true\n"
QUEUE = 'backend_config={"operation_queue_id":"%s"}'


def permute(name, operand, pairs="{{0,1},{2,3}}", queue="0", channel=", channel_id=1"):
    return (
        f"  %{name} = (f32[8]{{0}}, f32[8]{{0}}) collective-permute-start(%{operand}){channel}, "
        f"source_target_pairs={pairs}, {QUEUE % queue}\n"
    )


def done(name, start, kind="collective-permute"):
    return f"  %{name} = f32[8]{{0}} {kind}-done(%{start})\n"


def reduce(name, operand, groups="{{0,1},{2,3}}", queue="0"):
    return (
        f"  %{name} = f32[8]{{0}} all-reduce-start(%{operand}), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add, {QUEUE % queue}\n"
    )


ADD = (
    "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    "  ROOT %sum = f32[] add(%a, %b)\n}\n\n"
)


def entry(body, root):
    return (
        f"{HEAD}\n{ADD}ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n"
        f"{body}  ROOT %r = f32[8]{{0}} copy(%{root})\n}}\n"
    )


def faults(text, coordinates=(0, 0, 1, 1), **options):
    return collective_faults(parse(text), coordinates, **options)


def test_one_queue_runs_in_order_and_two_queues_may_not():
    """The deadlock of openxla/xla 40656: two collectives of two queues share two devices."""

    def program(queue):
        return entry(
            permute("one", "p")
            + reduce("two", "p", queue=queue)
            + done("d1", "one")
            + done("d2", "two", "all-reduce"),
            "d1",
        )

    assert faults(program("0")) == []
    (fault,) = faults(program("1"))
    assert "collective-permute one (queue 0) and all-reduce two (queue 1)" in fault
    # one after the other
    apart = entry(
        permute("one", "p")
        + done("d1", "one")
        + reduce("two", "p", queue="1")
        + done("d2", "two", "all-reduce"),
        "d1",
    )
    assert faults(apart) == []


def test_queues_that_share_one_device_do_not_wait_in_a_circle():
    def program(groups):
        return entry(
            reduce("one", "p", "{{0,1},{2,3}}")
            + reduce("two", "p", groups, queue="1")
            + done("d2", "two", "all-reduce")
            + done("d1", "one", "all-reduce"),
            "d1",
        )

    assert faults(program("{{0,2},{1,3}}")) == []
    assert len(faults(program("{{1,0},{3,2}}"))) == 1


def test_permutes_of_connected_components_share_their_ends():
    """The hang of openxla/xla 44530: cliques {0, 1, 2} and {0, 1} of two queues."""
    text = entry(
        permute("one", "p", "{{0,1},{1,2}}")
        + permute("two", "p", "{{1,0}}", queue="1")
        + done("d1", "one")
        + done("d2", "two"),
        "d1",
    )
    assert len(faults(text, components=True)) == 1
    # cliques of the devices that take part, which do not meet
    other = text.replace("{{1,0}}", "{{3,4}}")
    assert faults(other, (0, 1, 2, 3, 4), components=True) == []
    assert len(faults(other, (0, 1, 2, 3, 4))) == 1, "cliques of all devices meet"


def guarded(inside, scope="F chunk 0"):
    """A collective in a loop of unknown trips, and one after it."""
    return (
        f"{HEAD}\n{ADD}"
        "%body (s: (pred[], f32[8])) -> (pred[], f32[8]) {\n"
        "  %s = (pred[], f32[8]{0}) parameter(0)\n  %c = pred[] get-tuple-element(%s), index=0\n"
        f"  %x = f32[8]{{0}} get-tuple-element(%s), index=1\n{inside}"
        "  ROOT %t = (pred[], f32[8]{0}) tuple(%c, %inner)\n}\n\n"
        "%cond (q: (pred[], f32[8])) -> pred[] {\n  %q = (pred[], f32[8]{0}) parameter(0)\n"
        "  ROOT %g = pred[] get-tuple-element(%q), index=0\n}\n\n"
        "ENTRY %main (p: (pred[], f32[8])) -> f32[8] {\n"
        "  %p = (pred[], f32[8]{0}) parameter(0)\n"
        "  %w = (pred[], f32[8]{0}) while(%p), condition=%cond, body=%body, "
        f'metadata={{op_name="jit(step)/ticks/{scope}/while"}}\n'
        "  %y = f32[8]{0} get-tuple-element(%w), index=1\n"
        f"{permute('after', 'y')}  ROOT %z = f32[8]{{0}} collective-permute-done(%after)\n}}\n"
    )


def test_a_group_across_coordinates_under_a_predicate_is_named_with_what_others_wait_in():
    across = reduce("inside", "x", "{{0,2},{1,3}}") + done("inner", "inside", "all-reduce")
    (fault,) = faults(guarded(across))
    assert "all-reduce inside is under a predicate" in fault
    assert "wait in collective-permute after" in fault
    within = reduce("inside", "x", "[2,2]<=[4]") + done("inner", "inside", "all-reduce")
    assert faults(guarded(within)) == []
    assert faults(guarded(across, "L")) == [], "all devices run L together"


def test_a_permute_under_a_predicate_has_a_clique_of_those_that_take_part():
    inside = permute("ring", "x", "{{0,1},{1,0}}") + done("inner", "ring")
    (fault,) = faults(guarded(inside))
    assert "meets devices [0, 1, 2, 3]" in fault
    assert faults(guarded(inside), components=True) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (permute("one", "p", "{{0,1},{0,2}}"), r"devices \[0\] twice as a source"),
        (permute("one", "p", "{{0,1},{2,1}}"), r"devices \[1\] twice as a target"),
        (permute("one", "p", "{{0,7}}"), r"devices \[7\]; the program has 4"),
        (permute("one", "p", channel=""), "has no channel"),
        (reduce("one", "p", "{{0,1},{1,2}}"), r"devices \[1\] in two groups"),
        (reduce("one", "p", "{{0,1,2},{3}}"), "groups of different sizes"),
    ],
)
def test_groups_that_no_devices_agree_on(line, says):
    kind = "collective-permute" if "permute" in line else "all-reduce"
    (fault,) = faults(entry(line + done("d", "one", kind), "d"))
    assert re.search(says, fault), fault


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,3}}", ((0, 3),)),
    ],
)
def test_groups_are_read_in_every_form(text, groups):
    start = Instruction("x", (), "all-reduce", (), f"channel_id=1, {text}, more", False)
    assert groups_of(start, 4) == groups


def test_pairs_are_joined():
    pairs = [frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5), (3, 4))]
    assert connected(pairs) == [frozenset({0, 1}), frozenset({2, 3, 4, 5})]


@needs_gpu_compiler
def test_a_pipeline_with_a_tensor_axis_and_spread_ends_cannot_hang():
    mesh = gpu_mesh((2, 2), ("pipe", "tensor"))
    cut = PartitionSpec(None, "tensor")
    specs = {"stages": {"w1": PartitionSpec(None, None, "tensor"), "b": cut, "w2": cut}}
    pipe = jp.Pipeline(
        jp.Model(stage, first=jp.VocabEmbedding(), last=jp.VocabHead()),
        jp.schedules.build("1f1b", devices=2, microbatches=4),
        mesh,
        sharding=jp.Sharding(specs=specs),
    )
    canonical = shapes(2) | {"last": {"head": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32)}}
    whole = NamedSharding(mesh, PartitionSpec())
    batch = {
        name: jax.ShapeDtypeStruct((4 * ROWS, TIME), jnp.int32, sharding=whole)
        for name in ("tokens", "targets")
    }
    compiled = pipe.lower(pipe.place(canonical), batch).compile()
    jp.inspect.check_collectives(compiled, mesh)
    text = compiled.as_text()
    # the sums of tensor parallelism, made across the pipe axis
    broken = text.replace("replica_groups=[2,2]<=[4]", "replica_groups=[2,2]<=[2,2]T(1,0)")
    assert broken != text

    class Broken:
        """A program of another text."""

        def as_text(self):
            return broken

    with pytest.raises(jp.PipelineError, match="under a predicate that differs") as caught:
        jp.inspect.check_collectives(Broken(), mesh)
    assert len(caught.value.faults) > 4
    line = steps.collectives(Broken(), Mesh(mesh.devices[:, 0], ("pipe",)))
    assert line.verdict is Verdict.WRONG
