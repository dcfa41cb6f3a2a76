"""`openwafer` with devices of host memory (late_gpu.py) in place of GPUs; with three numbers, a stage of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from openwafer.cli.main import main
from openwafer.serve.gpu import opening
from openwafer.serve.pipeline import stage
from openwafer.serve.pipeline.processes import StageProcesses
from tests.serve.gpu.late_gpu import LateGpus

if __name__ == "__main__":
    opening.Gpus = LateGpus
    StageProcesses.program = (__file__,)
    if sys.argv[1].isdigit():
        stage.main()
    sys.exit(main(sys.argv[1:]))
