"""Whose turn it is."""

from openwafer.serve.core import Request, Sampling
from openwafer.serve.fair_queue import FairQueue
from openwafer.serve.sequence import Sequence


def sequence(name: str) -> Sequence:
    client = name[0]
    request = Request(id=name, prompt=(1,), sampling=Sampling(max_tokens=1), client=client)
    return Sequence(request=request, on_event=lambda event: None, seed=0, submitted_s=0.0, order=0)


def drained(queue: FairQueue) -> list[str]:
    names = []
    while (shown := queue.peek()) is not None:
        taken = queue.pop()
        assert taken is shown
        names.append(taken.request.id)
    assert len(queue) == 0
    return names


def test_clients_take_turns_and_keep_their_own_order() -> None:
    queue = FairQueue()
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(sequence(name))
    assert len(queue) == 6
    assert drained(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_that_gave_way_comes_first() -> None:
    queue = FairQueue()
    for name in ("a1", "b1", "b2"):
        queue.push(sequence(name))
    queue.push_front(sequence("b0"))
    assert drained(queue) == ["b0", "a1", "b1", "b2"]


def test_removed_ones_are_gone() -> None:
    queue = FairQueue()
    sequences = [sequence(name) for name in ("a1", "a2", "b1")]
    for one in sequences:
        queue.push(one)
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert [one.request.id for one in queue] == ["a2"]
    assert drained(queue) == ["a2"]
