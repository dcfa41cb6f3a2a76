import json
import math
import os

import pytest

from openwafer.errors import UserError
from openwafer.train.metrics import MetricsLog, StepMetrics, read_metrics


def metrics(step, loss=2.5):
    return StepMetrics(step=step, loss=loss, grad_norm=None, lr=1e-3, tokens_per_s=100.0, time=1.0)


def write(model_dir, steps, resumed_step=0, loss=2.5):
    with MetricsLog(model_dir, resumed_step) as log:
        for step in steps:
            log.write(metrics(step, loss))
    return model_dir / "metrics.jsonl"


def steps_of(path):
    return [record["step"] for record in read_metrics(path)]


def test_records(tmp_path):
    path = write(tmp_path / "new" / "run", [1, 2])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == read_metrics(path)
    assert records[0] == {
        "step": 1,
        "loss": 2.5,
        "grad_norm": None,
        "lr": 0.001,
        "tokens_per_s": 100.0,
        "time": 1.0,
        "skipped": False,
        "eval_loss": None,
        "step_s": None,
        "spent_s": None,
        "broadcast_bytes": None,
        "reduced_bytes": None,
        "csx": None,
    }


def test_each_record_is_on_disk_at_once(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(metrics(1))
        assert steps_of(log.path) == [1]


def test_resume_drops_what_will_be_done_again(tmp_path):
    write(tmp_path, range(1, 8))
    path = write(tmp_path, [5, 6], resumed_step=4, loss=1.0)
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in read_metrics(path)] == [2.5] * 4 + [1.0] * 2
    assert steps_of(write(tmp_path, [1])) == [1]


def test_resume_beyond_what_was_written(tmp_path):
    write(tmp_path, [1, 2])
    assert steps_of(write(tmp_path, [10], resumed_step=9)) == [1, 2, 10]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\0\0\0\0", b"\xff\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = write(tmp_path, [1, 2])
    path.write_bytes(path.read_bytes() + torn)
    assert steps_of(path) == [1, 2]
    assert steps_of(write(tmp_path, [3, 4], resumed_step=2)) == [1, 2, 3, 4]


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = write(tmp_path, [1, 2, 3])
    before = path.read_bytes().replace(b'{"step": 2', b'{"stop": 2')
    path.write_bytes(before)
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2"):
        MetricsLog(tmp_path, 3)
    assert path.read_bytes() == before


def test_nan_is_valid_json(tmp_path):
    path = write(tmp_path, [1], loss=math.nan)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        MetricsLog(tmp_path / "file")


def test_a_full_disk_is_an_error_that_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, line: len(line) // 2)  # as at the end of a disk
    with MetricsLog(tmp_path) as log, pytest.raises(UserError, match=r"metrics.jsonl.*No space left.*command resumes"):
        log.write(metrics(1))
