"""Configuration: what is accepted, what is refused, and in which words."""

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openwafer import config
from openwafer.config import option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["linear", "cosine"] = option("linear", help="shape of the schedule")
    warmup: int = option(help="steps of warm-up", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Sample:
    width: int = option(help="width of it", minimum=1)
    lr: float = option(3e-4, help="learning rate, 10% of the old one", minimum=0, maximum=1)
    seed: int | None = option(None, help="seed")
    fast: bool = option(False, help="go fast")
    name: str = option("run", help="name", choices=["run", "walk"])
    out: Path | None = option(None, help="folder")
    memory: int = option(0, help="bytes", size=True, minimum=0)
    level: Literal[1, 2] = option(1, help="level")
    mode: Literal["on", "off"] = option("on", help="mode")
    betas: tuple[float, float] = option((0.9, 0.95), help="betas", minimum=0, maximum=1)
    layers: tuple[int, ...] = option((), help="layers")
    schedule: Inner | None = option(None, help="schedule")
    derived: int = field(default=7, init=False)


def complaint(mapping: Any) -> str:
    with pytest.raises(UserError) as caught:
        config.parse(Sample, mapping)
    return str(caught.value)


def flags(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    config.add_flags(parser, Sample, [n for n in Sample.__dataclass_fields__ if n not in ("schedule", "derived")])
    return config.flag_values(Sample, parser.parse_args(argv))


def test_parse_builds_the_dataclass_with_defaults_and_nested_sections() -> None:
    sample = config.parse(Sample, {"width": 4, "schedule": {"warmup": 2}, "layers": [1, 2]})
    assert sample == Sample(width=4, schedule=Inner(warmup=2), layers=(1, 2))
    assert sample.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "width is missing: width of it"),
        (None, "params must be a mapping of keys to values, got None"),
        ([1], "params must be a mapping of keys to values, got [1]"),
        ({"width": 1, "widht": 2}, "unknown key 'widht': did you mean 'width'?"),
        ({"width": 1, "schedule": {"warmpu": 1}}, "unknown key 'schedule.warmpu': did you mean 'warmup'?"),
        ({"width": 1, "schedule": {}}, "schedule.warmup is missing: steps of warm-up"),
        ({"width": 1, "schedule": 3}, "schedule must be a mapping of keys to values, got 3"),
        ({"width": "4"}, "width must be a whole number, got '4'"),
        ({"width": True}, "width must be a whole number, got True"),
        ({"width": 4.0}, "width must be a whole number, got 4.0"),
        ({"width": None}, "width must be a whole number, got None"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"width": 1, "lr": 2}, "lr must be at most 1, got 2.0"),
        ({"width": 1, "lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"width": 1, "lr": float("nan")}, "lr must be a number, got nan"),
        ({"width": 1, "lr": 10**400}, "lr must be a number, got a number of 1329 bits"),
        ({"width": 1, "fast": 1}, "fast must be true or false, got 1"),
        ({"width": 1, "name": "crawl"}, "name must be one of run, walk, got 'crawl'"),
        ({"width": 1, "name": 3}, "name must be text, got 3"),
        ({"width": 1, "level": "1"}, "level must be one of 1, 2, got '1'"),
        ({"width": 1, "level": True}, "level must be one of 1, 2, got True"),
        ({"width": 1, "out": ""}, "out must be a path, got ''"),
        ({"width": 1, "betas": [0.9]}, "betas must be a list of 2 values, got [0.9]"),
        ({"width": 1, "betas": [0.9, 3]}, "betas[1] must be at most 1, got 3.0"),
        ({"width": 1, "layers": 3}, "layers must be a list, got 3"),
        ({"width": 1, "layers": [1, "x"]}, "layers[1] must be a whole number, got 'x'"),
        ({"width": 1, "memory": "4 GoB"}, "memory must be a size such as 4GiB or 500MB, got '4 GoB'"),
        ({"width": 1, "memory": -1}, "memory must be a size such as 4GiB or 500MB, got -1"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key_the_value_and_what_is_allowed(mapping, message) -> None:
    assert complaint(mapping) == message


def test_a_field_that_is_not_an_argument_is_unknown() -> None:
    assert complaint({"width": 1, "derived": 3}).startswith("unknown key 'derived': ")


def test_learning_rates_may_be_written_without_a_dot(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("width: 1\nlr: 3e-4\n")
    assert config.parse(Sample, config.load_yaml(tmp_path / "p.yaml")).lr == 3e-4


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5 kib", 1536),
        ("2K", 2048),
        ("7", 7),
        (7, 7),
        (2.0, 2),
        ("0.1TB", 10**11),
        ("9007199254740993", 2**53 + 1),  # not a float
    ],
)
def test_sizes(text, size_bytes: int) -> None:
    assert config.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1", "1e9", "4XB", "4 Gi B", "9" * 400, 1e300, float("inf"), True, None, [1]]
)
def test_bad_sizes(bad) -> None:
    with pytest.raises(UserError, match="size must be a size such as 4GiB or 500MB"):
        config.parse_size(bad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1 is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\nb: 2\na: 3\n", "line 3 is not valid YAML: the key 'a' is given twice"),
        ("a: {b: 1, b: 2}", "line 1 is not valid YAML: the key 'b' is given twice"),
        ("a: !!python/object/apply:os.system [ls]", "line 1 is not valid YAML: could not determine a"),
        ("a: !!int ''", "is not valid YAML: "),
        ("a: !!bool maybe", "is not valid YAML: "),
        ("a: !!timestamp never", "is not valid YAML: "),
        ("a: 2020-99-99", "is not valid YAML: month must be in 1..12"),
        ("[" * 5000, "is not valid YAML: "),
        ("a: \x00", "is not valid YAML: "),
    ],
)
def test_bad_yaml_names_the_file_and_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        config.load_yaml(tmp_path / "p.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'p.yaml'} {message}")


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("base: &b {x: 1, y: 2}\nother: {<<: *b, x: 3}\n")
    assert config.load_yaml(tmp_path / "p.yaml")["other"] == {"x": 3, "y": 2}


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xff")
    for path, message in [
        (tmp_path / "none.yaml", f"no such file: {tmp_path / 'none.yaml'}"),
        (tmp_path / "a\nb", "no such file: '"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (tmp_path / ("x" * 300), "cannot read "),
        (tmp_path / "latin", "cannot read "),
        (Path("a\0b"), "cannot read 'a\\x00b': "),
    ]:
        with pytest.raises(UserError) as caught:
            config.load_yaml(path)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_aliases_that_multiply_are_refused_quickly(tmp_path: Path) -> None:
    # Each line doubles: printing the value in full would take 2 ** 60 items.
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "p.yaml").write_text("\n".join([*lines, "width: *a59"]))
    width = config.load_yaml(tmp_path / "p.yaml")["width"]
    assert len(complaint({"width": width})) < 200


