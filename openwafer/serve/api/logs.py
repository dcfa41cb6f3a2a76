"""Log lines as JSON objects, one per line on stderr. Keys, prompts and answers never get there."""

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """`extra={"fields": {...}}` of a log call become fields of the object."""

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line = {"time": now, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        text = f"{now} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        # What clients wrote must not be able to fake a line or to steer a terminal.
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is when a line comes, not to what it was at the start."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def configure(form: str) -> None:
    """Our lines and uvicorn's warnings."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name, level in (("openwafer.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
