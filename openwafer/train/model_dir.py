"""The folder of a run: checkpoints and metrics. One run at a time trains in it."""

import contextlib
from contextlib import AbstractContextManager

from openwafer.errors import UserError
from openwafer.file_lock import FileLock
from openwafer.train.config import TrainConfig


def only_run(train: TrainConfig) -> AbstractContextManager[object]:
    """Holds the model_dir while a run trains; evaluating may go on beside it."""
    if train.mode == "eval":
        return contextlib.nullcontext()
    folder = train.model_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(
            folder / ".lock", f"another run is training in {folder}: wait for it, or give this one its own --model_dir"
        )
    except OSError as error:
        raise UserError(
            f"cannot use model_dir {folder}: {error.strerror or error}; choose another --model_dir"
        ) from None
