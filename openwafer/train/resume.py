"""What may change between a checkpoint and the run that goes on from it.

model, optimizer kind, tokenizer     refused: the weights or their state would not fit
seed                                 refused: a run has one order of samples, which the seed and the step give
batch_size, context, data            said: the place in the order of samples moves
other optimizer settings, micro-batches    said: the rest of the run is not what the old settings would give
everything else                      free: learning rate, schedule, num_steps, where state and output go
"""

import json
from collections.abc import Mapping
from typing import Any

from openwafer.errors import UserError

Params = Mapping[str, Any]  # sections of a params file, as plain values

_ORDER = {"train": ("batch_size",), "data": ("path", "context", "vocab_size")}
_FREE = {"optimizer": ("kind", "lr")}


def changes(where: str, step: int, before: Params, now: Params) -> list[str]:
    """Sentences about what changed since the checkpoint `where` of this step; an error if it cannot go on.

    Sections and keys that the checkpoint does not name (an imported model has only `model`) are not compared.
    """
    now = json.loads(json.dumps(now))  # as the checkpoint has it: lists, not tuples
    _refuse_other_model(where, before, now)
    if step == 0:  # nothing was trained yet: all settings begin here
        return []
    _refuse_other_kind(where, before, now)
    if now.get("train", {}).get("mode") == "eval":  # the weights alone count
        return []
    seed = _changed(before, now, "train", ("seed",))
    if seed:
        raise UserError(
            f"{where} was trained with another seed ({seed[0]}), which gives the order of samples: go on with that "
            "seed, or start anew in another --model_dir"
        )
    lines = []
    order = [text for section, keys in _ORDER.items() for text in _changed(before, now, section, keys)]
    if order:
        lines.append(
            f"changed since {where}: {', '.join(order)}: the order of samples goes on from another place, "
            "so some may come again and others not at all in this pass over the data"
        )
    settings = tuple(key for key in now.get("optimizer", {}) if key not in _FREE["optimizer"])
    others = _changed(before, now, "optimizer", settings)
    train = now.get("train", {})
    if not (train.get("device") == "cuda" and train.get("micro_batch_size") is None):  # there it stays as it was
        others += _changed(before, now, "train", ("micro_batch_size",))
    if others:
        lines.append(f"changed since {where}: {', '.join(others)}: from here on the run differs from what it was")
    return lines


def _refuse_other_model(where: str, before: Params, now: Params) -> None:
    changed = _changed(before, now, "model", now["model"])
    if changed:
        raise UserError(
            f"{where} holds another model ({changed[0]}): use another --model_dir, or the params it was trained with"
        )


def _refuse_other_kind(where: str, before: Params, now: Params) -> None:
    kinds = [params.get("optimizer", {}).get("kind") for params in (before, now)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise UserError(
            f"{where} was trained with the optimizer {kinds[0]}, not {kinds[1]}, whose state it has not: "
            f"go on with {kinds[0]}, or start anew in another --model_dir"
        )


def _changed(before: Params, now: Params, section: str, keys: Any) -> list[str]:
    old, new = before.get(section), now.get(section, {})
    if old is None:
        return []
    known = [key for key in keys if key in new and (key in old or section == "model")]
    return [f"{key} was {old.get(key)}, is {new[key]}" for key in known if new[key] != old.get(key)]
