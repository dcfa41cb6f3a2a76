"""Stop strings found in pieces are those found in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from openwafer.serve.api.stop import StopFinder


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_pieces_show_what_the_whole_text_shows(text: str, stops: list[str], step: int):
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    finder, shown, found = StopFinder(tuple(stops)), "", False
    for start in range(0, len(text), step):
        piece, found = finder.push(text[start : start + step])
        shown += piece
        # What is shown never holds a part of a stop string that is found later.
        assert text.startswith(shown)
        assert not ends or len(shown) <= min(ends) or found
        if found:
            break
    if not found:
        shown += finder.flush()
    assert found == bool(ends)
    if step == 1 and ends:
        # The one that is complete first wins.
        assert any(shown == text[:at] for at in ends)
    elif not ends:
        assert shown == text
