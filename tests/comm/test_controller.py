"""What the controller decides, event by event: no processes, clocks or threads."""

from __future__ import annotations

import pytest

from overlap.comm.controller import Controller
from overlap.comm.dtype import DType, Op
from overlap.comm.request import Kind, Request

F4 = DType.FLOAT32


def allreduce(shape=(2,), dtype=F4, op=Op.SUM, **more):
    return Request(Kind.ALLREDUCE, ((dtype, shape),), op, **more)


def ask(controller, requests, name="t", now_s=0.0):
    """`requests` by rank; returns what is decided."""
    for rank, request in requests.items():
        controller.submit(rank, name, request, now_s)
    return controller.decide()


def test_an_operation_is_ready_when_its_last_rank_has_asked():
    controller = Controller(3)
    assert ask(controller, {2: allreduce(), 0: allreduce()}) == []
    assert not controller.idle
    (decision,) = ask(controller, {1: allreduce()})
    assert (decision.names, decision.members, decision.verdict) == (("t",), (0, 1, 2), None)
    assert controller.idle


def test_order_is_that_of_becoming_ready():
    controller = Controller(2)
    for rank, names in ((0, "abc"), (1, "cab")):
        for name in names:
            controller.submit(rank, name, Request(Kind.BARRIER), 0.0)
    assert [decision.names for decision in controller.decide()] == [("c",), ("a",), ("b",)]


def test_small_allreduces_that_are_ready_together_become_one():
    controller = Controller(2, fusion_bytes=24)
    for name, request in {
        "a": allreduce(),
        "b": allreduce(),
        "c": allreduce(),
        "d": allreduce(),  # the first three fill 24 bytes
        "e": allreduce(dtype=DType.FLOAT64),
        "f": allreduce(op=Op.MAX),
        "g": allreduce(prescale=2.0),
        "h": allreduce(shape=(100,)),
    }.items():
        controller.submit(0, name, request, 0.0)
        controller.submit(1, name, request, 0.0)
    names = ["".join(decision.names) for decision in controller.decide()]
    assert names == ["abc", "d", "e", "f", "g", "h"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (allreduce(shape=(3,)), "rank 0 asks for shape (2,), rank 2 for shape (3,)"),
        (allreduce(dtype=DType.INT32), "rank 0 asks for dtype float32, rank 2 for dtype int32"),
        (allreduce(op=Op.MIN), "rank 0 asks for op sum, rank 2 for op min"),
        (allreduce(prescale=0.5), "rank 0 asks for prescale factor 1.0, rank 2 for prescale factor 0.5"),
        (allreduce(postscale=3.0), "rank 0 asks for postscale factor 1.0, rank 2 for postscale factor 3.0"),
        (allreduce(device="cuda:0"), "rank 0 asks for device cpu, rank 2 for device cuda:0"),
        (
            Request(Kind.ALLGATHER, ((F4, (2,)),)),
            "rank 0 asks for operation allreduce, rank 2 for operation allgather",
        ),
        (
            Request(Kind.ALLREDUCE, ((F4, (2,)), (F4, (2,))), Op.SUM),
            "rank 0 asks for number of tensors 1, rank 2 for number of tensors 2",
        ),
    ],
)
def test_what_differs_is_told_to_all_with_both_values(other, says):
    controller = Controller(3)
    (decision,) = ask(controller, {0: allreduce(), 1: allreduce(), 2: other})
    assert decision.members == (0, 1, 2)
    assert decision.verdict.error == "MismatchError"
    assert decision.verdict.message.startswith(f"'t': {says}")
    (decision,) = ask(controller, dict.fromkeys(range(3), allreduce()))
    assert decision.verdict is None


def test_roots_and_rows():
    controller = Controller(2)
    roots = [Request(Kind.BROADCAST, ((F4, (2,)),), root=root) for root in (0, 1)]
    (decision,) = ask(controller, dict(enumerate(roots)))
    assert "root 0" in decision.verdict.message and "root 1" in decision.verdict.message
    rows = [Request(Kind.ALLGATHER, ((F4, (count, 3)), (F4, (1,)))) for count in (4, 0)]
    (decision,) = ask(controller, dict(enumerate(rows)))
    assert decision.table == ((4, 1), (0, 1))
    widths = [Request(Kind.ALLGATHER, ((F4, (1, width)),)) for width in (3, 4)]
    (decision,) = ask(controller, dict(enumerate(widths)))
    assert "shape (1, 3)" in decision.verdict.message and "shape (1, 4)" in decision.verdict.message


