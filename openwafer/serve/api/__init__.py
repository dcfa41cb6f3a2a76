"""The HTTP side of serving: the OpenAI-compatible API, keys and limits, metrics, and the pages in `web/`.

Start at `app.py` (the routes), then `job.py` (what happens to a completion), `chat.py` and `completions.py`.
`service.py` is what a running server knows; `server.py` runs it.
"""
