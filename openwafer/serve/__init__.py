"""Serving: an engine that decodes many requests at once, and the OpenAI-compatible server and pages in front of it.

Start reading at `core.py`: what a request is, what comes back, and what an engine does. The engine knows token ids
only; text, templates, stop strings and JSON belong to the server.
"""
