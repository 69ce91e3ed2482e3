"""One streamed model behind OpenAI's and Anthropic's APIs.

Requests are checked before the engine sees them, and whatever fails fails for one client. See `serve`.
"""

from __future__ import annotations
