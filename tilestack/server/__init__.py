"""The OpenAI-compatible HTTP server and its chat page.

A request passes the middleware (`request_log`, `access`, `body_limit`), is read by `schemas`, checked against `limits`,
turned into token ids (`prompts`) and sampling parameters (`sampling`), and handed to the engine (`running`); what comes
back is shaped into an answer (`chat_answers`, `completion_answers`) or into events as it comes (`events`). OpenAI's newer
API, `responses`, and that of `anthropic` make a chat of each request and take the same steps.
"""

from tilestack.server.settings import Limits, ServerSettings

__all__ = ["Limits", "ServerSettings"]
