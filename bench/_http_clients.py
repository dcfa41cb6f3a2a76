"""A process of streaming clients for `http_gpu.py`: one job per line on stdin, one answer per line on stdout.

Imports nothing heavy, so that it starts at once and costs the server's process nothing. Times are of the clock that
all processes of a machine share.
"""

import asyncio
import json
import sys
import time
from typing import Any

# Every token of the bench's vocabulary begins with this and has it nowhere else, nor has the JSON around it.
MARK = " w"


async def one_stream(port: int, body: bytes) -> dict[str, list[Any]]:
    """When each piece of text came, and how many tokens it had."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode("utf-8", "replace"))
    mark, times, counts, is_whole = MARK.encode(), [], [], False
    while line := await reader.readline():
        if num_tokens := line.count(mark):
            times.append(time.perf_counter())
            counts.append(num_tokens)
        elif b'"error"' in line:
            raise RuntimeError(line.decode("utf-8", "replace"))
        is_whole = is_whole or line == b"data: [DONE]\n"
    writer.close()
    if not is_whole:
        raise RuntimeError("a stream was cut off")
    return {"times": times, "counts": counts}


def streams(port: int, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """All at once."""
    import uvloop

    bodies = [json.dumps({**request, "stream": True}).encode() for request in requests]

    async def main() -> dict[str, Any]:
        began = time.perf_counter()
        return {"began": began, "heard": await asyncio.gather(*(one_stream(port, body) for body in bodies))}

    return uvloop.run(main())


def through_openai(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """The same through the real client, as people write it."""
    try:
        import openai
    except ImportError:
        return {"version": None}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    times, text, usage, reason = [], "", None, None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            if choice.text:
                times.append(time.perf_counter())
                text += choice.text
    assert usage is not None, "there was no usage in the last chunk"
    return {
        "version": openai.__version__,
        "num_tokens": text.count(MARK),
        "seconds": times[-1] - times[0],
        "finish_reason": reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


JOBS = {"streams": streams, "openai": through_openai}


def main() -> None:
    # With PYTHONUNBUFFERED, `print` loses what a pipe has no room for if uvloop's work interrupts the write.
    answers = open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = JOBS[job.pop("job")](**job)
        except Exception as error:  # noqa: BLE001 - the bench's own process says it
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