def test_flags_mean_the_same_as_keys() -> None:
    given = flags(
        *["--width=3", "--lr", "1e-3", "--seed", "null", "--fast", "true", "--name", "walk", "--out", "1"],
        *["--memory", "2KiB", "--level", "2", "--mode", "off", "--betas", "0.5,0.6", "--layers", "[1, 2]"],
    )
    assert Sample(**given) == Sample(
        width=3, lr=1e-3, fast=True, name="walk", out=Path("1"), memory=2048, level=2, mode="off",
        betas=(0.5, 0.6), layers=(1, 2),
    )  # fmt: skip


def test_only_flags_that_were_given_are_returned() -> None:
    assert flags("--lr", "0.5") == {"lr": 0.5}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--width", "x"], "--width must be a whole number, got 'x'"),
        (["--width", ""], "--width must be a whole number, got ''"),
        (["--seed", " "], "--seed must be a whole number, got ' '"),
        (["--fast", "1"], "--fast must be true or false, got '1': is `--fast true` meant?"),
        (["--memory", "much"], "--memory must be a size such as 4GiB or 500MB, got 'much'"),
        (["--betas", "1"], "--betas must be a list of 2 values, got [1]"),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        flags(*argv)
    assert str(caught.value) == message


def test_a_truth_value_may_be_left_out() -> None:
    assert flags("--fast") == flags("--fast", "true") == {"fast": True}
    assert flags("--fast", "--width", "2") == {"fast": True, "width": 2}
    assert flags("--fast", "false") == flags("--fast", "no") == {"fast": False}


