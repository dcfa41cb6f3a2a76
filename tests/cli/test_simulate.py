"""`openwafer simulate`."""

import json
import re
from pathlib import Path

import pytest

from openwafer.cli.main import main


def test_json_has_cycles_utilisation_and_stalls(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-pes", "512", "--words=4096", "--algorithm", "two_phase", "--step", "8", "--json"]
    assert main(["simulate", "reduce", "--system", "wse2", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    # The vendor's simulator: 9117.
    assert result["cycles"] == pytest.approx(9117, rel=0.015)
    assert 0 < result["pe_utilisation"] < 1
    assert 0 < result["link_utilisation"] < 1
    assert set(result["stalls"]) == {"room", "link", "words"}
    assert (result["seed"], result["engine"], result["clock_hz"]) == (0, "c", 1.1e9)
    assert result["seconds"] == pytest.approx(result["cycles"] / 1.1e9)


def test_json_says_how_it_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num_pes", "3", "--words", "5", "--seed", "7", "--clock_ghz", "0.5", "--engine", "reference", "--json"]
    assert main(["simulate", "reduce", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seed"], result["engine"], result["clock_hz"]) == (7, "reference", 0.5e9)
    assert result["seconds"] == pytest.approx(result["cycles"] * 2e-9)


def test_the_picture_and_the_trace_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    picture, trace = tmp_path / "wafer.svg", tmp_path / "link" / "wafer.svg"
    assert main(["simulate", "broadcast", "--heat_map", str(picture), "--trace", str(trace)]) == 2
    assert "wafer.svg: name two files" in capsys.readouterr().err
    assert not picture.exists()


def test_heat_map_and_trace_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "wafer.svg", tmp_path / "trace.json"
    flags = ["--width", "5", "--height", "4", "--depth", "8", "--heat_map", str(picture), "--trace", str(trace)]
    assert main(["simulate", "stencil", "--system", "cs3", *flags]) == 0
    drawn = picture.read_text()
    assert drawn.count("<title>PE (") == 20
    assert re.search(r"<text[^>]*>stencil on cs3, 5 x 4 PEs, [0-9,]+ cycles<", drawn)
    events = json.loads(trace.read_text())["traceEvents"]
    tasks = [event for event in events if event.get("name") == "main"]
    assert len(tasks) == 20
    assert max(event["ts"] + event["dur"] for event in tasks) <= 3000
    assert "cycles" in capsys.readouterr().out


def test_a_long_trace_is_cut_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openwafer.fabric.engine.MAX_SPANS", 7)
    trace = tmp_path / "trace.json"
    assert main(["simulate", "broadcast", "--width", "5", "--height", "4", "--trace", str(trace)]) == 0
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"]) == 7
    assert "the trace ends early, after 7 tasks and transfers" in capsys.readouterr().err


def test_host_copies_count_both_ways_and_in_cycles_of_the_chosen_clock(capsys: pytest.CaptureFixture[str]) -> None:
    cycles = []
    for clock in ("1.1", "2.2"):
        assert main(["simulate", "reduce", "--num_pes", "100", "--words", "500", "--clock_ghz", clock, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["io_words"] == 101 * 500  # all vectors in, the sum back
        cycles.append(result["io_cycles"])
    assert cycles == [round(50_500 * 32 / 1.2e12 * 1.1e9), round(50_500 * 32 / 1.2e12 * 2.2e9)]


def test_a_png_heat_map_is_chosen_by_its_suffix(tmp_path: Path) -> None:
    picture = tmp_path / "wafer.PNG"
    assert main(["simulate", "broadcast", "--width", "5", "--height", "4", "--heat_map", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("is_terminal", "lines"), [(True, r"(\rcycle [\d,]+){5,}\n"), (False, r"(cycle [\d,]+\n){5,}")]
)
def test_progress_is_shown_and_leaves_stdout_to_json(
    is_terminal: bool, lines: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr("openwafer.cli.simulate.PAUSES_S", (0.0, 0.0))
    assert main(["simulate", "axpy", "--sparsity", "0", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cycles"] > 40_000
    assert re.fullmatch(lines, printed.err)


def test_the_reference_reports_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for engine in ("c", "reference"):
        flags = ["--width", "3", "--height", "3", "--depth", "24", "--engine", engine, "--json"]
        assert main(["simulate", "stencil", *flags]) == 0
        results.append(json.loads(capsys.readouterr().out))
    same = ("cycles", "pe_utilisation", "link_utilisation", "stalls", "io_words", "io_cycles", "max_error")
    assert [results[0][key] for key in same] == [results[1][key] for key in same]
    assert min(results[0]["stalls"].values()) > 0


def test_another_suffix_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "wafer.jpg"
    assert main(["simulate", "broadcast", "--heat_map", str(picture)]) == 2
    printed = capsys.readouterr()
    assert ".svg or .png" in printed.err
    assert "wafer.jpg" in printed.err
    assert "cycles" not in printed.out
    assert not picture.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gemvv"], "gemv"),
        (["gemv", "--system", "wse9"], "unknown wafer 'wse9': did you mean"),
        (["gemv", "--grid", "7", "--size", "10"], "--size must be a multiple of --grid, got 10 and 7"),
        (["reduce", "--num_pes", "800"], "at most 750 on wse2"),
        (["reduce", "--clock_ghz", "0"], "--clock_ghz must be above 0"),
        (["reduce", "--clock_ghz", "inf"], "--clock_ghz must be above 0 and finite, got inf"),
        (["reduce", "--num_pes", "9" * 20], "--num_pes must be at most 1,000,000, got 99,999,999,999,999,999,999"),
        (["stencil", "--steps", "99999999999"], "--steps must be at most 1,000,000, got 99,999,999,999"),
        (["reduce", "--tokens", "4"], "unknown flag --tokens: known: --algorithm, --clock_ghz, --engine, --heat_map,"),
        (["reduce", "--seed", "-1"], "--seed must not be negative, got -1"),
        (["reduce", "--num_pes", "-5"], "--num_pes must be at least 2, got -5"),
        (["reduce", "--algorithm", "ring"], "--algorithm must be one of chain, two_phase, tree, got 'ring'"),
        (["reduce", "--num_pes", "9", "--words", "20000"], "PE of wse2: lower --words to 12288 or less"),
        (["gemv", "--grid", "9", "--size", "3150"], "--size 3150: this takes more than the 49,152 bytes of a PE of"),
        (
            ["gemm", "--grid", "800", "--size", "800"],
            "PEs does not fit wse2: at most 750 x 994: lower --grid",
        ),
        (["spmm", "--density", "0"], "--density must be at least 0.0005 for a non-zero in the 16 x 128 block of a PE"),
        (["gemm", "--grid", "7", "--size", "56", "--algorithm", "mesh"], "--grid must be even for --algorithm mesh"),
        (["reduce", "--trace", "no/such/folder.json"], "cannot write no/such/folder.json: its folder does not exist"),
    ],
)
def test_mistakes_get_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