def test_joined_ranks_are_not_waited_for():
    controller = Controller(3)
    assert ask(controller, {0: allreduce(), 1: allreduce()}) == []
    controller.submit(2, "join.0", Request(Kind.JOIN), 0.0)
    (decision,) = controller.decide()
    assert decision.members == (0, 1, 2) and decision.requests == (allreduce(),)
    refused = Request(Kind.ALLGATHER, ((F4, (1,)),), joinable=False)
    (decision,) = ask(controller, {0: refused, 1: refused})
    assert decision.members == (0, 1)
    assert "allgather is not possible while a rank has joined, and rank 2 has" in decision.verdict.message
    gathered = Request(Kind.ALLGATHER, ((F4, (5,)),))
    (decision,) = ask(controller, {0: gathered, 1: gathered})
    assert decision.table == ((5,), (5,), (0,))
    (decision,) = ask(controller, {r: Request(Kind.BROADCAST, ((F4, (1,)),), root=2) for r in (0, 1)})
    assert "can't be broadcast from rank 2, which has joined" in decision.verdict.message
    controller.submit(1, "join.7", Request(Kind.JOIN), 0.0)
    assert controller.decide() == []
    controller.submit(0, "join.0", Request(Kind.JOIN), 0.0)
    ended = controller.decide()
    assert {(each.names, each.members, each.number) for each in ended} == {
        (("join.0",), (2,), 0),
        (("join.7",), (1,), 0),
        (("join.0",), (0,), 0),
    }


def test_groups_have_names_and_ranks_of_their_own():
    controller = Controller(3)
    (decision,) = ask(controller, dict.fromkeys(range(3), Request(Kind.ADD_GROUP, splits=(0, 2))))
    group = decision.number
    assert ask(controller, {0: allreduce(), 0 + 1: allreduce()}) == []
    (decision,) = ask(controller, {0: allreduce(group=group), 2: allreduce(group=group)})
    assert decision.members == (0, 2)
    (decision,) = ask(controller, dict.fromkeys(range(3), Request(Kind.ADD_GROUP, splits=(0, 2))), "again")
    assert "already" in decision.verdict.message
    sets = {r: Request(Kind.ADD_GROUP, splits=(0, r)) for r in range(3)}
    (decision,) = ask(controller, sets, "differ")
    assert "ranks [0, 0]" in decision.verdict.message and "ranks [0, 1]" in decision.verdict.message
    controller.submit(0, "left over", allreduce(group=group), 0.0)
    removal = dict.fromkeys(range(3), Request(Kind.REMOVE_GROUP, root=group))
    refused, done = ask(controller, removal, "remove")
    assert done.verdict is None
    assert refused.members == (0,) and "was removed meanwhile" in refused.verdict.message


def test_a_rank_that_left_is_named_to_those_who_need_it():
    controller = Controller(3)
    (decision,) = ask(controller, dict.fromkeys(range(3), Request(Kind.ADD_GROUP, splits=(0, 1))))
    group = decision.number
    controller.submit(0, "before", allreduce(), 0.0)
    controller.leave(2, 2, "raised ValueError: bad sample")
    (decision,) = controller.decide()
    assert decision.members == (0,)
    assert decision.verdict == ("PeerLost", "raised ValueError: bad sample", 2)
    (decision,) = ask(controller, {1: allreduce()}, "after")
    assert decision.members == (1,) and decision.verdict.rank == 2
    (decision,) = ask(controller, {0: allreduce(group=group), 1: allreduce(group=group)})
    assert decision.verdict is None
    controller.submit(0, "join.0", Request(Kind.JOIN), 0.0)
    (decision,) = controller.decide()
    assert decision.verdict.rank == 2


def test_stalls_are_named_once_a_while_and_can_end():
    controller = Controller(2)
    assert controller.next_look_s(2.0, 4.0) is None
    controller.submit(0, "model_1/w", allreduce(), now_s=10.0)
    controller.submit(1, "model/w", allreduce(), now_s=10.5)
    assert controller.next_look_s(2.0, 4.0) == 12.0
    assert controller.find_stalled(2.0, 4.0, 11.9) == ""
    warning = controller.find_stalled(2.0, 4.0, 13.0)
    assert "allreduce 'model_1/w' has waited for 3 s: asked for by rank 0, not by rank 1" in warning
    assert "allreduce 'model/w' has waited for 2 s: asked for by rank 1, not by rank 0" in warning
    assert "names look alike" in warning
    assert controller.find_stalled(2.0, 4.0, 13.5) == ""
    controller.find_stalled(2.0, 4.0, 14.0)
    ended = controller.decide()
    assert [(each.names, each.members) for each in ended] == [(("model_1/w",), (0,)), (("model/w",), (1,))]
    assert {each.verdict.error for each in ended} == {"StallError"}
    assert len({each.verdict.message for each in ended}) == 1
    assert controller.idle
