"""Floats that are sent in one size and received in another are refused; whatever may be meant is not."""

import pytest

from openwafer.errors import UserError
from openwafer.fabric import EAST, RAMP, WEST, Layout, ProgramBuilder, Rect, Simulation
from openwafer.systems import WSE2


def sender(pe: ProgramBuilder, *, dtypes: tuple[str, ...], skip_zeros: bool = False) -> None:
    with pe.task("main", start=True):
        for dtype in dtypes:
            pe.mov(pe.send(0), pe.array(f"x_{dtype}", 4, dtype), skip_zeros=skip_zeros)


def receiver(pe: ProgramBuilder, *, dtypes: tuple[str, ...]) -> None:
    with pe.task("main", start=True):
        for dtype in dtypes:
            pe.mov(pe.array(f"y_{dtype}", 4, dtype), pe.receive(0))


def each_word(pe: ProgramBuilder) -> None:
    y, word = pe.array("y", 1), pe.register()
    with pe.task("each", on=pe.receive(0), word=word):
        pe.store(y, word)


def two_pes() -> Layout:
    layout = Layout(WSE2, 2, 1)
    layout.route(0, Rect(0, 0), RAMP, EAST)
    layout.route(0, Rect(1, 0), WEST, RAMP)
    return layout


def check(sent: tuple[str, ...], received: tuple[str, ...]) -> None:
    layout = two_pes()
    layout.place(sender, Rect(0, 0), dtypes=sent)
    layout.place(receiver, Rect(1, 0), dtypes=received)
    Simulation(layout, engine="reference")


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        (
            ("f16",),
            ("f32",),
            r"PE \(1, 0\): colour 0 is received as f32, but sent as f16: receive what is sent, and con",
        ),
        (("f32",), ("bf16",), r"PE \(1, 0\): colour 0 is received as bf16, but sent as f32: "),
        (("f16", "bf16"), ("f16", "f32"), r"PE \(1, 0\): colour 0 is received as f32, but sent as f16, bf16: "),
        (("f16", "f32"), ("f16",), r"PE \(0, 0\): colour 0 is sent as f32, but received as f16: convert before"),
    ],
)
def test_floats_of_different_sizes_are_refused(sent: tuple[str, ...], received: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(sent, received)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (("f16",), ("f16",)),
        (("f16", "f32"), ("f32", "f16")),  # in which order is known when it runs
        (("f16",), ("bf16",)),  # bits of the same size
        (("f16",), ("i32",)),  # the bits of a word
        (("i32",), ("i16",)),  # their lower half
        (("f32", "i32"), ("f16",)),
    ],
)
def test_what_may_be_meant_is_not_refused(sent: tuple[str, ...], received: tuple[str, ...]) -> None:
    check(sent, received)


def test_words_with_an_index_and_words_for_a_task_are_not_refused() -> None:
    layout = two_pes()
    layout.place(sender, Rect(0, 0), dtypes=("f16",), skip_zeros=True)
    layout.place(receiver, Rect(1, 0), dtypes=("f32",))
    Simulation(layout, engine="reference")
    layout = two_pes()
    layout.place(sender, Rect(0, 0), dtypes=("f16",))
    layout.place(each_word, Rect(1, 0))
    Simulation(layout, engine="reference")


def test_a_program_without_pes_has_no_say() -> None:
    layout = two_pes()
    layout.place(sender, Rect(0, 0), dtypes=("f32",))
    layout.place(receiver, Rect(1, 0), dtypes=("f32",))
    layout.place(receiver, Rect(0, 0, 0, 0), dtypes=("f16",))
    Simulation(layout, engine="reference")
