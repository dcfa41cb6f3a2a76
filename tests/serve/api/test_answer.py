"""An answer in pieces is the answer: text, tokens and logprobs agree however events are cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.serve.api.answer import Answer
from openwafer.serve.api.vocabulary import Vocabulary
from openwafer.serve.core import Event
from tests.serve.script_engine import logprob_of
from tests.serve.script_server import TOKENIZER

VOCABULARY = Vocabulary(TOKENIZER)


@settings(max_examples=80, deadline=None)
@given(
    st.text("abENé ", max_size=14), st.lists(st.text("abENé ", min_size=1, max_size=3), max_size=2), st.integers(1, 4)
)
def test_pieces_agree(text: str, stops: list[str], step: int):
    ids = TOKENIZER.encode(text)
    num_stopped = 0

    def on_stop() -> None:
        nonlocal num_stopped
        num_stopped += 1

    answer = Answer(VOCABULARY, tuple(stops), on_stop)
    shown, tokens, logprobs = "", [], []
    for start in range(0, len(ids), step):
        batch = tuple(ids[start : start + step])
        piece = answer.push(Event(tokens=batch, logprobs=tuple(logprob_of(token, 1) for token in batch)))
        if piece is not None:
            shown, tokens, logprobs = shown + piece.text, tokens + piece.tokens, logprobs + piece.logprobs
    last = answer.push(Event(finish_reason="length"))
    assert last is not None
    shown, tokens, logprobs = shown + last.text, tokens + last.tokens, logprobs + last.logprobs
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    assert num_stopped == bool(ends)
    assert last.finish_reason == ("stop" if ends else "length")
    assert text.startswith(shown)
    assert shown == text if not ends else len(shown) >= min(ends)
    assert not any(stop in shown for stop in stops)
    # The tokens are those whose text begins inside what is shown, each with its own logprob.
    assert tokens == ids[: len(tokens)]
    assert [token for token, _ in logprobs] == tokens
    assert TOKENIZER.decode(tokens).startswith(shown)
    assert not tokens or len(TOKENIZER.decode(tokens[:-1]).rstrip("\ufffd")) < max(len(shown), 1)