def test_flag_help_comes_from_the_field() -> None:
    parser = argparse.ArgumentParser(prog="x")
    config.add_flags(parser, Sample, ["lr", "mode", "memory"])
    text = parser.format_help()
    assert "learning rate, 10% of the old one (default 0.0003)" in text
    assert "--mode on|off" in text
    assert "--memory SIZE" in text


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**4400, max_value=10**4401)
    | st.floats()
    | st.text(max_size=100)
    | st.dates()
    | st.binary(max_size=100)
)
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4),
    max_leaves=20,
)
KEYS = st.sampled_from(list(Sample.__dataclass_fields__))
# Mostly right keys, so that the values are looked at too.
MAPPINGS = st.dictionaries(KEYS | SCALARS, GARBAGE, max_size=5).map(lambda m: {"width": 1, **m})
# Pieces that mean something to YAML, in any order.
TOKENS = ["width", "lr", "schedule", "warmup", "!!int ", "!!bool ", "!!float ", "!!timestamp ", "!!binary "]
TOKENS += [
    "!!set ",
    "!!omap ",
    "!!pairs ",
    ": ",
    " ",
    "\n",
    "\t",
    "- ",
    "? ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
]
TOKENS += [
    "<<: ",
    "| ",
    "> ",
    "#",
    "%",
    "@",
    "0x",
    "=",
    "'",
    '"',
    "\\",
    "''",
    "~",
    ".inf",
    "1:30",
    "2020-99-99",
]
YAML_TEXT = st.lists(st.sampled_from(TOKENS) | st.text(max_size=5), max_size=20).map("".join)


def succeeds_or_explains(action) -> None:
    try:
        action()
    except UserError as error:
        message = str(error)
        assert message.strip()
        assert len(message.splitlines()) == 1
        assert len(message) < 1000


@settings(deadline=None, max_examples=150)
@given(MAPPINGS | GARBAGE)
@example({10**5000: 1})
@example({"width": 1, "memory": 10**5000})
@example({"width": 1, "level": 10**5000})
@example({"width": 1, "name": {"b": 1, 2: "a"}})
@example({"width": 1, "name": {frozenset([1]): 1}})
def test_any_mapping_is_parsed_or_explained(mapping: Any) -> None:
    succeeds_or_explains(lambda: config.parse(Sample, mapping))


@settings(deadline=None, max_examples=150)
@given(YAML_TEXT | st.text() | st.binary())
def test_any_file_is_parsed_or_explained(content: str | bytes) -> None:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.yaml"
        path.write_bytes(data)
        succeeds_or_explains(lambda: config.parse(Sample, config.load_yaml(path)))


@settings(deadline=None, max_examples=150)
@given(KEYS, GARBAGE)
def test_any_value_is_converted_or_explained(name: str, value: Any) -> None:
    field, kind = Sample.__dataclass_fields__[name], Sample.__annotations__[name]
    succeeds_or_explains(lambda: config.convert(value, kind, name, field.metadata))


@settings(deadline=None, max_examples=150)
@given(KEYS.filter(lambda name: name != "derived"), YAML_TEXT | st.text())
def test_any_flag_is_converted_or_explained(name: str, text: str) -> None:
    succeeds_or_explains(lambda: config.flag_values(Sample, argparse.Namespace(**{name: text})))
