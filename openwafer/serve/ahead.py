"""Planning a step before the last one's tokens are known, for a runner that can follow them by itself.

A sequence whose token is being drawn gets an UNKNOWN one, is planned with it, and loses it again when the token
comes. What a sequence computes after its own end is dropped. So answers are the same as without; but the host plans
while the device computes.
"""

from openwafer.serve.batching import Flight
from openwafer.serve.sequence import UNKNOWN, Sequence


def go_ahead(flight: Flight, max_context: int) -> bool:
    """After a launch: give sequences that may go on an UNKNOWN token; the others wait for theirs.

    False if a later step must not be planned before this one has landed: somebody would be left out of it.
    """
    is_free = True
    for work, place in zip(flight.works, flight.drawn_places(), strict=True):
        sequence = work.sequence
        if not work.draws:
            continue
        if place is None:
            is_free = False
        elif sequence.num_drawn + 1 < sequence.request.sampling.max_tokens and len(sequence.tokens) + 1 < max_context:
            sequence.in_flight = False
            sequence.num_computed = work.stop
            sequence.tokens.append(UNKNOWN)
            sequence.num_ahead += 1
            sequence.drawn_at = place
    return is_free


def step_back(sequence: Sequence) -> tuple[int, int, bool]:
    """Before the first UNKNOWN token is looked at: take them away. Returns what `catch_up` needs."""
    state = sequence.num_ahead, sequence.num_computed, sequence.in_flight
    del sequence.tokens[-sequence.num_ahead :]
    sequence.num_ahead = 0
    return state


def catch_up(sequence: Sequence, num_ahead: int, num_computed: int, in_flight: bool) -> None:
    """One token has become known; those of later steps have not."""
    sequence.tokens += [UNKNOWN] * (num_ahead - 1)
    sequence.num_ahead = num_ahead - 1
    sequence.num_computed = num_computed
    sequence.in_flight = in_flight
