"""The chat page: one file, served under a policy by which it loads nothing else and speaks to this server only."""

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path

from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html")


@lru_cache(maxsize=1)
def page() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    text = PAGE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": hash_of("script", text),
        "style-src": hash_of("style", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "Content-Security-Policy": "; ".join(f"{kind} {allowed}" for kind, allowed in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def hash_of(tag: str, text: str) -> str:
    """The one <script> or <style> of the page, named by its hash: no other will run."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def page_response() -> HTMLResponse:
    text, headers = page()
    return HTMLResponse(text, headers=headers)
