"""Options that contradict each other are refused, and importing the configuration does not import torch."""

import subprocess
import sys
from typing import Any

import pytest

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.models.config import ModelConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": True}, "qk_norm True needs family: llama"),
        ({"rope_theta": 5.0}, r"rope_theta 5\.0 needs family: llama"),
        ({"num_kv_heads": 2}, "num_kv_heads 2 needs family: llama"),
        ({"family": "llama", "head_dim": 5}, "head_dim 5 is odd"),
        ({"family": "llama", "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"num_heads": 3}, "num_heads 3 does not divide hidden_size 16"),
        (
            {"family": "llama", "rope_scaling": {"factor": 2.0, "low_freq_factor": 4.0}},
            r"high_freq_factor 4\.0 must be above",
        ),
    ],
)
def test_contradictions(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        parse(ModelConfig, {**SIZES, **options})


def test_importing_the_configuration_does_not_import_torch():
    code = "import sys, openwafer.models as m; m.ModelConfig; assert 'torch' not in sys.modules; m.GPT"
    subprocess.run([sys.executable, "-c", code], check=True)
