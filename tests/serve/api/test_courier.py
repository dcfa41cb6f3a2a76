"""Events from the engine's thread: all of them, in order, in few wake-ups."""

import asyncio
import threading

from openwafer.serve.api.courier import Courier
from openwafer.serve.core import Event


def test_all_events_in_order_from_several_threads():
    num_threads, num_events = 4, 500

    async def main() -> tuple[list[list[tuple[int, ...]]], int]:
        courier = Courier(asyncio.get_running_loop())
        inbox = courier.inbox()

        def write(index: int) -> None:
            for number in range(num_events):
                courier.send(inbox, index, Event(tokens=(number,)))

        threads = [threading.Thread(target=write, args=(index,)) for index in range(num_threads)]
        for thread in threads:
            thread.start()
        received: list[list[tuple[int, ...]]] = [[] for _ in threads]
        num_wakes = 0
        while sum(map(len, received)) < num_threads * num_events:
            for index, event in await asyncio.wait_for(inbox.get(), 10):
                received[index].append(event.tokens)
            num_wakes += 1
        for thread in threads:
            thread.join()
        return received, num_wakes

    received, num_wakes = asyncio.run(main())
    assert received == [[(number,) for number in range(num_events)]] * num_threads
    assert num_wakes < num_threads * num_events


def test_events_after_the_loop_has_gone_are_dropped():
    async def main() -> Courier:
        return Courier(asyncio.get_running_loop())

    courier = asyncio.run(main())
    inbox = courier.inbox()
    for _ in range(3):
        courier.send(inbox, 0, Event(tokens=(1,)))
